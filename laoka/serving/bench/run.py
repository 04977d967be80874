"""One bench run: warm-up, the grid of concurrency, the prefill test and the decode test, each repeated, into one result."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from statistics import fmean
from typing import Any

from laoka.serving import completion
from laoka.serving.bench.client import BenchError, Client
from laoka.serving.bench.engine_metrics import Snapshot, Span, between, span_table
from laoka.serving.bench.figures import Answer, Goodput, decode_figures, figures, prefill_figures, spread
from laoka.serving.bench.recipe import Recipe
from laoka.stack.message import Message, message

FORMAT = 1
CANARY_TOKENS = completion.MAX_TOKENS
LATE_SHARE = 0.1
"""By so much TPOT here may be shorter than by the server's own clock before it is told."""


@dataclass(frozen=True)
class Cell:
    """One cell of the result: what it measured, its repeats, and what the server's /metrics said of all of them."""

    kind: str
    label: str
    max_model_len: int | None
    repeats: tuple[dict[str, Any], ...]
    span: Span | None

    def table(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "kind": self.kind, "label": self.label, "max_model_len": self.max_model_len, "repeats": list(self.repeats),
            "spread": spread(self.repeats), "server": span_table(self.span),
        }  # fmt: skip


async def measure(
    client: Client, recipe: Recipe, max_model_len: int | None, goodput: Goodput | None, say: Callable[[str], None]
) -> list[Cell]:
    """All cells at the limit that the server has now. Errors: BenchError, when a cell has no answer or not the tokens asked for."""
    await client.learn_tokens()
    if recipe.warmup_requests:
        say(f"warm-up: {recipe.warmup_requests} requests for each of {max(recipe.concurrency)} streams, not counted")
        count = recipe.warmup_requests * max(recipe.concurrency)
        await client.batch(client.prompts(count, recipe.prompt_tokens), recipe.output_tokens, max(recipe.concurrency))
    cells = []
    for concurrency in recipe.concurrency:
        cells.append(await _serve(client, recipe, concurrency, max_model_len, goodput, say))
    cells += await _prefill(client, recipe, max_model_len, say)
    cells.append(await _decode(client, recipe, max_model_len, say))
    return cells


async def _serve(
    client: Client, recipe: Recipe, concurrency: int, limit: int | None, goodput: Goodput | None, say: Callable[[str], None]
) -> Cell:
    label = _label("serve", limit, f"c{concurrency}")
    rows, before = [], await client.snapshot()
    for number in range(recipe.repeats):
        say(f"{label}: repeat {number + 1} of {recipe.repeats}")
        prompts = client.prompts(recipe.requests_per_stream * concurrency, recipe.prompt_tokens)
        answers, duration_s = await client.batch(prompts, recipe.output_tokens, concurrency)
        check(answers, recipe.prompt_tokens, recipe.output_tokens, label)
        rows.append(figures(answers, duration_s, concurrency, goodput))
    return Cell("serve", label, limit, tuple(rows), between(before, await client.snapshot()))


async def _prefill(client: Client, recipe: Recipe, limit: int | None, say: Callable[[str], None]) -> list[Cell]:
    measured = recipe.prefix_cache == "measured"
    rows: dict[str, list[dict[str, Any]]] = {"prefill": [], "prefill-again": []}
    spans: dict[str, Span | None] = {}
    label = _label("prefill", limit)
    for number in range(recipe.repeats):
        say(f"{label}: repeat {number + 1} of {recipe.repeats}")
        prompts = client.prompts(recipe.prefill_requests, recipe.prefill_tokens)
        salts = [secrets.token_hex(16) for _ in prompts]
        for kind in ("prefill", "prefill-again") if measured else ("prefill",):
            before = await client.snapshot()
            answers, duration_s = await client.batch(prompts, 1, 1, salts)
            check(answers, recipe.prefill_tokens, 1, label)
            spans[kind] = between(before, await client.snapshot())
            rows[kind].append(prefill_figures(answers, duration_s))
    return [Cell(kind, _label(kind, limit), limit, tuple(rows[kind]), spans[kind]) for kind in spans]


async def _decode(client: Client, recipe: Recipe, limit: int | None, say: Callable[[str], None]) -> Cell:
    label = _label("decode", limit)
    rows, before = [], await client.snapshot()
    for number in range(recipe.repeats):
        say(f"{label}: repeat {number + 1} of {recipe.repeats}")
        answers, duration_s = await client.batch(
            client.text_prompts(recipe.decode_requests, recipe.decode_prompt_tokens), recipe.decode_tokens, 1
        )
        check(answers, recipe.decode_prompt_tokens, recipe.decode_tokens, label)
        rows.append(decode_figures(answers, duration_s))
    return Cell("decode", label, limit, tuple(rows), between(before, await client.snapshot()))


def _label(kind: str, limit: int | None, rest: str = "") -> str:
    return " ".join(word for word in (kind, str(limit) if limit else "", rest) if word)


def check(answers: Sequence[Answer], prompt_tokens: int, output_tokens: int, label: str) -> None:
    """The server counted what was asked for. Errors: BenchError when no request succeeded, or a count is another."""
    good = [answer for answer in answers if not answer.error]
    if not good:
        raise BenchError(f"{label}: every request failed; the first one: {answers[0].error}")
    for answer in good:
        if (answer.prompt_tokens, answer.output_tokens) != (prompt_tokens, output_tokens):
            raise BenchError(
                f"{label}: the server counted {answer.prompt_tokens} prompt and {answer.output_tokens} output tokens, and was asked"
                f" for {prompt_tokens} and {output_tokens}: a limit of the server (max_tokens) or of a gateway cuts answers short"
            )


def result_of(recipe: Recipe, cells: Sequence[Cell], provenance: dict[str, Any], banners: Sequence[Message]) -> dict[str, Any]:
    """The whole result, as it is written to a file."""
    limits = tuple(dict.fromkeys(cell.max_model_len for cell in cells if cell.max_model_len is not None))
    done = replace(recipe, server_limits=limits)
    return {
        "laoka_bench": FORMAT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "recipe": done.table(),
        "recipe_id": done.id,
        "banners": [banner_table(banner) for banner in (*banners, *banners_of(recipe, cells))],
        "provenance": provenance,
        "cells": [cell.table() for cell in cells],
    }


def banner_table(banner: Message) -> dict[str, Any]:
    """A banner as it stands in a result: its name and values for another language, its text in English."""
    return {"id": banner.key, "values": dict(banner.values), "text": banner.say("en")}


def banners_of(recipe: Recipe, cells: Sequence[Cell]) -> list[Message]:
    """What the cells themselves say against their figures: cache hits where none should be, preemptions, failures."""
    found = []
    for cell in cells:
        if bunched := sum(row["bunched"] for row in cell.repeats):
            found.append(
                message("bench.bunched", cell=cell.label, count=bunched, total=sum(row["completed"] for row in cell.repeats))
            )
        failed = sum(row["failed"] for row in cell.repeats)
        if failed:
            found.append(message("bench.failed", cell=cell.label, count=failed))
        if cell.span is None:
            continue
        hits = cell.span.prefix_hits
        if hits and cell.kind != "prefill-again" and recipe.prefix_cache == "defeated":
            found.append(message("bench.cached", cell=cell.label, count=f"{hits:.0f}"))
        if cell.span.preemptions:
            found.append(message("bench.preempted", cell=cell.label, count=f"{cell.span.preemptions:.0f}"))
        others = (cell.span.requests or 0) - sum(row["num_prompts"] for row in cell.repeats)
        their_tokens = (cell.span.generation_tokens or 0) - sum(row["total_output_tokens"] for row in cell.repeats)
        # The watchdog and the gateway ask a short question now and then: that is no load.
        if others > 0 and their_tokens > others * CANARY_TOKENS:
            found.append(message("bench.shared", cell=cell.label, count=f"{others:.0f}"))
        if clocks := _late(cell):
            found.append(message("bench.late", cell=cell.label, here_ms=f"{clocks[0]:.2f}", server_ms=f"{clocks[1]:.2f}"))
    return found


def _late(cell: Cell) -> tuple[float, float] | None:
    """TPOT here and by the server's own clock, in milliseconds, when here it is too short: the first tokens lay on the way.

    The server's mean is that of our requests only when it finished no others; an answer of one token counts as 0 in it.
    """
    own = [row["mean_tpot_ms"] for row in cell.repeats]
    server_ms = server_tpot_ms(span_table(cell.span), cell.repeats)
    if server_ms is None or not own or any(value is None for value in own):
        return None
    here_ms = fmean(own)
    return (here_ms, server_ms) if here_ms < (1 - LATE_SHARE) * server_ms else None


def server_tpot_ms(server: Mapping[str, Any] | None, repeats: Sequence[Mapping[str, Any]]) -> float | None:
    """TPOT of a cell by the server's own clock, in milliseconds; None when it does not tell, or requests of others are in it."""
    if server is None or server["requests"] != sum(row["num_prompts"] for row in repeats):
        return None
    found: float | None = server.get("server_mean_tpot_ms")
    return found or None


def snapshot_table(snapshot: Snapshot | None) -> dict[str, Any] | None:
    """What of a snapshot belongs to provenance."""
    return None if snapshot is None else {"block_size": snapshot.block_size, "kv_cache_tokens": snapshot.kv_tokens}
