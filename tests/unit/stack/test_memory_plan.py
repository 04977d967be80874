"""The memory plan: its arithmetic by hand, and every published figure that it is said to reproduce."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.memory_plan import Compared, compared, judge
from laoka.catalog.engines import engines
from laoka.catalog.models import architectures, drafters
from laoka.catalog.profiles import Verdict, constants, verdicts
from laoka.stack import plan
from laoka.stack.models import checkpoint_of
from laoka.stack.plan import GIB, MIB, Load, MemoryPlan
from laoka.stack.speed import ceilings
from tests.unit.stack.asking import request, stack

ARCH = architectures()["qwen3.5-27b"]
QUASAR = checkpoint_of("qwen3.8-27b-quasar-nvfp4")
ENGINE = next(engine for engine in engines() if engine.pin == "1cat-vllm==1.5.1")
DRAFTER = drafters()["qwen3.8-27b-dflash2"]


def made(load: Load, tensor_parallel: int = 4, memory_mib: int | None = 32510, utilization: float | None = None) -> MemoryPlan:
    return plan.memory_plan(
        weights=QUASAR.weights,
        arch=ARCH,
        engine=ENGINE,
        load=load,
        memory_mib=memory_mib,
        tensor_parallel=tensor_parallel,
        drafter=DRAFTER,
        utilization=utilization,
    )


@pytest.mark.parametrize("item", compared(), ids=lambda item: item.figure.id)
def test_published_figures(item: Compared) -> None:
    """Within 5 %, but for those of which the catalogue itself says that they are not reproduced."""
    assert item.within is (item.figure.role != "not reproduced"), f"{item.ratio:.3f}"


def test_most_figures_were_not_used_for_fitting() -> None:
    roles = [item.figure.role for item in compared()]
    fitted = [constant for constant in constants().values() if not constant.reserve]
    assert roles.count("fitted") == sum(len(set(c.fitted_on)) for c in fitted) - 2  # two constants share two figures
    assert roles.count("held-out") >= 6 and roles.count("arithmetic") >= 5


@pytest.mark.parametrize("verdict", verdicts(), ids=lambda verdict: verdict.id)
def test_published_verdicts(verdict: Verdict) -> None:
    assert (judge(verdict).fits is verdict.fits) is verdict.reproduced


def test_kv_is_that_of_16_layers() -> None:
    """64 KiB a token in FP16 and 32 KiB in FP8 for the whole model; 262,144 tokens are 16 and 8 GiB."""
    for dtype, kib in (("auto", 64), ("fp8_e4m3", 32)):
        load = Load(262144, 1, kv_cache_dtype=dtype)
        assert plan.kv_bytes_per_token(ARCH, 1, load) == kib * 1024
        assert plan.kv_bytes_per_token(ARCH, 4, load) == kib * 1024 // 4
        assert made(load, 1, 143771).line("kv").bytes == kib // 4 * GIB
    assert plan.kv_bytes_per_token(ARCH, 8, Load(1, 1)) == 64 * 1024 // 4, "KV heads below one are repeated, not split"
    assert plan.kv_bytes_per_token(ARCH, 1, Load(1, 1, "mtp", 4)) == 17 * 4 * 1024


def test_gdn_state_and_scratch() -> None:
    """144 MiB of state and 2.8 MiB of convolution for a sequence; h, v_new and o 192 MiB at TP2 with 8192 tokens."""
    assert plan.gdn_state_bytes(ARCH, 1) == pytest.approx((144 + 2.8125) * MIB)
    assert plan.gdn_state_bytes(ARCH, 4) == plan.gdn_state_bytes(ARCH, 1) // 4
    states, values = plan.gdn_scratch_bytes(ARCH, 2, 8192)
    assert (states / MIB, (states + values) / MIB) == (96, 192)
    assert plan.gdn_scratch_bytes(architectures()["tiny-qwen3"], 1, 8192) == (0, 0)


def test_the_drafter_is_whole_on_every_card() -> None:
    for degree in (1, 2, 4):
        assert made(Load(8192, 1, "dflash2", 7), degree).line("drafter").bytes == 3850000000
    assert made(Load(8192, 1)).line("drafter").bytes == 0


def test_without_the_vision_tower() -> None:
    whole, text = made(Load(8192, 1), 1), made(Load(8192, 1, language_model_only=True), 1)
    assert whole.line("weights_sharded").bytes - text.line("weights_sharded").bytes == pytest.approx(0.864 * GIB, rel=0.01)


def test_what_is_unknown_is_not_fine() -> None:
    assert made(Load(8192, 1), memory_mib=None).fits is None


def test_what_comes_on_top_leaves_room_beside_the_utilization() -> None:
    found = made(Load(32768, 1, kv_cache_dtype="fp8_e4m3"), 2, 16130)
    assert found.fits and found.utilization is not None and found.memory_bytes is not None
    assert found.utilization * found.memory_bytes + found.outside_bytes <= found.memory_bytes
    # A utilization that leaves no room for it is not taken for fitting.
    assert made(Load(32768, 1, kv_cache_dtype="fp8_e4m3"), 2, 16130, 0.98).fits is False


def test_small_cards_get_a_smaller_score_workspace() -> None:
    assert made(Load(8192, 1), memory_mib=32510).line("score_workspace").bytes == 1536 * MIB
    assert made(Load(8192, 1), memory_mib=16130).line("score_workspace").bytes == 384 * MIB
    assert stack("2xv100-sxm2-16gb").serve_env["VLLM_FLASH_V100_PREFILL_SCORE_BLOCK_TOKENS"] == "4096"


@given(
    st.integers(1, 262144),
    st.integers(1, 64),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([16130, 32510, 143771]),
    st.sampled_from(["none", "mtp", "dflash2"]),
)
def test_the_largest_that_is_told_fits_and_one_more_does_not(
    context: int, streams: int, degree: int, memory_mib: int, speculative: str
) -> None:
    tokens = {"none": 0, "mtp": 4, "dflash2": 7}[speculative]
    load = Load(context, streams, speculative, tokens, kv_cache_dtype="fp8_e4m3")  # type: ignore[arg-type]
    found = made(load, degree, memory_mib)
    if found.max_context:
        assert made(replace(load, context_tokens=found.max_context), degree, memory_mib).fits
        if found.max_context < ARCH.max_position:
            assert not made(replace(load, context_tokens=found.max_context + 2), degree, memory_mib).fits
    if found.max_streams:
        assert made(replace(load, streams=found.max_streams), degree, memory_mib).fits
    assert not made(replace(load, streams=found.max_streams + 2), degree, memory_mib).fits
    assert found.fits is (found.max_context >= context)
    assert all(line.bytes >= 0 and line.arithmetic and line.source for line in found.lines)


@given(st.integers(1, 262143), st.sampled_from([1, 2, 4]))
def test_more_context_never_needs_less(context: int, degree: int) -> None:
    assert made(Load(context + 1, 1), degree).total_bytes >= made(Load(context, 1), degree).total_bytes


def test_smaller_batches_are_tried_and_dflash2_never_below_its_fast_path() -> None:
    assert plan.batch_choices(ENGINE, Load(1, 1)) == (8192, 4096, 2048)
    assert plan.batch_choices(ENGINE, Load(1, 1, "dflash2", 7)) == (8192,)


def test_ceilings() -> None:
    """Bytes a token over 900 GB/s: linears 13.70 GB and lm_head 2.54 GB on 4 cards, without context."""
    asked = request("4xv100-sxm2-32gb")
    gpu = asked.cards[0].gpu
    bare = ceilings(gpu, 4, asked.checkpoint, Load(1, 1, kv_cache_dtype="fp8_e4m3"), None)
    assert bare is not None and bare.decode_tok_s is not None and bare.prefill_tok_s is not None
    state = 2 * 147.0 * 1024**2 / 4
    assert bare.decode_tok_s == pytest.approx(900e9 / ((13.697e9 + 2.543e9) / 4 + state), rel=0.01)
    assert bare.decode_speculative_tok_s is None
    # 2 operations for each of 24.35e9 weights, 4 x 125 TFLOPS.
    assert bare.prefill_tok_s == pytest.approx(500e12 / (2 * 24.35e9), rel=0.01)
    drafted = ceilings(gpu, 4, asked.checkpoint, Load(1, 1, "dflash2", 7, kv_cache_dtype="fp8_e4m3"), DRAFTER)
    assert (
        drafted is not None
        and drafted.decode_speculative_tok_s is not None
        and drafted.decode_at_published_acceptance_tok_s is not None
    )
    assert drafted.decode_at_published_acceptance_tok_s / drafted.decode_speculative_tok_s == pytest.approx(5.39 / 8)
    assert ceilings(None, 1, asked.checkpoint, Load(1, 1), None) is None


def test_no_published_speed_passes_its_ceiling() -> None:
    """Where one did, either the card's figures or the sum would be wrong."""
    for gpu, wishes in (
        ("4xv100-sxm2-32gb", {}),
        ("4xv100-sxm2-32gb", {"speculative": "none"}),
        ("2xv100-sxm2-32gb", {"speculative": "none"}),
    ):
        found = stack(gpu, context_tokens=4096, **wishes)
        assert found.profiles and found.ceilings is not None
        bound = found.ceilings.decode_speculative_tok_s or found.ceilings.decode_tok_s
        assert bound is not None and found.ceilings.prefill_tok_s is not None
        for profile in found.profiles:
            for speed in profile.speed:
                if speed.streams == 1:
                    assert speed.tok_s < (bound if speed.kind == "decode" else found.ceilings.prefill_tok_s), profile.id


@pytest.mark.parametrize(("label", "context"), [("4K", 4096), ("32K", 32768), ("128K", 131072), ("256K", 262144)])
def test_the_ceilings_that_the_documentation_prints(label: str, context: int) -> None:
    found = stack("4xv100-sxm2-32gb", context_tokens=context).ceilings
    assert found is not None and found.decode_tok_s and found.prefill_tok_s
    drafted = (found.decode_at_published_acceptance_tok_s or 0, found.decode_speculative_tok_s or 0)
    row = f"| {label} | {found.decode_tok_s:.0f}{' tok/s' if label == '4K' else ''} | {drafted[0]:.0f} | {drafted[1]:.0f} |"
    text = (Path(__file__).resolve().parents[3] / "docs" / "speculative-speed.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith(row)]
    printed = float(line.split("|")[5].replace("tok/s", "").replace(",", ""))
    assert printed == pytest.approx(found.prefill_tok_s, rel=0.005)
