"""laoka's bench client beside `vllm bench serve` and the server's own histograms, in one run on one sandbox host:
`sudo LAOKA_SANDBOX_LAB=NAME python -m benchmarks.bench_client` (the lab's first host has to serve: laoka sandbox demo).

Both clients are there from the beginning to the end and ask in turns, so many requests at once, some seconds after each other.
Before and after each of our turns /metrics is read, so that every turn has the server's own times of the very requests that its
client timed. That makes client / server of every turn, and ours / theirs of every two. Both send the same: 512 random token ids to
/v1/completions, for 256 tokens. The server's counters are held against that: a turn that anything else fell into, or the prefix
cache helped, is left out with the other's beside it.

The server is another one on the host, of the engine that is installed there (qwen-serve is stopped for the time), with random
weights of a size that makes a request last seconds, as on cards: what a client adds (some milliseconds) is a large part of a tiny
model's 20 ms to the first token, and little of a real one's. What computes has a core of its own, as cards have; all else, the
clients too, is on the other core and before the engine's scheduler, which waits there in a loop.

From one turn to the next the server is by its own clock some per cent faster or slower: that is the machine, and no client can be
blamed for it. So what is judged is each client by the server's clock, and ours by theirs after what the server itself differed by
was taken out ("net"); the bare ratio and the server's own stand beside it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from laoka.process import ProcessError
from laoka.sandbox import hosts
from laoka.sandbox.lab import HostFolder, open_lab

LIMIT = 0.03
TURNS = 8
"""Of each client, after one that does not count."""
CELLS = {1: 15.0, 4: 22.0}
"""Requests at once, and seconds from one turn of a client to its next: the other's turn lies in the middle."""
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 256
FIGURES = ("ttft", "tpot", "itl", "e2el")
ENGINE = "/opt/laoka/engines/current/bin"
AGENT = "/opt/laoka/agent/current/lib/python3.11/site-packages"
WEIGHTS, MODEL, PORT, UNIT = "/srv/laoka/models/current", "bench-client", 8100, "bench-client"
URL = f"http://127.0.0.1:{PORT}"
SHAPE = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8,
}  # fmt: skip
"""Of the tiny model's configuration this is another: about 60 million random weights."""
ALL_ELSE, COMPUTES = 0, 1
"""Cores."""
ALONE = f"""
for pid in $(cat /sys/fs/cgroup/system.slice/{UNIT}.service/cgroup.procs); do
  case $(cat /proc/$pid/comm) in VLLM::Worker*) taskset -acp {COMPUTES} $pid && renice -n 0 -p $pid && exit 0 ;; esac
done
exit 1
"""
BESIDE = f"taskset -c {ALL_ELSE}"
START_DEADLINE_S, CELL_DEADLINE_S, IMPORTS_S = 300, 500, 120
SCRIPT = """
import asyncio, json, time
from laoka.serving.bench.client import Client, Target
from laoka.serving.bench.engine_metrics import between, span_table
from laoka.serving.bench.figures import figures

async def main():
    async with Client(Target({url!r}, {model!r})) as client:
        last = await client.snapshot()
        given_up = time.monotonic() + {imports_s}
        while (await client.snapshot()).gauges["running"] == 0 and time.monotonic() < given_up:
            await asyncio.sleep(0.2)
        begun, turns = time.monotonic(), []
        for number in range({turns} + 1):
            prompts = client.prompts({streams}, {prompt})
            await asyncio.sleep(begun + (number + 0.5) * {period_s} - time.monotonic())
            before = await client.snapshot()
            answers, duration_s = await client.batch(prompts, {output}, {streams})
            after = await client.snapshot()
            turns.append({{
                "figures": figures(answers, duration_s, {streams}), "errors": [answer.error for answer in answers if answer.error],
                "ours": span_table(between(before, after)), "theirs": span_table(between(last, before)),
            }})
            last = after
    print(json.dumps(turns))

asyncio.run(main())
"""


class Unfair(Exception):
    """The two clients were not asked the same; the message is one line."""


@dataclass(frozen=True)
class Turn:
    """One client's requests: means in milliseconds by its own clock and by the server's."""

    client: Mapping[str, float]
    server: Mapping[str, float]


@contextmanager
def server(host: HostFolder) -> Iterator[None]:
    """A server with random weights of SHAPE on the host, ready to answer; gone afterwards."""
    command = [
        "systemd-run", f"--unit={UNIT}", "--collect", "--quiet", "--nice=10",
        "--property=EnvironmentFile=/etc/qwen-serve/env", f"--property=CPUAffinity={ALL_ELSE}",
        "--setenv=HOME=/tmp", f"{ENGINE}/vllm", "serve", WEIGHTS, "--host", "127.0.0.1", "--port", str(PORT),
        "--served-model-name", MODEL, "--load-format", "dummy", "--hf-overrides", json.dumps(SHAPE), "--max-model-len", "1024",
        "--max-num-seqs", "4", "--enforce-eager", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    try:
        stop = f"systemctl stop qwen-serve; systemctl stop {UNIT} 2>/dev/null; "
        hosts.execute(host, stop + shlex.join(command), deadline_s=200, check=True)
        ready = f"until curl -sf -m 5 {URL}/health; do systemctl is-active -q {UNIT} || exit 1; sleep 1; done"
        if hosts.execute(host, ready, deadline_s=START_DEADLINE_S).status != 0:
            raise SystemExit(hosts.execute(host, f"journalctl -u {UNIT} -n 20 -o cat").stdout)
        hosts.execute(host, ALONE, check=True)
        yield
    finally:
        hosts.execute(host, f"systemctl stop {UNIT}; systemctl start --no-block qwen-serve", deadline_s=60)


def ours(host: HostFolder, streams: int) -> list[dict[str, Any]]:
    """laoka's client on the host: of each turn the figures that `laoka bench` makes, and what the server did in it and before."""
    script = SCRIPT.format(url=URL, model=MODEL, prompt=PROMPT_TOKENS, output=OUTPUT_TOKENS, streams=streams, turns=TURNS,
                           period_s=CELLS[streams], imports_s=IMPORTS_S)  # fmt: skip
    command = f"PYTHONPATH={AGENT} {BESIDE} {ENGINE}/python -"
    found: list[dict[str, Any]] = json.loads(
        hosts.execute(host, command, stdin=script, deadline_s=CELL_DEADLINE_S, check=True).stdout
    )
    return found


def theirs(host: HostFolder, streams: int) -> list[dict[str, Any]]:
    """`vllm bench serve` on the host: of each turn the figures that it makes means of.

    Of its data sets `timed_trace` alone sends token ids, and at given times; a row's hash stands for so many random tokens, others
    in every process.
    """
    lengths = {"input_length": PROMPT_TOKENS, "output_length": OUTPUT_TOKENS}
    count = (TURNS + 1) * streams
    rows = [{"timestamp": number // streams * CELLS[streams], **lengths, "hash_ids": [number]} for number in range(count)]
    command = (
        f"set -a; . /etc/qwen-serve/env; set +a; cd /tmp && cat >trace.jsonl && {BESIDE} {ENGINE}/vllm bench serve "
        f"--backend openai --base-url {URL} --model {MODEL} --tokenizer {WEIGHTS} --dataset-name timed_trace "
        f"--dataset-path trace.jsonl --timed-trace-chunk-hash-size {PROMPT_TOKENS} --self-timed --temperature 0 "
        f"--ready-check-timeout-sec 0 --num-warmups 0 --num-prompts {count} --save-result --save-detailed --result-dir /tmp "
        "--result-filename bench.json >bench.log 2>&1 && cat bench.json || { tail -5 bench.log >&2; exit 1; }"
    )
    trace = "".join(json.dumps(row) + "\n" for row in rows)
    found = json.loads(hosts.execute(host, command, stdin=trace, deadline_s=CELL_DEADLINE_S, check=True).stdout)
    return [one_turn(found, slice(first, first + streams)) for first in range(0, count, streams)]


def one_turn(found: Mapping[str, Any], place: slice) -> dict[str, Any]:
    """The means of some requests of its detailed result, by its own definitions. Pure."""
    ttfts, gaps, tokens = found["ttfts"][place], found["itls"][place], found["output_lens"][place]
    lasts = [sum(each) for each in gaps]
    return {
        "mean_ttft_ms": 1000 * fmean(ttfts),
        "mean_tpot_ms": 1000 * fmean(last / (count - 1) for last, count in zip(lasts, tokens, strict=True)),
        "mean_itl_ms": 1000 * fmean(gap for each in gaps for gap in each),
        "mean_e2el_ms": 1000 * fmean(ttft + last for ttft, last in zip(ttfts, lasts, strict=True)),
        "completed": len(ttfts),
        "total_input_tokens": sum(found["input_lens"][place]),
        "total_output_tokens": sum(tokens),
    }


def turn(who: str, streams: int, found: Mapping[str, Any], span: Mapping[str, Any] | None) -> Turn:
    """One turn, when client and server counted what was to be asked and nothing else. Pure. Errors: Unfair."""
    if span is None:
        raise Unfair("the server's metrics could not be read, or it was restarted")
    wanted = {"requests": streams, "prompt tokens": streams * PROMPT_TOKENS, "output tokens": streams * OUTPUT_TOKENS}
    client = (found["completed"], found["total_input_tokens"], found["total_output_tokens"])
    counted = (span["requests"], span["prompt_tokens"], span["generation_tokens"])
    for (name, number), here, there in zip(wanted.items(), client, counted, strict=True):
        if (here, there) != (number, number):
            raise Unfair(f"{who}: {number} {name} were to be asked, the client says {here} and the server {there}")
    if span["prefix_cache_hits"]:
        raise Unfair(f"{who}: {span['prefix_cache_hits']:.0f} prompt tokens came from the prefix cache")
    return Turn(
        {name: float(found[f"mean_{name}_ms"]) for name in FIGURES}, {name: span[f"server_mean_{name}_ms"] for name in FIGURES}
    )


def cell(host: HostFolder, streams: int) -> tuple[list[Turn], list[Turn]]:
    """The turns of both clients, ours and theirs, without the first one of each. Errors: Unfair, ProcessError."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(theirs, host, streams)
        mine = ours(host, streams)
    kept = other.result()
    if errors := [error for each in mine for error in each["errors"]]:
        raise Unfair(f"a request failed: {errors[0]}")
    pairs = []
    for found, each in zip(kept[1:], mine[1:], strict=True):
        try:
            pairs.append((turn("ours", streams, each["figures"], each["ours"]), turn("theirs", streams, found, each["theirs"])))
        except Unfair as error:
            print(f"two turns are left out: {error}", flush=True)
    if len(pairs) <= TURNS // 2:
        raise Unfair(f"only {len(pairs)} turns of {TURNS} can be compared")
    return [one for one, _ in pairs], [other for _, other in pairs]


def ratios(first: Sequence[Turn], second: Sequence[Turn]) -> Iterator[tuple[str, str, list[tuple[float, float]], bool]]:
    """What is divided by what, turn by turn: the name of the ratio, the figure, both sides, and whether it is judged. Pure."""
    for name, turns in (("ours/server", first), ("theirs/server", second)):
        for figure in FIGURES:
            yield name, figure, [(each.client[figure], each.server[figure]) for each in turns], True
    pairs = list(zip(first, second, strict=True))
    for figure in FIGURES:
        yield "ours/theirs", figure, [(one.client[figure], other.client[figure]) for one, other in pairs], False
    for figure in FIGURES:
        yield "its server", figure, [(one.server[figure], other.server[figure]) for one, other in pairs], False
    for figure in FIGURES:
        yield (
            "net", figure,
            [(one.client[figure] / one.server[figure], other.client[figure] / other.server[figure]) for one, other in pairs], True,
        )  # fmt: skip


def table(streams: int, first: Sequence[Turn], second: Sequence[Turn]) -> bool:
    """Print the turns, and the ratios: their medians, the lowest and the highest. Whether all that are judged are within LIMIT."""
    print(f"\n{streams} at once: client and server, ms\n\n{'turn':<6}{'client':<9}{''.join(f'{name:<19}' for name in FIGURES)}")
    for number, pair in enumerate(zip(second, first, strict=True), 1):
        for who, each in zip(("theirs", "ours"), pair, strict=True):
            cells = "".join(f"{each.client[name]:<9.2f}{each.server[name]:<10.2f}" for name in FIGURES)
            print(f"{number:<6}{who:<9}{cells}")
    print(f"\n{'ratio':<15}{'figure':<8}{'above':<10}{'below':<10}{'median':<9}{'low-high':<16}within 3 %")
    fine = True
    for name, figure, sides, judged in ratios(first, second):
        found = [above / below for above, below in sides]
        within = abs(median(found) - 1) <= LIMIT
        fine &= within or not judged
        above, below = (median(side) for side in zip(*sides, strict=True))
        said = ("yes" if within else "NO") if judged else "-"
        print(f"{name:<15}{figure:<8}{above:<10.3f}{below:<10.3f}{median(found):<9.4f}{min(found):.4f}-{max(found):<9.4f}{said}")
    return fine


def main(words: Sequence[str] | None = None) -> int:
    """Print the tables. Exit status 1 when a ratio that is judged differs from 1 by more than LIMIT, 2 when it can't be told."""
    argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0]).parse_args(words)
    host = hosts.listed(open_lab())[0]
    print(f"SIMULATED: random weights on a CPU. {PROMPT_TOKENS} token ids in and {OUTPUT_TOKENS} tokens out, by the count of both"
          f" clients and of the server; prefix cache hits: 0; {TURNS} turns of each client", flush=True)  # fmt: skip
    try:
        with server(host):
            fine = [table(streams, *cell(host, streams)) for streams in CELLS]
    except (Unfair, ProcessError) as error:
        print(f"bench_client: {error}", file=sys.stderr)
        return 2
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
