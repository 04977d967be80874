"""Power and CUDA: what is applied and asked, the sum against the supply, and which toolkits are accidents."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.stack.cuda_toolkits import accidents, dashed, nvcc_release
from laoka.stack.power_budget import budget_of, told
from laoka.stack.request import card_of
from roles.power.deploy import PowerSettings, changes, power_test, wanted_values

ALL = PowerSettings(power_limit_w=175, application_clocks_mhz=(877, 1230), ecc="off", compute_mode="exclusive")


def test_everything_is_applied_after_persistence_mode() -> None:
    assert changes(ALL) == ["-pm 1", "-pl 175", "-ac 877,1230", "-e 0", "-c 3"]
    assert changes(PowerSettings()) == ["-pm 1"]


def test_every_applied_value_is_asked_back() -> None:
    assert list(wanted_values(ALL)) == [
        "persistence_mode", "power.limit", "clocks.applications.memory", "clocks.applications.graphics", "ecc.mode.pending",
        "compute_mode",
    ]  # fmt: skip
    assert wanted_values(PowerSettings()) == {"persistence_mode": "Enabled"}


@pytest.mark.parametrize(
    ("answer", "cards", "fine"),
    [
        ("Enabled, 175.00\nEnabled, 175.00\n", 2, True),
        ("Enabled, 175.00\n", 2, False),
        ("Enabled, 175.00\nEnabled, 250.00\n", 2, False),
        ("Disabled, 175.00\n", 1, False),
        ("Enabled, [N/A]\n", 1, False),
        ("", 1, False),
        ("No devices were found\n", 1, False),
    ],
)
def test_all_cards_have_to_say_so(tmp_path: Path, answer: str, cards: int, fine: bool) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '%s' '{answer}'\n")
    tool.chmod(0o755)
    command = power_test(wanted_values(PowerSettings(power_limit_w=175)), cards)
    done = subprocess.run(["sh", "-c", f"PATH={tmp_path}:$PATH; {command}"], timeout=30)
    assert (done.returncode == 0) is fine


V100 = card_of("10de:1db6")


@pytest.mark.parametrize(
    ("cap", "host", "rating", "stop", "says"),
    [
        (175, 300, 850, False, "the power supply suffices: cards 175 W + 175 W + host 300 W <= 850 W"),
        (None, 300, 850, False, "cards 250 W + 250 W + host 300 W <= 850 W"),  # the catalogue's maximum of the card
        (None, 300, 750, True, "too weak: cards 250 W + 250 W + host 300 W > 750 W; lower power_limit_w"),
        (250, None, 450, True, "too weak"),  # the cards alone are more than it gives
        (175, None, 850, False, "not known: cards 175 W + 175 W + host ? <= 850 W?"),
        (175, 300, None, False, "not known"),
    ],
)
def test_the_sum_against_the_supply(cap: int | None, host: int | None, rating: int | None, stop: bool, says: str) -> None:
    stopped, line = told(budget_of([V100, V100], cap, host, rating), "en")
    assert (stopped, says in line) == (stop, True), line
    assert told(budget_of([V100, V100], cap, host, rating), "zh")[0] is stop


def test_a_card_that_nobody_knows_is_not_counted_as_nothing() -> None:
    assert "unknown" not in told(budget_of([card_of("10de:ffff")], None, 300, 850), "en")[1]
    assert budget_of([card_of("10de:ffff")], None, 300, 850).total_w is None


INSTALLED = {
    "cuda-toolkit-12-8": None, "cuda-nvcc-12-8": None, "cuda-cudart-12-8": None, "libcublas-12-8": None,
    "cuda-toolkit-config-common": None, "cuda-toolkit-12-config-common": None, "cuda-keyring": None,
    "cuda": "meta", "cuda-13-0": "13", "cuda-toolkit-13-0": "13", "cuda-nvcc-13-0": "13", "libcublas-13-0": "13",
    "nvidia-cuda-toolkit": "distribution", "nvidia-cuda-dev": "distribution", "cuda-toolkit": "meta", "cuda-toolkit-12": "meta",
    "cuda-drivers-580": "meta", "cuda-runtime-12-8": "meta", "cuda-toolkit-12-4": "other", "cuda-nvcc-12-4": "other",
}  # fmt: skip


@pytest.mark.parametrize(("name", "why"), INSTALLED.items())
def test_accidents_are_told_from_the_wanted_toolkit(name: str, why: str | None) -> None:
    found = accidents([name], "12-8")
    assert [(accident.why, accident.names) for accident in found] == ([(why, (name,))] if why else [])


def test_without_a_wanted_toolkit_every_one_is_an_accident() -> None:
    assert [accident.why for accident in accidents(["cuda-toolkit-12-8"], None)] == ["other"]


@given(st.text(alphabet="cudalibnv-0123456789", max_size=30))
def test_any_name_is_one_kind_of_accident_or_none(name: str) -> None:
    assert sum(len(accident.names) for accident in accidents([name], "12-8")) <= 1


def test_versions_as_people_write_them() -> None:
    assert dashed("12.8") == dashed("12-8") == "12-8"
    assert nvcc_release(["Cuda compilation tools, release 12.8, V12.8.93"]) == "12.8"
    assert nvcc_release(["nvcc: not found"]) is None
