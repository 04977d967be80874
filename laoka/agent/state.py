"""The watchdog's current state as others read it: one JSON file in /run, for `laoka watchdog status` and the metrics. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from laoka import __version__
from laoka.agent import wording
from laoka.agent.clock import Now
from laoka.agent.config import Config
from laoka.agent.history import Row
from laoka.agent.incidents import Incident, Tracker
from laoka.agent.ladder import Decision
from laoka.agent.signals import Reading

SCHEMA = 2
RECENT = 5
STALE_AFTER_S = 15.0
"""The file is written every four seconds, and when something is told: older than this, nobody is writing it any more."""
SENSORS = ("pci", "kernel_log", "nvml", "link", "unit", "completion", "engine", "disk", "flood", "boot")


def build(
    config: Config,
    readings: Mapping[str, Reading],
    heard_s: Mapping[str, float],
    tracker: Tracker,
    closed: Sequence[Incident],
    alerts: Mapping[str, Any],
    notes: Sequence[str],
    now: Now,
    decisions: Mapping[str, Decision] = MappingProxyType({}),
    tried: Mapping[str, Sequence[Row]] = MappingProxyType({}),
    fences: Sequence[str] = (),
) -> dict[str, Any]:
    """The state. Arguments: `heard_s` when each sensor last said anything (monotonic); `closed` incidents, oldest first;
    `alerts` as the main loop counts them; `notes` troubles of the watchdog itself.
    """
    pci = readings.get("pci")
    cards = {card["bdf"]: card for card in (pci.facts.get("cards", ()) if pci else ())}
    nvml = readings.get("nvml")
    hung = next((signal.values["count"] for signal in nvml.signals if signal.kind == "nvml_hung"), 0) if nvml else 0
    return {
        "schema": SCHEMA,
        "version": __version__,
        "pid": os.getpid(),
        "host": config.host,
        "simulated": config.simulated,
        "drill_allowed": config.drill,
        "recovery": {
            "policy": config.recovery,
            "reboot": config.reboot,
            "reboots_per_day": config.reboots_per_day,
            "given_up": list(fences),
        },
        "written_unix_s": round(now.unix_s, 3),
        "written_mono_s": round(now.mono_s, 3),
        "gpus": {
            "expected": len(config.gpu),
            "seen": pci.facts.get("seen", 0) if pci else 0,
            "cards": [_card(gpu.bdf, cards, nvml, config) for gpu in config.gpu],
            "unexpected": list(pci.facts.get("unexpected", ())) if pci else [],
        },
        "sensors": [_sensor(name, readings.get(name), heard_s, now) for name in SENSORS],
        "nvml_hung_children": hung,
        "incidents": {
            "open": [
                {
                    **_incident(live.incident, config),
                    "doing": wording.doing_next(decisions.get(live.incident.id), config),
                    "mode": decisions[live.incident.id].mode if live.incident.id in decisions else "nothing",
                    "tried": wording.steps_done(tried.get(live.incident.id, ()), config).splitlines(),
                }
                for live in tracker.live
            ],
            "recent": [_incident(incident, config) for incident in closed[-RECENT:]],
        },
        "alerts": dict(alerts),
        "notes": list(notes),
    }


def _card(bdf: str, cards: Mapping[str, Mapping[str, Any]], nvml: Reading | None, config: Config) -> dict[str, Any]:
    seen = cards.get(bdf, {})
    figures: Mapping[str, Any] = (nvml.facts.get("cards", {}) if nvml else {}).get(bdf, {})
    return {
        "bdf": bdf,
        "card": wording.card(bdf, config),
        "state": seen.get("state", "unknown"),
        "driver": seen.get("driver"),
        "link": seen.get("link", ""),
        "core_c": figures.get("core_c"),
        "memory_c": figures.get("memory_c"),
        "power_limit_w": figures.get("power_limit_w"),
    }


def _sensor(name: str, reading: Reading | None, heard_s: Mapping[str, float], now: Now) -> dict[str, Any]:
    age_s = round(max(0.0, now.mono_s - heard_s.get(name, now.mono_s)), 1)
    if reading is None:
        return {"name": name, "verdict": "unknown", "detail": "nothing heard yet", "age_s": age_s, "facts": {}}
    return {
        "name": name,
        "verdict": reading.verdict,
        "detail": reading.detail,
        "age_s": 0.0 if reading.verdict == "off" else age_s,
        "facts": dict(reading.facts),
    }


def _incident(incident: Incident, config: Config) -> dict[str, Any]:
    return {
        "id": incident.id,
        "state": incident.state,
        "class": incident.incident_class,
        "severity": incident.severity,
        "drill": incident.drill,
        "card": wording.concerned(incident, incident.lead.signal, config),
        "bdf": incident.lead.signal.bdf,
        "xid": incident.lead.signal.xid,
        "opened_unix_s": incident.opened_unix_s,
        "closed_unix_s": incident.closed_unix_s,
        "signals": len(incident.seen) + incident.not_kept,
        "seen": incident.lead.signal.seen,
        "next": wording.next_step(incident, incident.lead.signal, config),
    }
