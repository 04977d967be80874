"""Engine counters, link, flood, throttling, other drivers, and the end of the boot before: what each sensor says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.agent import boot, engine, flood, link, nvml, pci
from laoka.agent.config import Config, ExpectedGpu
from laoka.agent.signals import Reading
from laoka.sandbox import card
from laoka.serving.progress import Progress, parse_progress

BDF, PORT = "0000:03:00.0", "0000:00:03.0"
GPU = ExpectedGpu(bdf=BDF, device_id="10de:1db6")


def kinds(reading: Reading) -> list[str]:
    return [signal.kind for signal in reading.signals]


# ---- engine ----


def test_requests_without_a_token_for_long_are_a_stuck_engine_and_a_token_ends_it() -> None:
    standing = engine.Standing()
    story = [(0, 1, 100.0), (60, 1, 100.0), (119, 1, 100.0), (121, 1, 100.0), (122, 1, 101.0)]
    said = []
    for now_s, running, moved in story:
        reading, standing = engine.judge_progress(Progress(running, 0, moved), standing, float(now_s), 120.0)
        said.append(kinds(reading))
    assert said == [[], [], [], ["engine_stalled"], []]


def test_an_idle_engine_is_no_stuck_one_however_long() -> None:
    standing = engine.Standing()
    for now_s in (0.0, 1000.0, 2000.0):
        reading, standing = engine.judge_progress(Progress(0, 0, 5.0), standing, now_s, 120.0)
        assert reading.verdict == "ok"
    # Its first request has the whole time from when it came.
    assert kinds(engine.judge_progress(Progress(1, 0, 5.0), standing, 2010.0, 120.0)[0]) == []


def test_no_metrics_are_no_verdict() -> None:
    assert engine.judge_progress(parse_progress("nothing"), engine.Standing(), 1.0, 120.0)[0].verdict == "unknown"


# ---- link ----


def test_corrected_errors_count_by_their_rate(tmp_path: Path) -> None:
    card.create(tmp_path, (card.v100_pcie_32gb(BDF),))
    root = str(tmp_path / "sys")
    before = {name: found for name in (BDF, PORT) if (found := link.read_counters(root, name, 10.0))}
    assert before == {name: link.Counters(0, 0, 0, 10.0) for name in (BDF, PORT)}
    port = tmp_path / "sys/bus/pci/devices" / PORT / "aer_dev_correctable"
    port.write_text("RxErr 400\nBadTLP 50\nTOTAL_ERR_COR 450\n")
    now = {name: found for name in (BDF, PORT) if (found := link.read_counters(root, name, 40.0))}
    devices, _ = pci.read_devices(root, (GPU,), {})
    reading = link.judge((GPU,), devices, before, now, {BDF: PORT})
    assert [(signal.kind, signal.bdf, signal.values) for signal in reading.signals] == [
        ("aer_rate", BDF, {"device": PORT, "rate": "15.0"})
    ]
    assert link.judge((GPU,), devices, now, now, {BDF: PORT}).verdict == "ok"


def test_fewer_lanes_than_the_card_has(tmp_path: Path) -> None:
    card.create(tmp_path, (card.v100_pcie_32gb(BDF),))
    (tmp_path / "sys/bus/pci/devices" / BDF / "current_link_width").write_text("8\n")
    devices, _ = pci.read_devices(str(tmp_path / "sys"), (GPU,), {})
    counters = {BDF: link.Counters(0, 0, 0, 1.0)}
    assert kinds(link.judge((GPU,), devices, counters, counters, {})) == ["link_narrow"]


def test_a_card_that_another_driver_took(tmp_path: Path) -> None:
    card.create(tmp_path, (card.v100_pcie_32gb(BDF),))
    (tmp_path / "vfio-pci").mkdir()
    driver = tmp_path / "sys/bus/pci/devices" / BDF / "driver"
    driver.unlink(missing_ok=True)
    driver.symlink_to(tmp_path / "vfio-pci")
    assert kinds(pci.judge((GPU,), *pci.read_devices(str(tmp_path / "sys"), (GPU,), {}))) == ["driver_other"]


# ---- flood ----


def test_a_flood_begins_and_ends_at_different_rates() -> None:
    rate = flood.Rate(0, 0.0)
    said = []
    for now_s, records in ((10.0, 500), (20.0, 50_500), (30.0, 51_000), (40.0, 51_100)):
        reading, rate = flood.judge(records, now_s, rate)
        said.append(kinds(reading))
    assert said == [[], ["log_flood"], ["log_flood"], []]


# ---- throttling, pages ----


def one(**more: object) -> dict[str, object]:
    return {"error": 0, "driver": "580", "cards": [{"bdf": BDF, "lost": False, "faults": {}, **more}]}


@pytest.mark.parametrize(
    ("bits", "names"), [(0x1, []), (0x4, []), (0x20, ["sw_thermal"]), (0x88, ["hw_slowdown", "hw_power_brake"])]
)
def test_clocks_held_back_by_heat_or_power_twice_in_a_row(bits: int, names: list[str]) -> None:
    config = Config(host="h", gpu=(GPU,))
    first = nvml.judge(config, one(throttle_reasons=bits))
    assert kinds(first) == []
    second = nvml.judge(config, one(throttle_reasons=bits), held=nvml.held_cards(first))
    assert [signal.values["reasons"] for signal in second.signals] == ([", ".join(names)] if names else [])


def test_a_card_near_the_end_of_its_spare_pages() -> None:
    assert kinds(nvml.judge(Config(host="h", gpu=(GPU,)), one(pages_retired=59))) == []
    assert kinds(nvml.judge(Config(host="h", gpu=(GPU,)), one(pages_retired=60))) == ["pages_many"]


# ---- the boot before ----


def journal(*entries: tuple[str, ...]) -> str:
    lines = []
    for number, (transport, message, *rest) in enumerate(entries):
        entry = {"__REALTIME_TIMESTAMP": str(1_700_000_000_000_000 + number), "_TRANSPORT": transport, "MESSAGE": message}
        lines.append(json.dumps(entry | ({"MESSAGE_ID": rest[0]} if rest else {})))
    return "\n".join(lines) + "\n"


ORDINARY = (("syslog", "Started something"), ("kernel", "pcieport 0000:00:03.0: AER: Corrected error received"))
STOPPED = ("driver", "Journal stopped", boot.JOURNAL_STOPPED)
STARTED = ("driver", "Journal started", boot.JOURNAL_STARTED)
PANIC = ("kernel", "Kernel panic - not syncing: Fatal exception")
XID = ("kernel", "NVRM: Xid (PCI:0000:03:00): 79, GPU has fallen off the bus.")


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ((*ORDINARY, STOPPED), []),
        ((XID, *ORDINARY, STOPPED), []),
        (ORDINARY, ["psu_trip"]),
        ((STOPPED, STARTED, *ORDINARY), ["psu_trip"]),
        ((*ORDINARY, PANIC), ["unclean_boot"]),
        ((XID, *ORDINARY), ["unclean_boot"]),
        ((("syslog", "my own words: Kernel panic"), *ORDINARY), ["psu_trip"]),
    ],
)
def test_the_end_of_a_boot(entries: tuple[tuple[str, ...], ...], found: list[str]) -> None:
    cut = journal(*entries) + '{"MESSAGE": "cut in the mid'
    assert kinds(boot.judge("b2", "b1", boot.parse_journal(cut), power_was_cut=False)) == found


def test_what_is_no_new_boot_or_not_known_is_not_judged() -> None:
    words = boot.parse_journal(journal(*ORDINARY))
    assert boot.judge("b2", "", words, power_was_cut=False).verdict == "ok"
    assert boot.judge("b2", "b2", words, power_was_cut=False).verdict == "ok"
    assert boot.judge("b2", "b1", words, power_was_cut=True).verdict == "ok"
    assert boot.judge("b2", "b1", boot.LastWords(False), power_was_cut=False).verdict == "unknown"


@given(st.text())
def test_no_journal_breaks_the_parser(text: str) -> None:
    assert not boot.parse_journal(text).orderly
