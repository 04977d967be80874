"""Whether an engine can serve a checkpoint's format on a card, what it would end with if not, and what to take instead. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laoka.catalog.engines import Engine
from laoka.catalog.models import Model, architectures
from laoka.stack.quantisation import Declared

NO_CODE = "RuntimeError: CUDA error: no kernel image is available for execution on the device"


@dataclass(frozen=True)
class NotServable:
    """A checkpoint that this engine can't serve here. `error` is what the engine would end with; None where that is not known.

    `known` False: nobody looked whether this release takes the scheme.
    """

    engine: str
    sm: int | None
    scheme: str
    error: str | None
    known: bool = True


def judge(engine: Engine, sm: int | None, scheme: str, said: Declared) -> NotServable | None:
    """None where the engine takes the scheme on a card of this compute capability.

    Arguments: `sm` None for an engine without a card, or where the card is not told; `scheme` what the checkpoint is
    (laoka.stack.quantisation.scheme_of).
    """
    least = engine.quantisations.get(scheme)
    if least is None:
        refused = bool(engine.methods) and said.method not in ("none", *engine.methods)
        error = f"ValueError: Unknown quantization method: {said.method}. Must be one of [...]." if refused else None
        return NotServable(engine.pin, sm, scheme, error, known=refused or engine.device == "cpu")
    if engine.device == "cpu" or sm is None:
        return None
    if sm < least:
        return NotServable(engine.pin, sm, scheme, capability_error(engine, least, sm, scheme, said))
    return None if sm in engine.sm else NotServable(engine.pin, sm, scheme, NO_CODE)


def capability_error(engine: Engine, least: int, sm: int, scheme: str, said: Declared) -> str:
    """What vLLM and the engines made of it end with on a card of a lower capability.

    Texts: the sources of vLLM 0.19.1, 0.28.0 and 0.32.0 and of revolta 0.1.4. Until 0.28 the one of compressed-tensors is raised in
    three parts, and printed so; in 0.32 it is one sentence.
    """
    if scheme.startswith("compressed-tensors:"):
        parts = (
            "Quantization scheme is not supported for ",
            f"the current GPU. Min capability: {least}. ",
            f"Current capability: {sm}.",
        )
        in_one = engine.name == "vllm" and _numbers(engine.version) >= (0, 32)
        return f"RuntimeError: {''.join(parts) if in_one else repr(parts)}"
    method = said.method if said.method != "none" else scheme
    return (
        f"ValueError: The quantization method {method} is not supported for the current GPU. "
        f"Minimum capability: {least}. Current capability: {sm}."
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def runs_on(engine: Engine, sm: int | None) -> bool:
    """Whether laoka installs the engine and it has code for this card."""
    return engine.kind == "vllm" and (engine.device == "cpu" or sm is None or sm in engine.sm)


def alternatives(engine: Engine, sm: int | None, model_type: str, models: Sequence[Model]) -> tuple[Model, ...]:
    """Catalogued checkpoints of the same architecture that this engine serves here, those that it validates itself first."""
    kinds = architectures()
    fitting = [
        row
        for row in models
        if kinds[row.architecture].model_type == model_type.removesuffix("_text")
        and runs_on(engine, sm)
        and (least := engine.quantisations.get(row.scheme)) is not None
        and (sm is None or sm >= least)
    ]
    return tuple(sorted(fitting, key=lambda row: (engine.name not in row.validated_by, "nvfp4" not in row.scheme)))


def engines_for(scheme: str, sm: int | None, engines: Sequence[Engine]) -> tuple[Engine, ...]:
    """Engines, the newest of each name, that take the scheme on this card."""
    found: dict[str, Engine] = {}
    for engine in engines:
        least = engine.quantisations.get(scheme)
        if least is not None and runs_on(engine, sm) and (sm is None or sm >= least):
            found.setdefault(engine.name, engine)
    return tuple(found.values())


def ways_out(
    engine: Engine, sm: int | None, scheme: str, model_type: str, models: Sequence[Model], engines: Sequence[Engine], but: str = ""
) -> tuple[str, ...]:
    """What to take instead of a checkpoint that an engine can't serve, in words: other checkpoints, another engine, or both.

    Arguments: `sm` None without a card; `but` the repository that was refused.
    """
    rows = [row.repo for row in alternatives(engine, sm, model_type, models) if row.repo != but][:2]
    others = [row for row in engines_for(scheme, sm, engines) if row.name != engine.name and row.device == engine.device]
    found = (*rows, *(row.pin for row in others[:1]))
    if found:
        return found
    here = {row.name: row for row in reversed(engines) if row.name != engine.name and row.device == "cuda" and runs_on(row, sm)}
    pairs = [(row, other) for row in reversed(here.values()) for other in alternatives(row, sm, model_type, models)[:1]]
    return tuple(f"{other.repo} with {row.pin}" for row, other in pairs[:1])
