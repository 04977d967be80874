"""How fast it can be at most, and how fast others measured it. Pure.

A ceiling is bytes read for a token over memory bandwidth (decode), or operations over the tensor peak (prefill): no engine
passes it, and none reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass

from laoka.catalog.engines import Engine
from laoka.catalog.gpus import Gpu, gpus
from laoka.catalog.load import by_id
from laoka.catalog.models import Drafter
from laoka.catalog.profiles import Profile, Speculative, profiles
from laoka.stack.plan import Load, gdn_state_bytes, kv_bytes_per_token
from laoka.stack.request import Checkpoint

GSM8K_TOKENS_PER_ROUND = 5.39
"""Published acceptance of DFlash2 on GSM8K with this model: tokens a round, 1Cat-vLLM RELEASE.md of 1.5.0."""


@dataclass(frozen=True)
class Ceilings:
    """Upper bounds in tokens a second, for one request. None where the card's figure is unknown."""

    decode_tok_s: float | None
    """Without speculation, at the wanted context."""
    decode_speculative_tok_s: float | None
    """With every drafted token accepted; None without speculation."""
    decode_at_published_acceptance_tok_s: float | None
    """With the acceptance that was published for GSM8K; None where none was."""
    prefill_tok_s: float | None
    arithmetic: str


def ceilings(gpu: Gpu | None, tensor_parallel: int, checkpoint: Checkpoint, load: Load, drafter: Drafter | None) -> Ceilings | None:
    """Ceilings of one request on these cards; None without a card."""
    if gpu is None:
        return None
    arch, weights = checkpoint.architecture, checkpoint.weights
    kv = load.context_tokens * kv_bytes_per_token(arch, tensor_parallel, load)
    state = 2 * gdn_state_bytes(arch, tensor_parallel)
    head = weights.lm_head or weights.embedding
    read = (weights.linear + head) / tensor_parallel + kv + state
    bandwidth = gpu.memory_bandwidth_gb_s
    decode = bandwidth * 1e9 / read if bandwidth and read else None
    most = published = None
    if bandwidth and read and load.speculative_tokens:
        extra = 0.0
        if drafter is not None:
            extra = drafter.bytes_total / (1 if drafter.replicated else tensor_parallel)
        elif load.speculative == "mtp":
            extra = load.speculative_tokens * (weights.mtp + head) / tensor_parallel
        rounds = bandwidth * 1e9 / (read + extra)
        most = rounds * (1 + load.speculative_tokens)
        published = rounds * GSM8K_TOKENS_PER_ROUND if drafter is not None and drafter.validated else None
    operations = 2 * weights.linear_parameters + 2 * arch.full_attention_layers * arch.heads * arch.head_dim * load.context_tokens
    peak = gpu.fp16_tensor_tflops
    prefill = tensor_parallel * peak * 1e12 / operations if peak and operations else None
    told = (
        f"decode: {read / 1e9:.2f} GB a token and GPU (weights {(weights.linear + head) / tensor_parallel / 1e9:.2f}, "
        f"KV {kv / 1e9:.2f}, state {state / 1e9:.2f}) / {bandwidth or '?'} GB/s; "
        f"prefill: {operations / 1e9:.1f} GFLOP a token / ({tensor_parallel} x {peak or '?'} TFLOPS)"
    )
    return Ceilings(decode, most, published, prefill, told)


def profiles_for(
    gpu: Gpu | None, tensor_parallel: int, engine: Engine, model: str, speculative: Speculative
) -> tuple[Profile, ...]:
    """What was measured on such a setup: as many cards, the same engine, model and speculation.

    This very card and release first; then cards of the same family with as much memory (another form of it, say), told by `gpu`.
    """
    if gpu is None:
        return ()
    known = by_id(gpus())
    alike = {row.id for row in known.values() if row.family == gpu.family and row.memory_mib == gpu.memory_mib is not None}
    found = [
        profile
        for profile in profiles()
        if profile.gpu in {gpu.id, *alike}
        and profile.count == tensor_parallel
        and profile.engine.split("==")[0] == engine.name
        and profile.model == model
        and profile.speculative == speculative
    ]
    return tuple(sorted(found, key=lambda profile: (profile.gpu != gpu.id, profile.engine != engine.pin)))
