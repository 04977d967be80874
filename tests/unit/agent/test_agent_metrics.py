"""The metrics of a state: what never disappears, what is NaN, what is counted; the text is what Prometheus parses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from laoka.agent import state
from laoka.agent.clock import Now
from laoka.agent.config import Config, ExpectedGpu
from laoka.agent.incidents import Incident, Live, Seen, Tracker
from laoka.agent.metrics import Metrics
from laoka.agent.signals import SEVERITY_OF_CLASS, Reading, Signal

FIRST, SECOND = "0000:03:00.0", "0000:81:00.0"
ALERTS = {"channels": 2, "waiting": 1, "held": 0, "failing": {"ntfy-1": 3}, "delivered": 5, "source": "s", "dropped": 0}
CARD = {"state": "present", "device_id": "10de:1db6", "driver": "nvidia", "link": "8.0 GT/s PCIe x16"}


def config(**changes: Any) -> Config:
    gpus = tuple(ExpectedGpu(bdf=bdf, device_id="10de:1db6", slot="top") for bdf in (FIRST, SECOND))
    return Config(**({"host": "box-7", "gpu": gpus, "power_limit_w": 175.0} | changes))


def readings() -> dict[str, Reading]:
    nvml = {FIRST: {"core_c": 61, "memory_c": 78, "power_w": 140.0, "power_limit_w": 250.0, "throttle_reasons": 0x40,
                    "pages_retired": 3, "ecc_uncorrected": 0, "memory_max_c": 85, "slowdown_c": 87}}  # fmt: skip
    cards = [{"bdf": FIRST, **CARD}, {"bdf": SECOND, **CARD, "state": "gone", "link": ""}]
    return {
        "pci": Reading("pci", "bad", facts={"cards": cards, "seen": 1, "unexpected": []}),
        "nvml": Reading("nvml", "bad", facts={"cards": nvml}),
        "link": Reading("link", "ok", facts={"errors": {FIRST: {"corrected": 9, "nonfatal": 1, "fatal": 0}}}),
        "kernel_log": Reading("kernel_log", "ok", facts={"records": 42, "overruns": 0}),
        "completion": Reading("completion", "ok", facts={"latency_s": 0.25}),
        "unit": Reading("unit", "off"),
    }


def text(metrics: Metrics) -> str:
    from prometheus_client import generate_latest

    return generate_latest(metrics.registry).decode()


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample as `name{label,label}`, the labels' values in the order of their names."""
    return {
        f"{sample.name}{{{','.join(sample.labels[name] for name in sorted(sample.labels))}}}": sample.value
        for family in text_string_to_metric_families(text(metrics))
        for sample in family.samples
    }


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metrics]:
    """Metrics of a host whose second card is gone, asked 4 s after its state was written."""
    monkeypatch.setattr("laoka.agent.metrics.time.monotonic", lambda: 1004.0)
    found = Metrics(config())
    signal = Signal("card_gone", "pci", SECOND)
    real = Incident("a", 1.0, (Seen(signal, 1.0, True),))
    drill = Incident("b", 1.0, (Seen(Signal("xid", "kernel_log", FIRST, 79, lasting=False, drill=True), 1.0, False),))
    tracker = Tracker((Live(real, 0.0), Live(drill, 0.0)))
    heard_s = dict.fromkeys(state.SENSORS, 999.0)
    found.update(state.build(config(), readings(), heard_s, tracker, (), ALERTS, (), Now(5000.0, 1000.0), fences=(SECOND,)))
    yield found


def test_expected_and_seen_are_there_before_anything_was_seen() -> None:
    found = samples(Metrics(config()))
    assert found["laoka_gpus_expected{}"] == 2
    assert found["laoka_gpus_seen{}"] == 0
    assert found[f"laoka_gpu_present{{{FIRST}}}"] == found[f"laoka_gpu_present{{{SECOND}}}"] == 0
    assert found["laoka_watchdog_up{}"] == 0
    assert {f"laoka_incidents_total{{{name}}}" for name in SEVERITY_OF_CLASS} <= found.keys()


def test_a_card_that_is_gone_stays_in_every_series(metrics: Metrics) -> None:
    found = samples(metrics)
    assert (found["laoka_gpus_expected{}"], found["laoka_gpus_seen{}"]) == (2, 1)
    assert (found[f"laoka_gpu_present{{{FIRST}}}"], found[f"laoka_gpu_present{{{SECOND}}}"]) == (1, 0)
    assert found[f"laoka_gpu_given_up{{{SECOND}}}"] == 1
    assert found[f"laoka_gpu_temperature_celsius{{{FIRST},memory}}"] == 78
    assert found[f"laoka_gpu_temperature_limit_celsius{{{FIRST},memory}}"] == 85
    # What nobody can read is no number, least of all the last one.
    for name in ("laoka_gpu_temperature_celsius{%s,core}", "laoka_gpu_power_limit_watts{%s}", "laoka_gpu_link_width_lanes{%s}"):
        assert math.isnan(found[name % SECOND])
    assert found[f"laoka_gpu_link_width_lanes{{{FIRST}}}"] == 16


def test_caps_throttling_and_errors(metrics: Metrics) -> None:
    found = samples(metrics)
    assert found[f"laoka_gpu_power_limit_watts{{{FIRST}}}"] == 250
    assert found[f"laoka_gpu_power_limit_expected_watts{{{FIRST}}}"] == 175
    assert found[f"laoka_gpu_clocks_held_back{{{FIRST}}}"] == 1
    assert found[f"laoka_gpu_retired_pages{{{FIRST}}}"] == 3
    assert found[f"laoka_pcie_errors_total{{{FIRST},corrected}}"] == 9
    assert found["laoka_kernel_log_records_total{}"] == 42
    assert (found["laoka_engine_answers{}"], found["laoka_completion_seconds{}"]) == (1, 0.25)


def test_sensors_grow_older_though_nobody_writes(metrics: Metrics) -> None:
    found = samples(metrics)
    assert found["laoka_sensor_age_seconds{pci}"] == 5  # 1 s old when it was written, 4 s ago
    assert (found["laoka_sensor_ok{pci}"], found["laoka_sensor_ok{link}"]) == (0, 1)
    assert found["laoka_sensor_ok{disk}"] == 0  # nothing heard yet is not ok
    assert "laoka_sensor_ok{unit}" not in found  # off is neither
    assert found["laoka_watchdog_updated_timestamp_seconds{}"] == 5000
    assert found["laoka_watchdog_up{}"] == 1


def test_a_main_loop_that_stands_still_is_not_up(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laoka.agent.metrics.time.monotonic", lambda: 1060.0)
    found = samples(metrics)
    assert found["laoka_watchdog_up{}"] == 0
    assert found["laoka_sensor_age_seconds{pci}"] == 61


def test_incidents_and_steps_are_counted_and_drills_are_not(metrics: Metrics) -> None:
    metrics.incidents["card_gone"] += 2
    metrics.steps["remove_rescan", "failed"] += 1
    found = samples(metrics)
    assert found["laoka_incidents_total{card_gone}"] == 2
    assert found["laoka_incidents_total{heat}"] == 0
    assert found["laoka_incidents_open{card_gone}"] == 1
    assert sum(value for name, value in found.items() if name.startswith("laoka_incidents_open{")) == 1
    assert found["laoka_recovery_steps_total{failed,remove_rescan}"] == 1


def test_the_file_for_node_exporter_is_whole_and_readable_by_others(metrics: Metrics, tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.prom"
    assert metrics.write(str(path)) == ""
    assert path.read_text() == text(metrics)
    assert path.stat().st_mode & 0o777 == 0o644
    (tmp_path / "file").write_text("")
    assert "node-exporter has no metrics" in metrics.write(str(tmp_path / "file" / "metrics.prom"))
