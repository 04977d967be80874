"""Banners out of samples of nvidia-smi: a real dump of a V100S under load, changed where it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from laoka.host import nvidia_smi
from laoka.host.nvidia_smi import Smi
from laoka.host.unread import Unread
from laoka.serving.bench import cards
from laoka.serving.bench.host_side import apply_script, changed, parse_flags, parse_version, render_flags, restore_script

DUMP = Path(__file__).parents[2] / "data" / "captures" / "nvsmi_x_v100s_pcie_32gb_load_460.xml"


@pytest.fixture(scope="module")
def sample() -> Smi:
    found = nvidia_smi.read_xml(DUMP.read_text(), "")
    assert not isinstance(found, Unread)
    return found


def with_card(smi: Smi, **changes: object) -> Smi:
    return replace(smi, gpus=(replace(smi.gpus[0], **changes),))  # type: ignore[arg-type]


def keys(samples: list[Smi]) -> list[str]:
    return [banner.key for banner in cards.banners(samples)]


def test_a_card_as_it_should_be_has_no_banner(sample: Smi) -> None:
    cool = with_card(sample, throttle_reasons=(), power_limit_w=250.0, power_limit_default_w=250.0)
    assert keys([cool, cool]) == []


@pytest.mark.parametrize(
    ("changes", "banner"),
    [
        ({"throttle_reasons": ("sw_thermal_slowdown",)}, "bench.throttled"),
        ({"throttle_reasons": ("hw_thermal_slowdown",)}, "bench.throttled"),
        ({"throttle_reasons": ("hw_power_brake_slowdown",)}, "bench.braked"),
        ({"power_limit_w": 150.0}, "bench.capped"),
        ({"throttle_reasons": ("sw_power_cap",)}, "bench.at_power_limit"),
    ],
)
def test_one_bad_sample_is_enough(sample: Smi, changes: dict[str, object], banner: str) -> None:
    cool = with_card(sample, throttle_reasons=(), power_limit_w=250.0, power_limit_default_w=250.0)
    bad = with_card(cool, **changes)
    assert keys([cool, bad]) == [banner]
    assert "{" not in cards.banners([cool, bad])[0].say("zh")


def test_errors_that_came_during_the_run_count_and_older_ones_do_not(sample: Smi) -> None:
    cool = with_card(sample, throttle_reasons=(), power_limit_w=250.0, power_limit_default_w=250.0)
    before = with_card(cool, ecc=replace(cool.gpus[0].ecc, volatile_uncorrected=5))
    after = with_card(cool, ecc=replace(cool.gpus[0].ecc, volatile_uncorrected=7))
    assert keys([before, before]) == [] and keys([before, after]) == ["bench.ecc"]
    assert cards.table([before, after])[0]["ecc_uncorrected_during"] == 2


def test_a_card_that_went_away_is_told(sample: Smi) -> None:
    cool = with_card(sample, throttle_reasons=(), power_limit_w=250.0, power_limit_default_w=250.0)
    assert keys([cool, replace(cool, gpus=())]) == ["bench.card_lost"]


def test_the_table_has_what_moved(sample: Smi) -> None:
    row = cards.table([with_card(sample, core_temperature_c=60), with_card(sample, core_temperature_c=70)])[0]
    assert row["core_temperature_c"] == {"low": 60, "mean": 65.0, "high": 70} and row["samples"] == 2


def test_flags_are_read_changed_and_written() -> None:
    flags = parse_flags('# comment\nmodel: "/srv/m"\nmax-model-len: 4096\nenforce-eager: true\nspeculative-config: "{}"\n')
    assert flags == {"model": "/srv/m", "max-model-len": 4096, "enforce-eager": True, "speculative-config": "{}"}
    other = changed(flags, {"max-model-len": 8192, "speculative-config": None})
    assert parse_flags(render_flags(other)) == {"model": "/srv/m", "max-model-len": 8192, "enforce-eager": True}
    assert "/etc/qwen-serve/vllm.yaml" in apply_script(other) and "rm -f" in restore_script()


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('{"version": "0.32.0"}', "0.32.0"),
        ('{"version": ""}', None),
        ('{"version": 3}', None),
        ("[1]", None),
        ("", None),
        ("[" * 9999, None),
    ],
)
def test_the_engines_version_is_read_where_it_says_one(text: str, version: str | None) -> None:
    assert parse_version(text) == version
