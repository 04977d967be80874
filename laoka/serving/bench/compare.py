"""Two bench results side by side: each figure's ratio, and whether the difference is more than the noise of the repeats. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from laoka.serving.bench.figures import sample_std
from laoka.serving.bench.recipe import differences

Judgement = Literal["better", "worse", "within noise", "noise unknown", "not measured"]

# What is compared, and whether more of it is better.
HEADLINES: Mapping[str, tuple[tuple[str, bool], ...]] = {
    "serve": (("output_throughput", True), ("mean_ttft_ms", False), ("mean_tpot_ms", False), ("mean_e2el_ms", False)),
    "prefill": (("prefill_tok_s", True), ("mean_ttft_ms", False)),
    "prefill-again": (("prefill_tok_s", True), ("mean_ttft_ms", False)),
    "decode": (("decode_tok_s", True), ("mean_tpot_ms", False)),
}

# Student's t, two-sided 95 %, by degrees of freedom (any table of it); beyond 30 the normal's 1.96 is near enough.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
# Repeats of one short run can agree by luck; two runs of one server on another day differ by about so much at least.
LEAST_NOISE = 0.01


class NotComparable(ValueError):
    """Two results that say nothing about each other; the message is one line."""


@dataclass(frozen=True)
class Line:
    """One figure of one cell in both results. `ratio` is second over first; `noise` is the half-width of its 95 % interval.

    None: a repeat of it could not be measured.
    """

    cell: str
    figure: str
    first: float | None
    second: float | None
    ratio: float | None
    noise: float | None
    judgement: Judgement


def t95(freedom: float) -> float:
    """Student's t for a two-sided 95 % interval; the degrees of freedom are rounded down."""
    return _T95[max(1, math.floor(freedom)) - 1] if freedom < len(_T95) + 1 else 1.96


def welch(first: Sequence[float], second: Sequence[float]) -> tuple[float, float] | None:
    """Half-width of the 95 % interval of the difference of two means (Welch's t), and the degrees of freedom.

    None when one of them has a single value only: its noise is not known.
    """
    if min(len(first), len(second)) < 2:
        return None
    parts = [(sample_std(values) ** 2 / len(values), len(values) - 1) for values in (first, second)]
    variance = sum(part for part, _ in parts)
    if variance == 0:
        return 0.0, float(min(freedom for _, freedom in parts))
    freedom = variance**2 / sum(part**2 / own for part, own in parts)
    return t95(freedom) * math.sqrt(variance), freedom


def judge(first: Sequence[float], second: Sequence[float], *, more_is_better: bool) -> tuple[float | None, float | None, Judgement]:
    """Ratio of the means, the noise of that ratio, and what follows."""
    before, after = fmean(first), fmean(second)
    if before == 0:
        return None, None, "noise unknown"
    ratio = after / before
    width = welch(first, second)
    if width is None:
        return ratio, None, "noise unknown"
    noise = max(width[0] / abs(before), LEAST_NOISE)
    if abs(ratio - 1) <= noise:
        return ratio, noise, "within noise"
    return ratio, noise, "better" if (ratio > 1) == more_is_better else "worse"


def side_by_side(
    first: Mapping[str, Any], second: Mapping[str, Any], figure: str, *, more_is_better: bool
) -> tuple[float | None, float | None, float | None, float | None, Judgement]:
    """A figure of a cell in two results: both means, their ratio, its noise, and what follows. Errors: KeyError, TypeError,
    ValueError for cells that are none.
    """
    values = [_measured(cell, figure) for cell in (first, second)]
    means = [fmean(own) if own else None for own in values]
    if not values[0] or not values[1]:
        return means[0], means[1], None, None, "not measured"
    return means[0], means[1], *judge(values[0], values[1], more_is_better=more_is_better)


def _measured(cell: Mapping[str, Any], figure: str) -> list[float]:
    """A figure of every repeat; none at all when one of them lacks it."""
    values = [run[figure] for run in cell["repeats"]]
    if not values:
        raise NotComparable("one of them is not a whole result of laoka bench")
    return [] if any(value is None for value in values) else [float(value) for value in values]


def cells_of(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The cells of a result by their label."""
    return {str(cell["label"]): cell for cell in result["cells"]}


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[Line, ...]:
    """Every headline figure of every cell.

    Errors: NotComparable for results of different recipes, or a cell that has failed requests.
    """
    try:
        return _lines(first, second)
    except NotComparable:
        raise
    except (KeyError, TypeError, AttributeError, ValueError):
        raise NotComparable("one of them is not a whole result of laoka bench") from None


def _lines(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[Line, ...]:
    different = differences(first["recipe"], second["recipe"])
    both = cells_of(first), cells_of(second)
    if different:
        raise NotComparable("the recipes differ, so the figures do not compare: " + "; ".join(different))
    lines = []
    for label in both[1]:
        if label not in both[0]:
            raise NotComparable(f"only one of them has {label}")
    for label, cell in both[0].items():
        other = both[1].get(label)
        if other is None:
            raise NotComparable(f"only one of them has {label}")
        for run in (*cell["repeats"], *other["repeats"]):
            if run["failed"]:
                raise NotComparable(f"{label}: {run['failed']} of {run['num_prompts']} requests failed in one of them")
        for figure, more_is_better in HEADLINES[cell["kind"]]:
            lines.append(Line(label, figure, *side_by_side(cell, other, figure, more_is_better=more_is_better)))
    return tuple(lines)


def notes(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[str, ...]:
    """What else differs between two results of one recipe: what was measured, and what spoils either of them."""
    found = []
    for name in ("model", "engine_version", "serve_flags", "lock_sha256", "driver", "cards", "simulated"):
        values = [side.get("provenance", {}).get(name) for side in (first, second)]
        if values[0] != values[1]:
            found.append(f"{name}: {values[0]} and {values[1]}")
    for label, side in (("first", first), ("second", second)):
        found += [f"{label}: {banner['text']}" for banner in side.get("banners", ())]
    return tuple(found)
