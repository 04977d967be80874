"""A load ramp: more and more requests at once until throughput stops growing; where the queue and the preemptions begin."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from laoka.serving.bench.client import Client
from laoka.serving.bench.engine_metrics import between
from laoka.serving.bench.figures import Goodput, figures
from laoka.serving.bench.recipe import Recipe
from laoka.serving.bench.run import check

KNEE_SHARE = 0.9
"""The knee is the fewest requests at once that reach so much of the highest throughput seen."""
FLAT_GAIN = 1.05
FLAT_STEPS = 2
"""The ramp ends after so many steps in a row that brought less than FLAT_GAIN times the best before them."""
GOOD_SHARE = 0.99
SAMPLE_S = 0.25
WAIT_SHARE = 0.1
"""From so much of its whole time on, a request counts as one that waited: networks and samples of a busy machine stay below it."""


@dataclass(frozen=True)
class Step:
    """One concurrency. None: the server did not tell. `good_share`: of requests within the limits, where limits were given.

    `most_waiting` is what samples of the engine's own queue saw: it misses what is shorter than a sample, and a gateway's queue.
    `mean_wait_ms` misses neither: the engine's own sum of its queue, and how much later the first token was here than it says.
    """

    concurrency: int
    output_throughput: float
    mean_ttft_ms: float
    p99_ttft_ms: float
    mean_e2el_ms: float
    p99_e2el_ms: float
    most_waiting: int | None = None
    most_running: int | None = None
    mean_queue_ms: float | None = None
    preemptions: int | None = None
    kv_usage: float | None = None
    good_share: float | None = None
    mean_wait_ms: float | None = None

    @property
    def queued(self) -> bool:
        """Whether requests waited."""
        return bool(self.most_waiting) or (self.mean_wait_ms or 0.0) >= WAIT_SHARE * self.mean_e2el_ms


@dataclass(frozen=True)
class Knee:
    """What a ramp says. `reason` is a key of catalog/messages/bench.toml that says why the suggestion is that one."""

    knee: int
    first_queueing: int | None
    first_preemption: int | None
    suggested_max_num_seqs: int
    reason: str


def find_knee(steps: Sequence[Step], max_num_seqs: int | None = None) -> Knee:
    """The knee of a ramp, and how many seats the server should have. Steps in rising order of concurrency, at least one.

    Arguments: `max_num_seqs` of the server, where it is known: more requests than seats only wait.
    """
    best = max(step.output_throughput for step in steps)
    knee = next(step.concurrency for step in steps if step.output_throughput >= KNEE_SHARE * best)
    queueing = next((step.concurrency for step in steps if step.queued), None)
    preemption = next((step.concurrency for step in steps if step.preemptions), None)
    suggested, reason = knee, "ramp_knee"
    good = [step.concurrency for step in steps if step.good_share is not None and step.good_share >= GOOD_SHARE]
    if any(step.good_share is not None for step in steps) and max(good, default=0) < suggested:
        suggested, reason = max(good, default=steps[0].concurrency), "ramp_goodput"
    if preemption is not None and preemption <= suggested:
        before = [step.concurrency for step in steps if step.concurrency < preemption]
        suggested, reason = max(before, default=1), "ramp_preemption"
    if max_num_seqs is not None and reason == "ramp_knee" and knee >= max_num_seqs:
        # Its own seats are the limit: what more of them would bring, this ramp can't say.
        suggested, reason = max_num_seqs, "ramp_seats"
    return Knee(knee, queueing, preemption, suggested, reason)


def goes_on(steps: Sequence[Step]) -> bool:
    """Whether the next step is worth its time."""
    if len(steps) <= FLAT_STEPS:
        return True
    best = max(step.output_throughput for step in steps[:-FLAT_STEPS])
    return any(step.output_throughput >= FLAT_GAIN * best for step in steps[-FLAT_STEPS:])


async def climb(
    client: Client, recipe: Recipe, concurrencies: Sequence[int], goodput: Goodput | None, say: Callable[[str], None]
) -> list[Step]:
    """The ramp: a step for each concurrency, until more brings no more. Errors: BenchError."""
    await client.learn_tokens()
    await client.batch(client.prompts(recipe.warmup_requests or 1, recipe.prompt_tokens), recipe.output_tokens, 1)
    steps: list[Step] = []
    for concurrency in concurrencies:
        if not goes_on(steps):
            break
        say(f"ramp: {concurrency} at once")
        steps.append(await _step(client, recipe, concurrency, goodput))
    return steps


async def _step(client: Client, recipe: Recipe, concurrency: int, goodput: Goodput | None) -> Step:
    seen: list[Mapping[str, float]] = []

    async def watch() -> None:
        while True:
            snapshot = await client.snapshot()
            if snapshot is not None:
                seen.append(snapshot.gauges)
            await asyncio.sleep(SAMPLE_S)

    before = await client.snapshot()
    watching = asyncio.create_task(watch())
    try:
        prompts = client.prompts(recipe.requests_per_stream * concurrency, recipe.prompt_tokens)
        answers, duration_s = await client.batch(prompts, recipe.output_tokens, concurrency)
    finally:
        watching.cancel()
    check(answers, recipe.prompt_tokens, recipe.output_tokens, f"ramp c{concurrency}")
    span = between(before, await client.snapshot())
    found = figures(answers, duration_s, concurrency, goodput)
    good = None if goodput is None else sum(goodput.met_by(answer) and not answer.error for answer in answers) / len(answers)
    return Step(
        concurrency, found["output_throughput"], found["mean_ttft_ms"], found["p99_ttft_ms"], found["mean_e2el_ms"],
        found["p99_e2el_ms"], _most(seen, "waiting"), _most(seen, "running"), None if span is None else span.mean_ms.get("queue"),
        None if span is None or span.preemptions is None else int(span.preemptions),
        max((gauges["kv_usage"] for gauges in seen if "kv_usage" in gauges), default=None), good,
        None if span is None else wait_ms(found["mean_ttft_ms"], span.mean_ms),
    )  # fmt: skip


def wait_ms(ttft_ms: float, server: Mapping[str, float]) -> float | None:
    """How long a request waited in the mean. Arguments: TTFT as measured here, and the server's own means of the same requests."""
    if "ttft" not in server:
        return server.get("queue")
    return max(0.0, ttft_ms - server["ttft"]) + server.get("queue", 0.0)


def _most(seen: Sequence[Mapping[str, float]], name: str) -> int | None:
    values = [gauges[name] for gauges in seen if name in gauges]
    return int(max(values)) if values else None


def ramp_table(steps: Sequence[Step], knee: Knee, recipe: Recipe, provenance: dict[str, Any]) -> dict[str, Any]:
    """The result as it is written to a file; `laoka plan --ramp FILE` takes the suggestion from it."""
    return {
        "laoka_ramp": 1, "recipe": recipe.table(), "recipe_id": recipe.id, "provenance": provenance,
        "steps": [asdict(step) for step in steps], **asdict(knee),
    }  # fmt: skip


def suggestion_in(text: bytes) -> int:
    """The suggested max-num-seqs of a ramp's file as it was read. Errors: ValueError, one line."""
    try:
        return suggestion_of(json.loads(text))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return suggestion_of(None)


def suggestion_of(content: object) -> int:
    """The suggested max-num-seqs of a ramp's file. Errors: ValueError, one line."""
    found = content.get("suggested_max_num_seqs") if isinstance(content, dict) and "laoka_ramp" in content else None
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ValueError("it is not a result of laoka bench ramp")
    return found
