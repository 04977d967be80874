"""laoka's bench client beside `vllm bench serve` and the server's own histograms, on one served sandbox host in one run:
`sudo LAOKA_SANDBOX_LAB=NAME python -m benchmarks.bench_client` (the lab's first host has to serve: laoka sandbox demo).

Two clients in turns differ by what else the machine does in the meantime: on two busy cores by a half. So both run **at the same
time** here, on one server and with as many streams each, and of each those requests count that began and ended while the other one
was at work too: whatever slows the machine down slows both. The server's histograms are held against our own figures of the same
requests, in rounds of their own. Every figure is the median of the rounds' ratios. The model is a tiny one of random weights on a
CPU: the table is about clients, not about speed.

A client on the engine's own two cores takes its tokens late when the engine has them; a real one is on another machine. Both
therefore run at a higher priority than the engine. What lateness is left stands in the table: E2E and TTFT here minus the server's.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from laoka.sandbox import hosts
from laoka.sandbox.lab import HostFolder, open_lab

ROUNDS, REQUESTS, STREAMS, LIMIT = 5, 24, 2, 0.03
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 256
LEAST_PAIRS = 8
"""So many requests of each client at least have to lie in the time that both were at work."""
ENGINE = "/opt/laoka/engines/current/bin"
AGENT = "/opt/laoka/agent/current/lib/python3.11/site-packages"
MODEL, WEIGHTS, URL = "tiny-qwen3", "/srv/laoka/models/current", "http://127.0.0.1:8000"
FIRST = "nice -n -10 "
DONE = "/run/bench-client-done"
JUDGED = ("tpot", "e2el")
"""Not TTFT: the server's clock begins when a request was read and ends before a token is sent, a large part of some 20 ms."""
SCRIPT = """
import asyncio, json, os, time
from laoka.serving.bench.client import Client, Target
from laoka.serving.bench.engine_metrics import between

async def main():
    async with Client(Target({url!r}, {model!r})) as client:
        await client.learn_tokens()
        await client.batch(client.prompts(4, {prompt}), 16, 2)
        rows = []

        async def stream(count):
            while count != 0 and not os.path.exists({done!r}):
                begun = time.perf_counter()
                answer = await client.complete(client.prompts(1, {prompt})[0], {output})
                rows.append([begun, answer.ttft_s, answer.tpot_s, answer.latency_s, answer.output_tokens, answer.error])
                count -= 1

        if {beside}:
            while (await client.snapshot()).gauges["running"] == 0:
                await asyncio.sleep(0.1)
        before = await client.snapshot()
        await asyncio.gather(*(stream({count}) for _ in range({streams})))
        span = between(before, await client.snapshot())
    print(json.dumps({{"rows": rows, "server": dict(span.mean_ms), "requests": span.requests, "hits": span.prefix_hits}}))

asyncio.run(main())
"""
Row = dict[str, float | None]


def ours(host: HostFolder, *, beside: bool, count: int, streams: int) -> dict[str, Any]:
    """laoka's client on the host: `count` requests of each stream, or (below zero) on until the other one has ended."""
    script = SCRIPT.format(url=URL, model=MODEL, prompt=PROMPT_TOKENS, output=OUTPUT_TOKENS, beside=beside, count=count,
                           streams=streams, done=DONE)  # fmt: skip
    done = hosts.execute(host, f"{FIRST}env PYTHONPATH={AGENT} {ENGINE}/python -", stdin=script, deadline_s=400, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    errors = [row[5] for row in found["rows"] if row[5]]
    if errors:
        raise SystemExit(f"a request failed: {errors[0]}")
    names = ("begun", "ttft", "tpot", "e2el", "tokens")
    found["rows"] = [dict(zip(names, row, strict=False)) for row in found["rows"]]
    return found


def theirs(host: HostFolder, seed: int) -> list[Row]:
    """`vllm bench serve` on the host, with a seed of its own so that no prompt was there before: one row for each request."""
    command = (
        f"set -a; . /etc/qwen-serve/env; set +a; cd /tmp && {FIRST}{ENGINE}/vllm bench serve --backend openai --base-url {URL} "
        f"--model {MODEL} --tokenizer {WEIGHTS} --dataset-name random --random-input-len {PROMPT_TOKENS} "
        f"--random-output-len {OUTPUT_TOKENS} --ignore-eos --temperature 0 --num-warmups 2 --num-prompts {REQUESTS} "
        f"--max-concurrency {STREAMS} --seed {seed} --percentile-metrics ttft,tpot,itl,e2el --save-result --save-detailed "
        f"--result-dir /tmp --result-filename bench.json >/tmp/bench.log 2>&1; status=$?; touch {DONE}; "
        "[ $status = 0 ] && cat /tmp/bench.json || { tail -5 /tmp/bench.log >&2; exit 1; }"
    )
    found = json.loads(hosts.execute(host, command, deadline_s=400, check=True).stdout)
    rows = []
    for begun, ttft, gaps, tokens in zip(found["start_times"], found["ttfts"], found["itls"], found["output_lens"], strict=True):
        e2el = ttft + sum(gaps)
        rows.append({"begun": begun, "ttft": ttft, "tpot": (e2el - ttft) / (tokens - 1), "e2el": e2el, "tokens": tokens})
    return rows


def both(host: HostFolder, seed: int) -> tuple[list[Row], list[Row]]:
    """One round of both at the same time: of each the requests that lie in the time that both were at work."""
    hosts.execute(host, f"rm -f {DONE}", check=True)
    kept: list[list[Row]] = []
    other = threading.Thread(target=lambda: kept.append(theirs(host, seed)))
    other.start()
    mine: list[Row] = ours(host, beside=True, count=-1, streams=STREAMS)["rows"]
    other.join()
    if not kept:
        raise SystemExit("vllm bench serve failed")
    return shared(mine, kept[0])


def shared(first: Sequence[Row], second: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Of two clients' requests those that began and ended while both were at work. Pure."""

    def begun(row: Row) -> float:
        return row["begun"] or 0.0

    def ended(row: Row) -> float:
        return begun(row) + (row["e2el"] or 0.0)

    start = max(min(map(begun, rows)) for rows in (first, second))
    end = min(max(map(ended, rows)) for rows in (first, second))
    own, other = ([row for row in rows if begun(row) >= start and ended(row) <= end] for rows in (first, second))
    return own, other


def mean_ms(rows: Sequence[Row], figure: str) -> float:
    """Mean of a figure in milliseconds, over the requests that have it."""
    return 1000 * fmean(value for row in rows if (value := row[figure]) is not None)


def quiet(host: HostFolder) -> dict[str, Any]:
    """Ours alone, that nobody else's request fell into (the watchdog asks a question now and then)."""
    hosts.execute(host, f"rm -f {DONE}", check=True)
    while True:
        found = ours(host, beside=False, count=REQUESTS // 4, streams=4)
        if found["requests"] == len(found["rows"]):
            return found
        print("  another request fell into it: once more", flush=True)


def line(name: str, ratios: Sequence[float], here: float, there: float, *, judged: bool) -> bool:
    """Print a row of a table; whether it is within LIMIT."""
    within = abs(median(ratios) - 1) <= LIMIT
    said = ("yes" if within else "NO") if judged else "-"
    print(f"{name:<12}{here:<10.2f}{there:<12.2f}{median(ratios):<9.3f}{min(ratios):.3f}-{max(ratios):<9.3f}{said}")
    return within or not judged


def main(words: Sequence[str] | None = None) -> int:
    """Print the tables. Exit status 1 when something differs by more than LIMIT."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args(words).rounds
    host = hosts.listed(open_lab())[0]
    pairs, alone = [], []
    for number in range(rounds):
        own, other = both(host, 1000 + number)
        print(f"round {number + 1}: {len(own)} requests of laoka and {len(other)} of vllm bench serve at the same time", flush=True)
        if min(len(own), len(other)) >= LEAST_PAIRS:
            pairs.append((own, other))
        alone.append(quiet(host))
    if not pairs:
        print("no round had enough requests of both at the same time")
        return 1
    print("\nSIMULATED: a tiny model of random weights on a CPU\n")
    fine = True
    print(f"at the same time, {STREAMS} streams each, {PROMPT_TOKENS} tokens in and {OUTPUT_TOKENS} out, ms\n")
    print(f"{'figure':<12}{'laoka':<10}{'vllm bench':<12}{'ratio':<9}{'low-high':<15}within 3 %")
    for figure in ("ttft", "tpot", "e2el"):
        values = [(mean_ms(own, figure), mean_ms(other, figure)) for own, other in pairs]
        fine &= line(figure, [own / other for own, other in values], median(own for own, _ in values),
                     median(other for _, other in values), judged=True)  # fmt: skip
    print("\nthe same requests by the server's own histograms, laoka alone, 4 streams, ms\n")
    print(f"{'figure':<12}{'laoka':<10}{'server':<12}{'ratio':<9}{'low-high':<15}within 3 %")
    for figure in ("ttft", "tpot", "e2el"):
        values = [(mean_ms(found["rows"], figure), found["server"][figure]) for found in alone]
        fine &= line(figure, [own / server for own, server in values], median(own for own, _ in values),
                     median(server for _, server in values), judged=figure in JUDGED)  # fmt: skip
    print(f"\nlateness: {late(alone, 'ttft'):.1f} ms to the first token, {late(alone, 'e2el'):.1f} ms to the last")
    counted = {row["tokens"] for own, other in pairs for row in (*own, *other)}
    left_out = sum(row["tpot"] is None for found in alone for row in found["rows"])
    print(f"output tokens a request: {sorted(counted, key=str)}; answers whose TPOT could not be measured: {left_out}")
    print(f"prefix cache hits: {sum(found['hits'] for found in alone):.0f}")
    print(f"{len(pairs)} rounds of both, {sum(len(own) for own, _ in pairs)} and {sum(len(other) for _, other in pairs)} requests;"
          f" {len(alone)} rounds alone, {sum(len(found['rows']) for found in alone)} requests")  # fmt: skip
    return 0 if fine else 1


def late(alone: Sequence[Mapping[str, Any]], figure: str) -> float:
    """How much later a token is at the client than the server says, in milliseconds: the median of the rounds."""
    return median([mean_ms(found["rows"], figure) - float(found["server"][figure]) for found in alone])


if __name__ == "__main__":
    sys.exit(main())
