"""What speculative decoding brings on this very host: the server measured without it and with it, and what the figures mean.

`measure_variants` restarts the unit with each way of speculation and measures it; `choose` names the best: that is what
`speculative = "measure"` of an inventory asks for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laoka.catalog.profiles import Profile, Speculative
from laoka.serving.bench.compare import Judgement, side_by_side
from laoka.serving.bench.host_side import HostSide
from laoka.stack.speed import Ceilings

FLAG = "speculative-config"
TARGET_ONLY = "target-only"
MTP_TOKENS = 4
"""As in the recipes of 1Cat-vLLM (MTP4)."""
LEAST_GAIN = 1.05
"""A way of speculation has to be so much faster than none at one request to be chosen: it costs memory and seats."""
UNDER_SHARE = 0.7
"""Below so much of the nearest published speed a box is said to underperform; text and acceptance alone move it by 20 to 30 %
(206 to 251.6 tok/s by the text on the same cards, 1Cat-vLLM RELEASE.md of 1.5.0)."""

DECIDED = ("baseline_best", "baseline_none_better")

Measure = Callable[[], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class Ratio:
    """One figure of a variant against the target alone. None: a repeat of it could not be measured."""

    variant: str
    cell: str
    figure: str
    alone: float | None
    value: float | None
    ratio: float | None
    noise: float | None
    judgement: Judgement


@dataclass(frozen=True)
class Choice:
    """The variant to serve with; `reason` is a key of catalog/messages/bench.toml, one of DECIDED when that was measured."""

    variant: str
    reason: str
    decode_ratio: float | None


def variants_of(flags: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> dict[str, str | None]:
    """Ways to serve, by name, as values of --speculative-config (None: without): the target alone, what the host has now, and MTP
    beside DFlash2; `own` ones, by name, go over them.
    """
    found: dict[str, str | None] = {TARGET_ONLY: None}
    now = flags.get(FLAG)
    if now:
        config = json.loads(now) if isinstance(now, str) else dict(now)
        method = str(config.get("method", "speculative"))
        found["dflash2" if method == "dflash" else method] = json.dumps(config)
        if method == "dflash":
            found["mtp"] = json.dumps({"method": "mtp", "num_speculative_tokens": MTP_TOKENS})
    return found | {name: value if value is None else json.dumps(value) for name, value in (own or {}).items()}


async def measure_variants(
    host: HostSide,
    variants: Mapping[str, str | None],
    measure: Measure,
    start_deadline_s: float,
    say: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """The result of `measure` with each variant in force, by name; at the end the host is as it was.

    Errors: HostError, BenchError.
    """
    found = {}
    with host.changes(start_deadline_s, say) as change:
        for name, config in variants.items():
            say(f"--- {name}")
            await asyncio.to_thread(change, {FLAG: config})
            found[name] = await measure()
    return found


def ratios(results: Mapping[str, Mapping[str, Any]]) -> tuple[Ratio, ...]:
    """Every variant against the target alone: decode, prefill, and throughput at each concurrency, with noise."""
    alone = {cell["label"]: cell for cell in results[TARGET_ONLY]["cells"]}
    figure_of = {"serve": "output_throughput", "prefill": "prefill_tok_s", "decode": "decode_tok_s"}
    found = []
    for name, result in results.items():
        for cell in result["cells"] if name != TARGET_ONLY else ():
            if cell["kind"] not in figure_of or cell["label"] not in alone:
                continue
            figure = figure_of[cell["kind"]]
            found.append(Ratio(name, cell["label"], figure, *side_by_side(alone[cell["label"]], cell, figure, more_is_better=True)))
    return tuple(found)


def choose(found: Sequence[Ratio]) -> Choice:
    """What to serve with: the fastest way at one request that is better than none beyond the noise and by LEAST_GAIN."""
    decode = [item for item in found if item.figure == "decode_tok_s"]
    better = [item for item in decode if item.judgement == "better" and (item.ratio or 0) >= LEAST_GAIN]
    if better:
        best = max(better, key=lambda item: item.ratio or 0)
        return Choice(best.variant, "baseline_best", best.ratio)
    if not decode:
        return Choice(TARGET_ONLY, "baseline_no_variant", None)
    most = max((item.ratio for item in decode if item.ratio is not None), default=None)
    if any(item.ratio is None for item in decode):
        return Choice(TARGET_ONLY, "baseline_not_measured", most)
    if any(item.judgement == "noise unknown" and (item.ratio or 0) >= LEAST_GAIN for item in decode):
        return Choice(TARGET_ONLY, "baseline_noise_unknown", most)
    return Choice(TARGET_ONLY, "baseline_none_better", most)


def decode_speed(result: Mapping[str, Any]) -> float | None:
    """The decode test of a result, in tokens a second; None where it could not be measured."""
    found = next((cell["spread"].get("decode_tok_s") for cell in result["cells"] if cell["kind"] == "decode"), None)
    return found["mean"] if found else None


def nearest(profiles: Sequence[Profile], speculative: Speculative, context_tokens: int) -> tuple[Profile, float] | None:
    """The published decode speed of one request whose context is nearest to what was measured; None where there is none."""
    rows = [
        (abs((speed.context_tokens or 4096) - context_tokens), index, profile, speed.tok_s)
        for index, profile in enumerate(profiles)
        for speed in profile.speed
        if profile.speculative == speculative and speed.kind == "decode" and speed.streams == 1 and "lookup" not in speed.condition
    ]
    if not rows:
        return None
    _, _, profile, tok_s = min(rows, key=lambda row: row[:2])
    return profile, tok_s


def ceiling_of(ceilings: Ceilings | None, speculative: Speculative) -> float | None:
    """The ceiling that a decode speed is held against."""
    if ceilings is None:
        return None
    return ceilings.decode_tok_s if speculative == "none" else ceilings.decode_speculative_tok_s


def verdict(measured: float, published: float | None, ceiling: float | None) -> str:
    """A key of catalog/messages/bench.toml: how a measured speed stands beside what is possible and what others had."""
    if ceiling is not None and measured > ceiling:
        return "baseline_above_ceiling"
    if published is None:
        return "baseline_unpublished"
    return "baseline_under" if measured < UNDER_SHARE * published else "baseline_as_published"
