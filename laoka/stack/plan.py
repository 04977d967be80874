"""The memory plan: what one GPU has to hold, line by line with its arithmetic and source, and whether it fits. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from laoka.catalog.engines import Engine
from laoka.catalog.models import Architecture, Drafter
from laoka.catalog.profiles import Constant, Speculative, constants
from laoka.stack.weights import Weights, resident_linear

MIB = 1024**2
GIB = 1024**3
GDN_CHUNK_TOKENS = 64
MARGIN = 0.01
"""Share of a card left alone against fragmentation."""
SMALL_CARD_MIB = 24 * 1024
SCORE_BLOCK_TOKENS, SMALL_SCORE_BLOCK_TOKENS = 16384, 4096
SMALLEST_BATCH = 2048
CUDA_GRAPHS_MIB = 133
"""CUDA graph pool of one rank, 0.13 GiB: 1Cat-vLLM PR #420, TP4 with DFlash2."""
KV_BYTES = {"auto": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}


@dataclass(frozen=True)
class Load:
    """What is asked of the server.

    `context_tokens` for each of `streams` requests at once; `speculative_tokens` drafted in a round (0 without);
    `batched_tokens` of one step of prefill; `language_model_only`: no vision tower is loaded.
    """

    context_tokens: int
    streams: int
    speculative: Speculative = "none"
    speculative_tokens: int = 0
    batched_tokens: int = 8192
    kv_cache_dtype: str = "auto"
    language_model_only: bool = False
    prefix_caching: bool = True


@dataclass(frozen=True)
class Line:
    """One line of the plan, for one GPU. `inside`: the engine counts it in its utilization; otherwise it comes on top."""

    key: str
    bytes: int
    inside: bool
    arithmetic: str
    source: str


@dataclass(frozen=True)
class MemoryPlan:
    """Whether it fits, and what to ask of the engine. `fits` is None when the memory of the device is not known."""

    fits: bool | None
    memory_bytes: int | None
    tensor_parallel: int
    lines: tuple[Line, ...]
    utilization: float | None
    pool_bytes: int
    """What is left for KV and state at that utilization; below zero when even the weights don't fit."""
    max_context: int
    max_streams: int
    load: Load
    score_block_tokens: int | None = None

    @property
    def inside_bytes(self) -> int:
        """What the engine counts in its utilization."""
        return sum(line.bytes for line in self.lines if line.inside)

    @property
    def outside_bytes(self) -> int:
        """What comes on top of it."""
        return sum(line.bytes for line in self.lines if not line.inside)

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.inside_bytes + self.outside_bytes

    def line(self, key: str) -> Line:
        """The line of this key; zero bytes when the plan has none."""
        return next((line for line in self.lines if line.key == key), Line(key, 0, True, "", ""))


def kv_bytes_per_token(arch: Architecture, tensor_parallel: int, load: Load) -> int:
    """KV bytes of one token on one GPU: only full-attention layers have any, and MTP's own layer when it drafts."""
    layers = arch.full_attention_layers + (arch.mtp_layers if load.speculative == "mtp" else 0)
    heads = max(1, arch.kv_heads // tensor_parallel)
    return layers * 2 * heads * arch.head_dim * KV_BYTES.get(load.kv_cache_dtype, 2)


def gdn_state_bytes(arch: Architecture, tensor_parallel: int) -> int:
    """Recurrent and convolution state of one sequence on one GPU, one copy of it."""
    recurrent = arch.gdn_value_heads * arch.gdn_head_dim**2 * arch.gdn_state_bytes
    width = (2 * arch.gdn_key_heads + arch.gdn_value_heads) * arch.gdn_head_dim
    convolution = width * max(0, arch.gdn_conv_kernel - 1) * 2
    return arch.gdn_layers * (recurrent + convolution) // tensor_parallel


def state_copies(load: Load) -> int:
    """Copies of the state that the engine keeps for a sequence: one, one for each drafted token, one more to align prefixes."""
    return (2 if load.prefix_caching else 1) + load.speculative_tokens


def gdn_scratch_bytes(arch: Architecture, tensor_parallel: int, batched_tokens: int) -> tuple[int, int]:
    """(chunk states h, v_new and o together): buffers of a GDN prefill on one GPU, which the engine's profile does not see."""
    if not arch.gdn_layers:
        return 0, 0
    heads = arch.gdn_value_heads / tensor_parallel
    states = batched_tokens / GDN_CHUNK_TOKENS * heads * arch.gdn_head_dim**2 * 2
    values = 2 * batched_tokens * heads * arch.gdn_head_dim * 2
    return int(states), int(values)


def request_bytes(arch: Architecture, engine: Engine, tensor_parallel: int, load: Load) -> float:
    """What one request of the full context takes of the pool on one GPU: KV and state, with the engine's own overhead."""
    kv = load.context_tokens * kv_bytes_per_token(arch, tensor_parallel, load)
    return (kv + state_copies(load) * gdn_state_bytes(arch, tensor_parallel)) * engine.kv_overhead


def kv_capacity_tokens(pool_bytes: float, arch: Architecture, engine: Engine, tensor_parallel: int, load: Load) -> int:
    """The "GPU KV cache size" as the engine prints it: requests of the longest context that fit, times that length."""
    return int(pool_bytes / request_bytes(arch, engine, tensor_parallel, load) * load.context_tokens)


def resident_lines(weights: Weights, drafter: Drafter | None, engine: Engine, tensor_parallel: int, load: Load) -> tuple[Line, ...]:
    """Weights and drafter on one GPU."""
    linear = resident_linear(weights, engine)
    shared = {"embedding": weights.embedding, "lm_head": weights.lm_head, "linear": linear}
    if weights.vision and not load.language_model_only:
        shared["vision"] = weights.vision
    if load.speculative == "mtp":
        shared["mtp"] = weights.mtp
    total = sum(shared.values())
    parts = " + ".join(f"{name} {size / GIB:.2f}" for name, size in shared.items())
    grown = ""
    if linear != weights.linear:
        grown = f"; NVFP4 takes {engine.nvfp4_bytes_per_weight} bytes a weight once repacked (0.5625 in the file)"
    lines = [Line("weights_sharded", total // tensor_parallel, True, f"({parts}) GiB / TP{tensor_parallel}{grown}", weights.source)]
    if weights.other:
        lines.append(Line("weights_replicated", weights.other, True, "norms and small tensors, whole on every GPU", weights.source))
    if drafter is not None and load.speculative == "dflash2":
        share = 1 if drafter.replicated else tensor_parallel
        lines.append(Line("drafter", drafter.bytes_total // share, True, f"{drafter.repo}, whole on every GPU", drafter.source))
    return tuple(lines)


def working_lines(arch: Architecture, tensor_parallel: int, load: Load, fitted: dict[str, Constant]) -> tuple[Line, ...]:
    """What a step needs beside weights and pool: sampling buffers and activations, by two fitted constants."""
    sampler, activation = fitted["sampler_copies"], fitted["activation_bytes_per_token"]
    rows = load.streams * (1 + load.speculative_tokens)
    scale = activation.value * arch.intermediate / 17408
    return (
        Line(
            "sampler", int(rows * arch.vocab * 4 * sampler.value), True,
            f"{rows} rows x {arch.vocab} words x 4 B x {sampler.value:g} copies (fitted)", sampler.source,
        ),
        Line(
            "activations", int(load.batched_tokens * scale / tensor_parallel), True,
            f"{load.batched_tokens} tokens x {scale:.0f} B (fitted) / TP{tensor_parallel}", activation.source,
        ),
    )  # fmt: skip


def outside_lines(
    arch: Architecture, engine: Engine, memory_mib: int, tensor_parallel: int, load: Load, fitted: dict[str, Constant]
) -> tuple[Line, ...]:
    """What comes on top of the engine's utilization."""
    states, values = gdn_scratch_bytes(arch, tensor_parallel, load.batched_tokens)
    reserve = fitted["runtime_reserve"]
    lines = []
    if states:
        lines.append(
            Line(
                "gdn_scratch", states + values, False,
                f"h {states / MIB:.0f} MiB + v_new, o {values / MIB:.0f} MiB: {load.batched_tokens} tokens / TP{tensor_parallel}",
                "vllm #54775: not in the engine's memory profile; arithmetic of club-3090 docs/KV_MATH.md",
            )
        )  # fmt: skip
    if engine.score_workspace_mib:
        block = score_block_tokens(engine, memory_mib)
        share = engine.score_workspace_mib * MIB * (block or 0) // SCORE_BLOCK_TOKENS
        lines.append(
            Line(
                "score_workspace",
                share,
                False,
                f"{engine.score_workspace_mib} MiB x {block} / {SCORE_BLOCK_TOKENS} block tokens",
                engine.source,
            )
        )
    graphs = f"graph pool of one rank: {CUDA_GRAPHS_MIB} MiB (none with --enforce-eager)"
    lines.append(Line("cuda_graphs", CUDA_GRAPHS_MIB * MIB, False, graphs, "1Cat-vLLM PR #420: TP4 with DFlash2"))
    lines.append(
        Line(
            "runtime",
            int(reserve.value * MIB),
            False,
            f"CUDA context and NCCL: {reserve.value:.0f} MiB (reserve)",
            reserve.source,
        )
    )
    lines.append(
        Line(
            "margin",
            int(memory_mib * MIB * MARGIN),
            False,
            f"{MARGIN:.0%} of {memory_mib} MiB against fragmentation",
            "laoka's own margin",
        )
    )
    return tuple(lines)


def score_block_tokens(engine: Engine, memory_mib: int) -> int | None:
    """VLLM_FLASH_V100_PREFILL_SCORE_BLOCK_TOKENS for this card: its default, or less on a small card; None where there is none."""
    if engine.score_workspace_mib is None:
        return None
    return SMALL_SCORE_BLOCK_TOKENS if memory_mib < SMALL_CARD_MIB else SCORE_BLOCK_TOKENS


def memory_plan(
    *,
    weights: Weights,
    arch: Architecture,
    engine: Engine,
    load: Load,
    memory_mib: int | None,
    tensor_parallel: int = 1,
    drafter: Drafter | None = None,
    utilization: float | None = None,
) -> MemoryPlan:
    """Plan one GPU of a tensor-parallel group.

    Arguments: `memory_mib` of the card as the driver shows it, None when unknown; `utilization` to use, or None to have
    the recipe's 0.80 chosen where it does and the highest safe one where it does not.
    The batch is `load.batched_tokens`; `fitting_plan` tries smaller ones.
    """
    fitted = constants()
    kv_token, state = kv_bytes_per_token(arch, tensor_parallel, load), gdn_state_bytes(arch, tensor_parallel)
    copies = state_copies(load)
    overhead = f" x {engine.kv_overhead} (fitted)" if engine.kv_overhead != 1 else ""
    pool_lines = [
        Line(
            "kv", int(load.streams * load.context_tokens * kv_token * engine.kv_overhead), True,
            f"{load.streams} x {load.context_tokens} tokens x {kv_token} B ({load.kv_cache_dtype}){overhead}", arch.source,
        )
    ]  # fmt: skip
    if state:
        pool_lines.append(
            Line(
                "gdn_state", int(load.streams * copies * state * engine.kv_overhead), True,
                f"{load.streams} x {copies} copies x {state / MIB:.1f} MiB{overhead}",
                "vLLM's MambaSpec: 1 + drafted tokens, one more to align prefixes",
            )
        )  # fmt: skip
    fixed = resident_lines(weights, drafter, engine, tensor_parallel, load)
    if memory_mib is None:
        lines = (*fixed, *pool_lines)
        return MemoryPlan(None, None, tensor_parallel, lines, None, 0, load.context_tokens, load.streams, load)
    working = working_lines(arch, tensor_parallel, load, fitted)
    outside = outside_lines(arch, engine, memory_mib, tensor_parallel, load, fitted)
    memory = memory_mib * MIB
    safe = math.floor((memory - sum(line.bytes for line in outside)) / memory * 100) / 100
    needed = sum(line.bytes for line in (*fixed, *working, *pool_lines)) / memory
    chosen = utilization if utilization is not None else 0.80 if needed <= 0.80 <= safe else safe
    pool = int(memory * chosen) - sum(line.bytes for line in (*fixed, *working))
    wanted = sum(line.bytes for line in pool_lines)
    # Largest values are at the highest safe utilization, not at the one chosen for the wanted load.
    free = int(memory * safe) - sum(line.bytes for line in fixed) - working[1].bytes
    one_sampler = working[0].bytes / load.streams
    state_total = copies * state * engine.kv_overhead
    left = free - load.streams * (one_sampler + state_total)
    most = int(left / (load.streams * kv_token * engine.kv_overhead)) if kv_token else 0
    per_stream = one_sampler + request_bytes(arch, engine, tensor_parallel, load)
    return MemoryPlan(
        fits=wanted <= pool and chosen <= safe,
        memory_bytes=memory,
        tensor_parallel=tensor_parallel,
        lines=(*fixed, *working, *pool_lines, *outside),
        utilization=chosen,
        pool_bytes=pool,
        max_context=max(0, min(most, arch.max_position)),
        max_streams=max(0, int(free / per_stream)) if per_stream else 0,
        load=load,
        score_block_tokens=score_block_tokens(engine, memory_mib),
    )


def batch_choices(engine: Engine, load: Load) -> tuple[int, ...]:
    """Batches to try, largest first: the engine's own, halved down to 2048, never below what DFlash2's fast path needs."""
    least = engine.min_batched_tokens_dflash2 if load.speculative == "dflash2" else None
    choices, batch = [], engine.default_batched_tokens
    while batch >= SMALLEST_BATCH and (least is None or batch >= least):
        choices.append(batch)
        batch //= 2
    return tuple(choices) or (engine.default_batched_tokens,)


def fitting_plan(
    *,
    weights: Weights,
    arch: Architecture,
    engine: Engine,
    load: Load,
    memory_mib: int | None,
    tensor_parallel: int = 1,
    drafter: Drafter | None = None,
) -> MemoryPlan:
    """The plan with the largest batch that fits; the one with the smallest batch when none does."""
    plan = None
    for batch in batch_choices(engine, load):
        plan = memory_plan(
            weights=weights, arch=arch, engine=engine, load=replace(load, batched_tokens=batch), memory_mib=memory_mib,
            tensor_parallel=tensor_parallel, drafter=drafter,
        )  # fmt: skip
        if plan.fits or plan.fits is None:
            return plan
    assert plan is not None  # batch_choices is never empty
    return plan
