"""Kernels proven by files alone: what is missing, old or overwritten is named; no stranger's file breaks the readers."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.serving.elf import NotElf, constant_of, glibc_needed
from laoka.serving.kernels import VERIFIER_SYMBOL, Folder, Wheel, judge_live, prove
from tests.unit.serving.engine_files import attention, files_of_1cat, library, stand_in_1cat

REGISTRY = "vllm/model_executor/models/registry.py"


def folder_with(tmp_path: Path, files: dict[str, bytes]) -> Folder:
    for path, data in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    return Folder(tmp_path)


def test_a_whole_build_is_proven_by_its_wheel_and_by_its_folder(tmp_path: Path) -> None:
    for tree in (Wheel(stand_in_1cat(tmp_path / "w")), folder_with(tmp_path / "f", files_of_1cat())):
        proof = prove(tree, "sm70", "1.5.1")
        assert (proof.ok, proof.verifier_width, proof.drafter_registered) == (True, 16, True), proof.faults


@pytest.mark.parametrize("width", [8, None])
def test_kernels_of_an_older_build_are_told_apart(tmp_path: Path, width: int | None) -> None:
    proof = prove(Wheel(stand_in_1cat(tmp_path, width)), "sm70", "1.5.1")
    assert not proof.ok and proof.verifier_width == 8
    assert proof.faults == ("the verifier takes 8 query tokens, DFlash2 needs 16: the attention kernels are of an older build",)


NEEDED = (
    REGISTRY, "vllm/model_executor/models/qwen3_dflash2.py", "vllm/_C.abi3.so", "vllm/_C_stable_libtorch.abi3.so",
    "vllm/_moe_C.abi3.so", "vllm/_sm70_sampler_C.abi3.so", "flash_attn_v100/__init__.py",
    "flash_attn_v100/flash_attn_v100_cuda.cpython-312-x86_64-linux-gnu.so",
    "flash_attn_v100/paged_kv_utils.cpython-312-x86_64-linux-gnu.so",
    "flash_qla/ops/gated_delta_rule/chunk/sm70/flash_qla_sm70_gdn_strided.so",
)  # fmt: skip


@pytest.mark.parametrize("path", NEEDED)
def test_every_file_that_is_missing_is_named(tmp_path: Path, path: str) -> None:
    proof = prove(Wheel(stand_in_1cat(tmp_path, without=[path])), "sm70", "1.5.1")
    assert any(path.split(".")[0].split("/")[-1] in fault for fault in proof.faults), proof.faults


def test_a_separate_attention_package_is_named(tmp_path: Path) -> None:
    for name in ("flash_attn_v100-26.2", "Flash.Attn-V100-1.0"):
        files = {**files_of_1cat(), f"{name}.dist-info/METADATA": b"Name: flash_attn_v100\n"}
        proof = prove(folder_with(tmp_path / name, files), "sm70", "1.5.1")
        assert [fault for fault in proof.faults if "overwrites the engine's own module: pip uninstall" in fault]


def test_a_library_for_another_machine_or_none_at_all_is_named(tmp_path: Path) -> None:
    files = {**files_of_1cat(), "vllm/_moe_C.abi3.so": b"\x7fELF garbage"}
    faults = prove(folder_with(tmp_path, files), "sm70", "1.5.1").faults
    assert len(faults) == 1 and faults[0].startswith("vllm/_moe_C.abi3.so: ")


@pytest.mark.parametrize(
    ("version", "registered", "ok"),
    [("0.28.0", True, True), ("0.33.0", True, True), ("0.27.1", True, False), ("0.28.0", False, False), ("1.0.0", True, True)],
)
def test_upstream_is_proven_by_version_and_registry(tmp_path: Path, version: str, registered: bool, ok: bool) -> None:
    files = {REGISTRY: files_of_1cat()[REGISTRY] if registered else b"MODELS = {}"}
    assert prove(folder_with(tmp_path, files), "upstream", version).ok is ok


def test_an_engine_without_such_kernels_has_nothing_to_prove(tmp_path: Path) -> None:
    assert prove(Folder(tmp_path), "none", "0.32.0").ok


# ---- machine code -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 1, 8, 16, 300, -1])
def test_the_constant_of_a_function_is_read_from_its_code(value: int) -> None:
    assert constant_of(io.BytesIO(library(f"int f(void) {{ return {value}; }}")), "f") == value


def test_what_is_no_constant_is_not_guessed() -> None:
    made = library("int g(int x); int f(int x) { return g(x) + 1; } int g(int x) { return x * 7; }")
    with pytest.raises(ValueError, match="not a plain constant"):
        constant_of(io.BytesIO(made), "f")
    assert constant_of(io.BytesIO(made), "nobody") is None


def test_the_glibc_that_a_library_asks_for() -> None:
    asks = library("#include <string.h>\nvoid *f(void *a, void *b, unsigned long n) { return memcpy(a, b, n); }")
    # memcpy has version 2.14 on x86-64 since glibc 2.14.
    assert glibc_needed(io.BytesIO(asks)) == (2, 14)
    assert glibc_needed(io.BytesIO(library("int f(void) { return 1; }"))) in (None, (2, 2))


@given(st.binary(max_size=200))
def test_no_bytes_break_the_readers_of_libraries(noise: bytes) -> None:
    real = attention(16)
    for data in (noise, b"\x7fELF" + noise, real[: len(noise) * 40], real[:64] + noise + real[64 + len(noise) :]):
        with contextlib.suppress(NotElf, ValueError):
            constant_of(io.BytesIO(data), VERIFIER_SYMBOL)
        with contextlib.suppress(NotElf):
            glibc_needed(io.BytesIO(data))


# ---- live ---------------------------------------------------------------------------------------------------------------

GOOD = {"capability": [7, 0], "verifier_width": 16, "drafter_model": True, "drafter_registered": True, "nvfp4_ops": True}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"verifier_width": 8}, "takes 8 query tokens"),
        ({"capability": [7, 5]}, "compute capability"),
        ({"drafter_registered": False}, "not in the model registry"),
        ({"nvfp4_ops": False}, "nvfp4_ops is missing"),
    ],
)
def test_what_the_live_check_says_is_judged(change: dict[str, object], says: str | None) -> None:
    told, faults = judge_live("INFO noise\n" + json.dumps({**GOOD, **change}) + "\n", "sm70")
    assert told is not None and (faults == () if says is None else says in faults[0])


def test_a_live_check_that_says_nothing_proves_nothing() -> None:
    assert judge_live("", "sm70")[1] == ("the live check printed nothing that can be read",)
