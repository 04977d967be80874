"""Which engine a host gets: the lock's, or the best that the catalogue allows; and each reason against it."""

from __future__ import annotations

from typing import Any

import pytest

from laoka.fleet.requests import request_of
from laoka.serving.engine_pin import EngineError, pin_of_stack
from laoka.stack.resolve import Stack, resolve
from laoka.stack.tables import stack_table
from roles.engine.choice import choose
from roles.engine.commands import install_command, packages_for

V100 = {"bdf": "0000:03:00.0", "device_id": "10de:1db6"}  # Tesla V100 PCIe 32 GB
BASE: dict[str, Any] = {
    "expected_gpus": [V100, V100], "os_release": "ubuntu-24.04", "model_id": "QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4",
    "serve_flags": {"max-model-len": 32768},
}  # fmt: skip


def locked(data: dict[str, Any]) -> dict[str, Any]:
    outcome = resolve(request_of("h", data, {}))
    assert isinstance(outcome, Stack)
    return stack_table(outcome)


def test_without_a_wish_the_cards_decide() -> None:
    choice = choose("h", BASE, {})
    assert (
        choice.pin is not None and choice.pin.name == "1cat-vllm" and choice.pin.kernels == "sm70" and choice.origin == "catalogue"
    )


def test_an_old_glibc_leads_to_revolta() -> None:
    choice = choose("h", BASE, {}, glibc="2.35")
    assert choice.pin is not None and choice.pin.pin == "revolta==0.1.4" and choice.pin.package == "revolta"
    assert any("2.38" in note and "2.35" in note for note in choice.notes)


def test_a_wish_that_can_not_be_is_refused_with_the_way_out() -> None:
    wish = {**BASE, "engine_name": "1cat-vllm", "engine_version": "1.5.1"}
    choice = choose("h", wish, {}, glibc="2.35")
    assert choice.pin is None and len(choice.refused) == 1
    assert choice.refused[0].startswith("[glibc] 1cat-vllm==1.5.1 needs glibc 2.38") and "revolta" in choice.refused[0]


def test_a_container_brings_its_own_glibc() -> None:
    wish = {**BASE, "engine_name": "1cat-vllm", "engine_version": "1.5.1", "os_release": "debian-12"}
    choice = choose("h", wish, {}, glibc="2.36", container=True)
    assert choice.pin is not None and choice.pin.pin == "1cat-vllm==1.5.1"


def test_upstream_on_a_v100_is_refused() -> None:
    choice = choose("h", {**BASE, "engine_name": "vllm", "engine_version": "0.33.0"}, {})
    assert choice.pin is None and choice.refused[0].startswith("[compute-capability]")


def test_upstream_is_for_younger_cards() -> None:
    turing = {**BASE, "expected_gpus": [{"bdf": "0000:03:00.0", "device_id": "10de:2684"}] * 2, "engine_name": "vllm"}
    choice = choose("h", turing, {})
    assert choice.pin is not None and choice.pin.name == "vllm" and choice.pin.kernels == "upstream", choice.refused


def test_a_release_without_a_known_hash_is_not_installed() -> None:
    for version in ("1.5.4", "9.9.9"):  # listed without a hash; not listed at all
        choice = choose("h", {**BASE, "engine_name": "1cat-vllm", "engine_version": version}, {})
        assert choice.pin is None and "laoka lock INVENTORY --online" in choice.refused[0]


def test_the_lock_decides_and_is_enough() -> None:
    stack = locked(BASE)
    choice = choose("h", {"expected_gpus": []}, stack)
    assert choice.origin == "lock" and choice.pin == pin_of_stack(stack)
    from_catalogue = choose("h", BASE, {}).pin
    assert choice.pin is not None and from_catalogue is not None
    assert (choice.pin.wheel_sha256, choice.pin.sums_url, choice.pin.pins) == (
        from_catalogue.wheel_sha256, from_catalogue.sums_url, from_catalogue.pins,
    )  # fmt: skip


def test_a_lock_and_an_inventory_that_disagree_are_told() -> None:
    choice = choose("h", {**BASE, "engine_name": "revolta"}, locked(BASE))
    assert choice.pin is None and choice.refused == (
        "the lock pins 1cat-vllm==1.5.1, the inventory says revolta: laoka lock again, or take the keys out",
    )


def test_a_locked_engine_on_an_older_system_is_refused() -> None:
    assert choose("h", {}, locked(BASE), glibc="2.36").refused[0].startswith("[glibc] 1cat-vllm==1.5.1 needs glibc 2.38")


def test_a_damaged_lock_is_told() -> None:
    stack = {**locked(BASE), "wheel_sha256": "xyz"}
    assert "no SHA-256" in choose("h", {}, stack).refused[0]
    with pytest.raises(EngineError, match="wheel_file is missing"):
        pin_of_stack({key: value for key, value in locked(BASE).items() if key != "wheel_file"})


def test_a_model_that_the_catalogue_does_not_have_needs_the_engines_name() -> None:
    data = {**BASE, "model_id": "somebody/else"}
    assert "name the engine too" in choose("h", data, {}).refused[0]
    choice = choose("h", {**data, "engine_name": "1cat-vllm", "engine_version": "1.5.1"}, {})
    assert choice.pin is not None and choice.pin.pin == "1cat-vllm==1.5.1"
    assert choose("h", {**data, "engine_name": "1cat-vllm", "engine_version": "1.5.1"}, {}, glibc="2.36").pin is None


def test_what_a_host_needs_for_an_engine() -> None:
    tiny = {"expected_gpus": [], "model_id": "laoka/tiny-qwen3", "serve_flags": {"max-model-len": 4096}}
    gpu, cpu = choose("h", BASE, {}).pin, choose("h", tiny, {}).pin
    assert gpu is not None and cpu is not None
    assert {"build-essential", "ninja-build", "python3-dev"} <= set(packages_for(gpu, "12.8"))
    assert packages_for(cpu, None) == ("python3-venv", "libnuma1")


def test_the_command_quotes_the_pin_and_leaves_out_what_is_not_set() -> None:
    pin = choose("h", BASE, {}).pin
    assert pin is not None
    command = install_command("/x/python", pin, (("--mirror", None), ("--wheelhouse", "/a b")))
    assert command.startswith("/x/python -m laoka.serving.engine_install --pin '{") and "--mirror" not in command
    assert command.endswith("--wheelhouse '/a b'")
