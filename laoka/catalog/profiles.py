"""Measured serving recipes, published memory figures, and the few constants of the memory plan that had to be fitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from laoka.catalog.engines import engines
from laoka.catalog.gpus import gpus
from laoka.catalog.load import CatalogError, Row, by_id, load, references
from laoka.catalog.models import drafters, models

FILE = "profiles.toml"

Speculative = Literal["none", "mtp", "dflash2"]


@dataclass(frozen=True)
class Speed:
    """One published speed. `streams` is how many requests ran at once; tok_s is of all of them together."""

    kind: Literal["decode", "prefill"]
    tok_s: float
    context_tokens: int | None = None
    streams: int = 1
    condition: str = ""


@dataclass(frozen=True, kw_only=True)
class Profile(Row):
    """A recipe that somebody ran: cards, engine, model, flags, and what came out."""

    gpu: str
    count: int
    engine: str
    model: str
    speculative: Speculative
    works: bool
    measured_by: str
    status: Literal["release", "published", "reported"]
    """release: the engine's own profile; published: its project's figures; reported: somebody else's."""
    drafter: str | None = None
    context_tokens: int | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    speed: tuple[Speed, ...] = ()
    notes: str = ""


@dataclass(frozen=True, kw_only=True)
class MemoryFigure(Row):
    """A published memory figure of one GPU, that the plan is held against."""

    kind: Literal["resident", "non_kv", "process", "kv_tokens", "gdn_buffer", "kv_needed"]
    """resident: weights and drafter as loaded; non_kv: all but the KV pool; process: what nvidia-smi shows;
    kv_tokens: capacity as the engine prints it; gdn_buffer: one allocation; kv_needed: for one short request."""
    role: Literal["arithmetic", "fitted", "held-out", "not reproduced"]
    gpu: str
    count: int
    engine: str
    model: str
    speculative: Speculative
    value: float
    unit: Literal["GiB", "MiB", "tokens"]
    speculative_tokens: int = 0
    utilization: float | None = None
    streams: int = 1
    batched_tokens: int = 8192
    context_tokens: int | None = None
    notes: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict(Row):
    """A published verdict of whether a configuration fits."""

    gpu: str
    count: int
    engine: str
    model: str
    speculative: Speculative
    context_tokens: int
    streams: int
    fits: bool
    reproduced: bool = True
    """False: the plan says otherwise, and that is told."""
    notes: str = ""


@dataclass(frozen=True, kw_only=True)
class Constant(Row):
    """A constant of the memory plan that was fitted, and on what."""

    value: float
    unit: str
    meaning: str
    fitted_on: tuple[str, ...]
    held_out: tuple[str, ...] = ()
    reserve: bool = False
    """Kept free and never used to reproduce a figure."""


def check(
    profiles: tuple[Profile, ...],
    figures: tuple[MemoryFigure, ...],
    verdicts: tuple[Verdict, ...],
    constants: tuple[Constant, ...],
) -> None:
    """Every reference is there, and a constant is never held out on what it was fitted on. Errors: CatalogError."""
    gpu_ids, pins, model_ids = by_id(gpus()), {engine.pin for engine in engines()}, by_id(models())
    for rows in (profiles, figures, verdicts):
        references(rows, "gpu", gpu_ids, FILE)
        references(rows, "engine", pins, FILE)
        references(rows, "model", model_ids, FILE)
    references(profiles, "drafter", drafters(), FILE)
    names = by_id(figures)
    for constant in constants:
        references((constant,), "fitted_on", names, FILE)
        references((constant,), "held_out", names, FILE)
        if not constant.fitted_on or set(constant.fitted_on) & set(constant.held_out):
            raise CatalogError(f"{FILE}: {constant.id}: fitted_on is empty, or shares a figure with held_out")
        for name in constant.fitted_on:
            if names[name].role != "fitted" and not constant.reserve:
                raise CatalogError(f"{FILE}: {constant.id}: was fitted on {name}, whose role says {names[name].role}")


@cache
def profiles() -> tuple[Profile, ...]:
    """Every measured recipe. Errors: CatalogError."""
    rows = load(FILE, "profile", Profile)
    check(rows, load(FILE, "memory_figure", MemoryFigure), load(FILE, "verdict", Verdict), load(FILE, "constant", Constant))
    return rows


@cache
def memory_figures() -> tuple[MemoryFigure, ...]:
    """Every published memory figure. Errors: CatalogError."""
    return load(FILE, "memory_figure", MemoryFigure)


@cache
def verdicts() -> tuple[Verdict, ...]:
    """Every published verdict. Errors: CatalogError."""
    return load(FILE, "verdict", Verdict)


@cache
def constants() -> dict[str, Constant]:
    """Fitted constants by id. Errors: CatalogError."""
    return by_id(load(FILE, "constant", Constant))
