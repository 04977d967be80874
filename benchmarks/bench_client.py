"""laoka's bench client beside `vllm bench serve` and the server's own histograms, on one served sandbox host in one run:
`sudo LAOKA_SANDBOX_LAB=NAME python -m benchmarks.bench_client` (the lab's first host has to serve: laoka sandbox demo).

Both clients run on the host with the same Python, in turns. The model is a tiny one of random weights on a CPU: the table is about
clients, not about speed.
"""

from __future__ import annotations

import json
import sys
from statistics import fmean
from typing import Any

from laoka.sandbox import hosts
from laoka.sandbox.lab import HostFolder, open_lab

ROUNDS, REQUESTS, CONCURRENCY, LIMIT = 5, 24, 4, 0.03
ENGINE = "/opt/laoka/engines/current/bin"
AGENT = "/opt/laoka/agent/current/lib/python3.11/site-packages"
MODEL, WEIGHTS, URL = "tiny-qwen3", "/srv/laoka/models/current", "http://127.0.0.1:8000"
FIGURES = ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "output_throughput")
SCRIPT = """
import asyncio, json
from laoka.serving.bench.client import Client, Target
from laoka.serving.bench.engine_metrics import between
from laoka.serving.bench.figures import figures

async def main():
    async with Client(Target({url!r}, {model!r})) as client:
        await client.learn_tokens()
        await client.batch(client.prompts(4, 512), 16, 4)
        before = await client.snapshot()
        answers, duration_s = await client.batch(client.prompts({requests}, 512), 256, {concurrency})
        span = between(before, await client.snapshot())
    found = figures(answers, duration_s, {concurrency})
    found["server"] = dict(span.mean_ms)
    found["server_requests"] = span.requests
    found["prefix_hits"] = span.prefix_hits
    found["errors"] = [answer.error for answer in answers if answer.error]
    print(json.dumps(found))

asyncio.run(main())
"""


def ours(host: HostFolder, requests: int = REQUESTS, concurrency: int = CONCURRENCY) -> dict[str, Any]:
    """One repeat by laoka's client on the host, with the server's own means of the same span."""
    script = SCRIPT.format(url=URL, model=MODEL, requests=requests, concurrency=concurrency)
    done = hosts.execute(host, f"PYTHONPATH={AGENT} {ENGINE}/python -", stdin=script, deadline_s=240, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def theirs(host: HostFolder, seed: int) -> dict[str, Any]:
    """One repeat by `vllm bench serve` on the host, with a seed of its own so that no prompt was there before."""
    command = (
        f"set -a; . /etc/qwen-serve/env; set +a; cd /tmp && {ENGINE}/vllm bench serve --backend openai --base-url {URL} "
        f"--model {MODEL} --tokenizer {WEIGHTS} --dataset-name random --random-input-len 512 --random-output-len 256 --ignore-eos "
        f"--num-warmups 4 --num-prompts {REQUESTS} --max-concurrency {CONCURRENCY} --seed {seed} "
        "--percentile-metrics ttft,tpot,itl,e2el --save-result --result-dir /tmp --result-filename bench.json >/tmp/bench.log 2>&1 "
        "&& cat /tmp/bench.json || { tail -5 /tmp/bench.log >&2; exit 1; }"
    )
    found: dict[str, Any] = json.loads(hosts.execute(host, command, deadline_s=300, check=True).stdout)
    return found


def quiet(host: HostFolder) -> dict[str, Any]:
    """One repeat of ours that nobody else's request fell into (the watchdog asks a question now and then)."""
    while True:
        found = ours(host)
        if found["server_requests"] == REQUESTS:
            return found
        print("  another request fell into it: once more", flush=True)


def main() -> int:
    """Print the table. Exit status 1 when throughput, TPOT or E2EL differ by more than LIMIT from either."""
    host = hosts.listed(open_lab())[0]
    mine, vllm = [], []
    for number in range(ROUNDS):
        mine.append(quiet(host))
        vllm.append(theirs(host, 1000 + number))
        print(f"round {number + 1}: ours {mine[-1]['output_throughput']:.0f} tok/s, vllm bench serve "
              f"{vllm[-1]['output_throughput']:.0f} tok/s", flush=True)  # fmt: skip
    print("\nSIMULATED: a tiny model of random weights on a CPU\n")
    print(f"{'figure':<20}{'laoka':<11}{'vllm bench':<12}{'ratio':<9}{'server says':<13}{'ratio':<9}{'within 3 %':<10}")
    fine = True
    for figure in FIGURES:
        own, other = fmean(run[figure] for run in mine), fmean(run[figure] for run in vllm)
        short = figure.removeprefix("mean_").removesuffix("_ms")
        server = fmean(run["server"][short] for run in mine) if short in mine[0]["server"] else None
        ratios = [own / other, *([own / server] if server else [])]
        within = all(abs(ratio - 1) <= LIMIT for ratio in ratios)
        fine &= within or figure == "mean_ttft_ms"
        said, ratio = (f"{server:.2f}", f"{own / server:.3f}") if server else ("-", "-")
        print(f"{figure:<20}{own:<11.2f}{other:<12.2f}{own / other:<9.3f}{said:<13}{ratio:<9}{'yes' if within else 'no':<10}")
    prompt = [fmean(run["total_input_tokens"] / REQUESTS for run in runs) for runs in (mine, vllm)]
    print(f"\nprompt tokens a request: {prompt[0]:.2f} and {prompt[1]:.2f}")
    print(f"{ROUNDS} rounds of {REQUESTS} requests, {CONCURRENCY} at once")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
