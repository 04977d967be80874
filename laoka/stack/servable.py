"""Whether an engine can serve a checkpoint's format on a card, what it would end with if not, and what to take instead. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laoka.catalog.engines import Engine
from laoka.catalog.models import Model, architectures
from laoka.stack.quantisation import Declared

UPSTREAM_CT_MIN = 75
"""The lowest capability of compressed-tensors' 4-bit schemes in vLLM 0.16 to 0.33, and for INT4 in 1Cat-vLLM (#255)."""


@dataclass(frozen=True)
class NotServable:
    """A checkpoint that this engine can't serve here. `error` is what the engine would end with; None where that is not known."""

    engine: str
    sm: int | None
    scheme: str
    error: str | None


def judge(engine: Engine, sm: int | None, scheme: str, said: Declared) -> NotServable | None:
    """None where the engine takes the scheme on a card of this compute capability.

    Arguments: `sm` None for an engine without a card; `scheme` what the checkpoint is (laoka.stack.quantisation.scheme_of).
    """
    least = engine.quantisations.get(scheme)
    if least is not None and (sm is None or sm >= least):
        return None
    if engine.device == "cpu" or sm is None:
        return NotServable(engine.pin, sm, scheme, None)
    return NotServable(engine.pin, sm, scheme, future_error(least, sm, scheme, said))


def future_error(least: int | None, sm: int, scheme: str, said: Declared) -> str | None:
    """What vLLM and the engines made of it end with. Texts: vLLM 0.33.0's and revolta 0.1.4's sources."""
    family = scheme.split(":")[0]
    if family == "compressed-tensors":
        needed = least if least is not None else UPSTREAM_CT_MIN
        if sm >= needed:
            return None
        parts = (
            "Quantization scheme is not supported for ",
            f"the current GPU. Min capability: {needed}. ",
            f"Current capability: {sm}.",
        )
        return f"RuntimeError: {parts!r}"
    if least is not None:
        method = said.method if said.method != "none" else scheme
        return (
            f"ValueError: The quantization method {method} is not supported for the current GPU. "
            f"Minimum capability: {least}. Current capability: {sm}."
        )
    return f"ValueError: Unknown quantization method: {said.method}. Must be one of [...]." if said.method != "none" else None


def alternatives(engine: Engine, sm: int | None, model_type: str, models: Sequence[Model]) -> tuple[Model, ...]:
    """Catalogued checkpoints of the same architecture that this engine serves here, those that it validates itself first."""
    kinds = architectures()
    fitting = [
        row
        for row in models
        if kinds[row.architecture].model_type == model_type.removesuffix("_text")
        and (least := engine.quantisations.get(row.scheme)) is not None
        and (sm is None or sm >= least)
    ]
    return tuple(sorted(fitting, key=lambda row: (engine.name not in row.validated_by, "nvfp4" not in row.scheme)))


def engines_for(scheme: str, sm: int | None, engines: Sequence[Engine]) -> tuple[Engine, ...]:
    """Engines, the newest of each name, that take the scheme on this card."""
    found: dict[str, Engine] = {}
    for engine in engines:
        least = engine.quantisations.get(scheme)
        fits = least is not None and engine.kind == "vllm" and (sm is None or (sm >= least and sm in engine.sm))
        if fits and engine.name not in found:
            found[engine.name] = engine
    return tuple(found.values())
