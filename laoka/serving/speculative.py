"""Whether a host serves with speculative decoding, and why or why not. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """What is put on the engine's command line: `method` is "dflash" or None; `reason` is what a person is told."""

    method: str | None
    reason: str


def decide(wanted: str, engine_name: str, gpu_count: int) -> Decision:
    """Decide on DFlash2.

    Arguments: `wanted` is "auto", "dflash2", "mtp" or "none"; `engine_name` as in the inventory; `gpu_count` the cards that serve.
    DFlash2 is not a package: it is kernels inside an engine for sm_70 or sm_75 and later, plus a drafter checkpoint of 3.85 GB
    that every GPU holds whole (source: 1Cat-vLLM 1.5.1 README; the drafter's own repository).
    """
    if wanted == "none":
        return Decision(None, "off: speculative = none in the inventory")
    if engine_name == "vllm-cpu":
        return Decision(None, "off: the engine is vllm-cpu, and DFlash2's kernels run on a GPU only")
    if gpu_count == 0:
        return Decision(None, "off: no GPU is listed in expected_gpus")
    return Decision(None, f"off: laoka can't install {engine_name}'s drafter yet")
