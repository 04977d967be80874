"""The watchdog's metrics for Prometheus: expected and seen cards never disappear from them, even when a card does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from laoka.agent.config import Config, metrics_endpoint


class Metrics:
    """All metrics, in a registry of their own."""

    def __init__(self, config: Config) -> None:
        self.registry = CollectorRegistry()
        gauge = self._gauge
        self.expected = gauge("laoka_gpus_expected", "GPUs that the inventory says are there")
        self.seen = gauge("laoka_gpus_seen", "GPUs that answer on the PCI bus")
        self.present = gauge("laoka_gpu_present", "1 when the expected GPU is on the bus and alive", "bdf")
        self.temperature = gauge("laoka_gpu_temperature_celsius", "Temperature as NVML last gave it", "bdf", "part")
        self.power_limit = gauge("laoka_gpu_power_limit_watts", "Power limit as NVML last gave it", "bdf")
        self.open = gauge("laoka_incident_open", "Incidents that are open now")
        self.sensor_age = gauge("laoka_sensor_age_seconds", "Seconds since a sensor last said anything", "sensor")
        self.sensor_ok = gauge("laoka_sensor_ok", "1 when the sensor could look and found nothing wrong", "sensor")
        self.waiting = gauge("laoka_alerts_waiting", "Alerts that some channel does not have yet")
        self.held = gauge("laoka_alerts_held_back", "Alerts held back by the hourly cap")
        self.channels = gauge("laoka_alert_channels", "Alert channels configured")
        self.hung = gauge("laoka_nvml_hung_children", "NVML children that could not be ended")
        self.simulated = gauge("laoka_simulated", "1 when the card is a simulation")
        self.incidents = Counter("laoka_incidents", "Incidents by class", ["class"], registry=self.registry)
        self.expected.set(len(config.gpu))
        self.seen.set(0)
        self.simulated.set(config.simulated)
        for card in config.gpu:
            self.present.labels(card.bdf).set(0)

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        return Gauge(name, about, labels, registry=self.registry)

    def serve(self, address: str) -> str:
        """Start answering on `address`; returns a line when that fails (the watchdog goes on without)."""
        host, port = metrics_endpoint(address)
        try:
            start_http_server(port, host, self.registry)
        except OSError as error:
            return f"metrics on {address}: {error.strerror}"
        return ""

    def update(self, state: Mapping[str, Any]) -> None:
        """Take the figures of a state as `laoka.agent.state` builds it."""
        gpus = state["gpus"]
        self.seen.set(gpus["seen"])
        for card in gpus["cards"]:
            self.present.labels(card["bdf"]).set(card["state"] == "present")
        self.open.set(len(state["incidents"]["open"]))
        for sensor in state["sensors"]:
            self.sensor_age.labels(sensor["name"]).set(sensor["age_s"])
            self.sensor_ok.labels(sensor["name"]).set(sensor["verdict"] == "ok")
        for key, gauge in (("waiting", self.waiting), ("held", self.held), ("channels", self.channels)):
            gauge.set(state["alerts"][key])
        self.hung.set(state["nvml_hung_children"])
        nvml = next((sensor for sensor in state["sensors"] if sensor["name"] == "nvml"), None)
        for bdf, facts in (nvml["facts"].get("cards", {}) if nvml else {}).items():
            for part in ("core", "memory"):
                if facts.get(f"{part}_c") is not None:
                    self.temperature.labels(bdf, part).set(facts[f"{part}_c"])
            if facts.get("power_limit_w") is not None:
                self.power_limit.labels(bdf).set(facts["power_limit_w"])
