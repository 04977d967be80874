"""The watchdog's metrics for Prometheus, made from its state when they are asked for, and once in a while for node-exporter.

Expected and seen cards never disappear from them, even when a card does. What can't be read is NaN, not the last value that was.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from laoka.agent import nvml
from laoka.agent.config import Config, metrics_endpoint
from laoka.agent.signals import SEVERITY_OF_CLASS
from laoka.files import write_atomic

FILE_MODE = 0o644
Sample = tuple[tuple[str, ...], float | int | bool | None]


class Metrics:
    """What is counted, and the last state; a collector for a registry of its own."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._state: Mapping[str, Any] = {}
        self.incidents: Counter[str] = Counter()
        """Incidents opened since the start by class, drills left out."""
        self.steps: Counter[tuple[str, str]] = Counter()
        """Steps of the ladder that ended since the start, by step and outcome, drills left out."""
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def update(self, state: Mapping[str, Any]) -> None:
        """Take a state as `laoka.agent.state` builds it."""
        self._state = state

    def serve(self, address: str) -> str:
        """Start answering on `address`; returns a line when that fails (the watchdog goes on without)."""
        host, port = metrics_endpoint(address)
        try:
            start_http_server(port, host, self.registry)
        except OSError as error:
            return f"metrics on {address}: {error.strerror}"
        return ""

    def write(self, path: str) -> str:
        """Write all metrics into a file for node-exporter's textfile collector; returns a line when that fails."""
        try:
            write_atomic(Path(path), generate_latest(self.registry).decode(), FILE_MODE)
        except OSError as error:
            return f"{path}: {error.strerror}: node-exporter has no metrics of ours"
        return ""

    def collect(self) -> Iterator[Metric]:
        """Every metric as it is now; called by the registry, in whichever thread asks."""
        yield from families(self._config, self._state, self.incidents, self.steps, time.monotonic())


def families(
    config: Config,
    state: Mapping[str, Any],
    incidents: Mapping[str, int],
    steps: Mapping[tuple[str, str], int],
    now_s: float,
) -> Iterator[Metric]:
    """Every metric of a state (empty: before the first one). `now_s` is the monotonic clock: a state that is not written any more
    grows older here too.
    """
    sensors = {sensor["name"]: sensor for sensor in state.get("sensors", ())}
    age_s = max(0.0, now_s - state["written_mono_s"]) if state else 0.0
    yield from _watchdog(config, state, sensors, age_s)
    yield from _cards(config, state, sensors)
    yield from _engine(sensors)
    open_now = Counter(item["class"] for item in state.get("incidents", {}).get("open", ()) if not item["drill"])
    yield _gauge("laoka_incidents_open", "Incidents that are open now, drills left out", ["class"], _of_classes(open_now))
    about = "Incidents since the watchdog's start by class, drills left out"
    yield _counter("laoka_incidents", about, ["class"], _of_classes(incidents))
    about = "Steps of the recovery ladder that ended since the watchdog's start, drills left out"
    yield _counter("laoka_recovery_steps", about, ["step", "outcome"], [(key, count) for key, count in list(steps.items())])


def _of_classes(counts: Mapping[str, int]) -> list[Sample]:
    # All classes from the start: a counter that appears with its first 1 has no increase.
    return [((name,), counts.get(name, 0)) for name in SEVERITY_OF_CLASS]


def _watchdog(config: Config, state: Mapping[str, Any], sensors: Mapping[str, Mapping[str, Any]], age_s: float) -> Iterator[Metric]:
    labels = ["version", "host", "recovery"]
    yield _gauge(
        "laoka_watchdog_info", "About the watchdog", labels, [((state.get("version", ""), config.host, config.recovery), 1)]
    )
    yield _gauge("laoka_watchdog_up", "1 while the watchdog's main loop goes round", [], [((), bool(state) and age_s < 15)])
    updated = state.get("written_unix_s")
    yield _gauge("laoka_watchdog_updated_timestamp_seconds", "When the watchdog last wrote its state", [], [((), updated)])
    yield _gauge("laoka_simulated", "1 when the card is a simulation", [], [((), config.simulated)])
    on = {name: sensor for name, sensor in sensors.items() if sensor["verdict"] != "off"}
    ages: list[Sample] = [((name,), sensor["age_s"] + age_s) for name, sensor in on.items()]
    yield _gauge(
        "laoka_sensor_age_seconds", "Seconds since a sensor last said anything; none for one that is off", ["sensor"], ages
    )
    well: list[Sample] = [((name,), sensor["verdict"] == "ok") for name, sensor in on.items()]
    yield _gauge("laoka_sensor_ok", "1 when the sensor could look and found nothing wrong", ["sensor"], well)
    yield _gauge("laoka_nvml_hung_children", "NVML children that could not be ended", [], [((), state.get("nvml_hung_children"))])
    log = sensors.get("kernel_log", {}).get("facts", {})
    yield _counter("laoka_kernel_log_records", "Kernel log records read", [], [((), log.get("records"))])
    yield _counter("laoka_kernel_log_overruns", "Times the kernel overwrote records unread", [], [((), log.get("overruns"))])
    alerts = state.get("alerts", {})
    yield _gauge("laoka_alert_channels", "Alert channels configured", [], [((), alerts.get("channels"))])
    yield _gauge("laoka_alert_channels_failing", "Channels whose last try failed", [], [((), len(alerts.get("failing", ())))])
    yield _gauge("laoka_alerts_waiting", "Alerts that some channel does not have yet", [], [((), alerts.get("waiting"))])
    yield _gauge("laoka_alerts_held_back", "Alerts held back by the hourly cap or quiet hours", [], [((), alerts.get("held"))])
    yield _counter("laoka_alerts_delivered", "Alerts that a channel took", [], [((), alerts.get("delivered"))])


def _cards(config: Config, state: Mapping[str, Any], sensors: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    gpus = state.get("gpus", {})
    known = {card["bdf"]: card for card in gpus.get("cards", ())}
    said = sensors.get("nvml", {}).get("facts", {}).get("cards", {})
    given_up = state.get("recovery", {}).get("given_up", ())
    yield _gauge("laoka_gpus_expected", "GPUs that the inventory says are there", [], [((), len(config.gpu))])
    yield _gauge("laoka_gpus_seen", "GPUs that answer on the PCI bus", [], [((), gpus.get("seen", 0))])
    yield _gauge(
        "laoka_gpu_info",
        "The card that the inventory expects",
        ["bdf", "device_id", "uuid", "serial", "slot"],
        [((gpu.bdf, gpu.device_id, gpu.uuid, gpu.serial, gpu.slot), 1) for gpu in config.gpu],
    )

    def of_cards(name: str, about: str, key: str) -> Metric:
        return _gauge(name, about, ["bdf"], [((gpu.bdf,), said.get(gpu.bdf, {}).get(key)) for gpu in config.gpu])

    present: list[Sample] = [((gpu.bdf,), known.get(gpu.bdf, {}).get("state") == "present") for gpu in config.gpu]
    yield _gauge("laoka_gpu_present", "1 when the expected GPU is on the bus and alive", ["bdf"], present)
    yield _gauge(
        "laoka_gpu_given_up", "1 for a GPU that was given up", ["bdf"], [((gpu.bdf,), gpu.bdf in given_up) for gpu in config.gpu]
    )
    yield _gauge(
        "laoka_gpu_link_width_lanes",
        "Lanes of the GPU's link",
        ["bdf"],
        [((gpu.bdf,), _lanes(known.get(gpu.bdf))) for gpu in config.gpu],
    )
    parts = ("core", "memory")
    temperatures: list[Sample] = [((gpu.bdf, part), said.get(gpu.bdf, {}).get(f"{part}_c")) for gpu in config.gpu for part in parts]
    yield _gauge("laoka_gpu_temperature_celsius", "Temperature; memory is the HBM", ["bdf", "part"], temperatures)
    limits: list[Sample] = [
        ((gpu.bdf, part), limit) for gpu in config.gpu for part, limit in nvml.limits(gpu, said.get(gpu.bdf, {})).items()
    ]
    yield _gauge("laoka_gpu_temperature_limit_celsius", "From here on the card is too hot", ["bdf", "part"], limits)
    yield of_cards("laoka_gpu_power_watts", "Power that the card draws", "power_w")
    yield of_cards("laoka_gpu_power_limit_watts", "Power limit of the card", "power_limit_w")
    wanted: list[Sample] = [((gpu.bdf,), config.power_limit_w) for gpu in config.gpu if config.power_limit_w is not None]
    yield _gauge("laoka_gpu_power_limit_expected_watts", "Power limit that the inventory sets", ["bdf"], wanted)
    held: list[Sample] = [
        ((gpu.bdf,), bool(nvml.throttle_reasons(said[gpu.bdf])) if gpu.bdf in said else None) for gpu in config.gpu
    ]
    yield _gauge("laoka_gpu_clocks_held_back", "1 while heat or power holds the card's clocks back", ["bdf"], held)
    yield of_cards("laoka_gpu_retired_pages", "Retired pages of the card's memory", "pages_retired")
    yield of_cards("laoka_gpu_ecc_uncorrected_errors", "Uncorrectable memory errors since the driver was loaded", "ecc_uncorrected")
    errors: list[Sample] = [
        ((device, kind), count)
        for device, kinds in sensors.get("link", {}).get("facts", {}).get("errors", {}).items()
        for kind, count in kinds.items()
    ]
    about = "PCIe errors of a card or the port above it since boot: corrected, nonfatal, fatal"
    yield _counter("laoka_pcie_errors", about, ["device", "kind"], errors)


def _lanes(card: Mapping[str, Any] | None) -> int | None:
    width = str((card or {}).get("link", "")).rpartition(" x")[2]
    return int(width) if width.isdecimal() else None


def _engine(sensors: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    asked = sensors.get("completion")
    if asked is None or asked["verdict"] == "off":
        return
    answered = {"ok": True, "bad": False}.get(asked["verdict"])
    yield _gauge("laoka_engine_answers", "1 when the last completion came back well; NaN: not asked", [], [((), answered)])
    latency_s = asked["facts"].get("latency_s") if asked["verdict"] == "ok" else None
    yield _gauge("laoka_completion_seconds", "How long the last completion took", [], [((), latency_s)])


def _gauge(name: str, about: str, labels: list[str], samples: Iterable[Sample]) -> Metric:
    return _filled(GaugeMetricFamily(name, about, labels=labels), samples)


def _counter(name: str, about: str, labels: list[str], samples: Iterable[Sample]) -> Metric:
    return _filled(CounterMetricFamily(name, about, labels=labels), (sample for sample in samples if sample[1] is not None))


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[Sample]) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, math.nan if value is None else float(value))
    return family
