"""The memory plan against every published figure that laoka knows: `python -m benchmarks.memory_plan`.

Nothing is measured here: the figures are other people's (catalog/profiles.toml, each with its source), the predictions are
laoka.stack.plan's. "fitted" figures fixed a constant and prove nothing; "held-out" and "arithmetic" ones do.
Exit status 1 when a figure that is said to be reproduced is more than 5 % off, or a verdict differs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from laoka.catalog.engines import Engine, engines
from laoka.catalog.gpus import gpus
from laoka.catalog.load import by_id
from laoka.catalog.models import architectures, drafters, models
from laoka.catalog.profiles import MemoryFigure, Verdict, memory_figures, verdicts
from laoka.stack import plan
from laoka.stack.weights import from_catalogue

TOLERANCE = 0.05


@dataclass(frozen=True)
class Compared:
    """A published figure and what the plan says to it, in the figure's own unit."""

    figure: MemoryFigure
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return self.predicted / self.figure.value

    @property
    def within(self) -> bool:
        """Whether it is within 5 %."""
        return abs(self.ratio - 1) <= TOLERANCE


def engine_of(pin: str) -> Engine:
    """The engine release "name==version" of the catalogue."""
    return next(engine for engine in engines() if engine.pin == pin)


def predict(figure: MemoryFigure) -> float:
    """What the plan predicts for one published figure, in its unit."""
    model = by_id(models())[figure.model]
    arch, engine = architectures()[model.architecture], engine_of(figure.engine)
    memory_mib = by_id(gpus())[figure.gpu].memory_mib
    load = plan.Load(
        figure.context_tokens or 4096, figure.streams, figure.speculative, figure.speculative_tokens, figure.batched_tokens,
        engine.kv_cache_dtype or "auto",
    )  # fmt: skip
    drafter = drafters()[model.drafter] if model.drafter and figure.speculative == "dflash2" else None
    made = plan.memory_plan(
        weights=from_catalogue(model, arch), arch=arch, engine=engine, load=load, memory_mib=memory_mib,
        tensor_parallel=figure.count, drafter=drafter, utilization=figure.utilization,
    )  # fmt: skip
    size = {line.key: line.bytes for line in made.lines}
    resident = sum(size.get(key, 0) for key in ("weights_sharded", "weights_replicated", "drafter"))
    if figure.kind == "resident":
        return resident / plan.GIB
    if figure.kind == "non_kv":
        return (resident + size["sampler"] + size["activations"]) / plan.GIB
    if figure.kind == "kv_tokens":
        return plan.kv_capacity_tokens(made.pool_bytes, arch, engine, figure.count, load)
    if figure.kind == "kv_needed":
        return plan.request_bytes(arch, engine, figure.count, load) / plan.GIB
    if figure.kind == "gdn_buffer":
        return plan.gdn_scratch_bytes(arch, figure.count, figure.batched_tokens)[0] / plan.MIB
    assert memory_mib is not None and figure.utilization is not None
    # The runtime reserve is this very figure's remainder, so it has no place in its prediction.
    return memory_mib * figure.utilization + (size["score_workspace"] + size["gdn_scratch"]) / plan.MIB


def judge(verdict: Verdict) -> plan.MemoryPlan:
    """The plan of a configuration of which it is known whether it fits."""
    model = by_id(models())[verdict.model]
    arch, engine = architectures()[model.architecture], engine_of(verdict.engine)
    drafter = drafters()[model.drafter] if model.drafter and verdict.speculative == "dflash2" else None
    tokens = (drafter.speculative_tokens or 0) if drafter else 0
    load = plan.Load(
        verdict.context_tokens, verdict.streams, verdict.speculative, tokens, kv_cache_dtype=engine.kv_cache_dtype or "auto"
    )
    return plan.fitting_plan(
        weights=from_catalogue(model, arch), arch=arch, engine=engine, load=load, memory_mib=by_id(gpus())[verdict.gpu].memory_mib,
        tensor_parallel=verdict.count, drafter=drafter,
    )  # fmt: skip


def compared() -> tuple[Compared, ...]:
    """Every published figure with its prediction."""
    return tuple(Compared(figure, predict(figure)) for figure in memory_figures())


def main() -> int:
    """Print both tables. Returns the exit status."""
    out = Console(width=None if sys.stdout.isatty() else 150)
    table = Table(title="Memory of one GPU: predicted against published")
    for name in ("figure", "role"):
        table.add_column(name)
    for name in ("published", "predicted", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("source")
    failed = 0
    for item in compared():
        figure, digits = item.figure, 0 if item.figure.unit == "tokens" else 2
        claimed = figure.role != "not reproduced"
        failed += claimed and not item.within
        mark = "" if item.within else "  > 5 %" if claimed else "  no"
        note = f"{figure.source}. {figure.notes}" if figure.notes else figure.source
        table.add_row(
            figure.id,
            figure.role,
            f"{figure.value:,.{digits}f} {figure.unit}",
            f"{item.predicted:,.{digits}f}",
            f"{item.ratio:.3f}{mark}",
            note,
        )
    out.print(table)
    table = Table(title="Fits or not: predicted against published")
    for name in ("configuration", "published", "predicted", "free for KV (GiB a GPU)", "source"):
        table.add_column(name)
    for verdict in verdicts():
        made = judge(verdict)
        failed += verdict.reproduced and made.fits is not verdict.fits
        words = {True: "fits", False: "does not fit", None: "unknown"}
        name = f"{verdict.count}x {verdict.gpu}, {verdict.speculative}, {verdict.context_tokens} tokens x {verdict.streams}"
        mark = "" if verdict.reproduced else " (not reproduced)"
        table.add_row(name, words[verdict.fits], words[made.fits] + mark, f"{made.pool_bytes / plan.GIB:.1f}", verdict.source)
    out.print(table)
    claimed_rows = [item for item in compared() if item.figure.role in ("arithmetic", "held-out")]
    worst = max(claimed_rows, key=lambda item: abs(item.ratio - 1))
    out.print(
        f"{len(claimed_rows)} figures not used for fitting: the worst is {worst.ratio - 1:+.1%} ({worst.figure.id}). "
        f"{sum(item.figure.role == 'not reproduced' for item in compared())} figures are not reproduced, and said to be."
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
