"""What sensors hand to the incident logic: signals, and the reading that carries them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SensorVerdict = Literal["ok", "bad", "unknown", "off"]

# Which class of incident a kind of signal speaks for. An Xid's class is its row's in the catalogue.
CLASS_OF_KIND: Mapping[str, str] = {
    "card_gone": "card_gone",
    "card_swapped": "card_swapped",
    "config_dead": "off_bus",
    "fallen_off": "off_bus",
    "nvml_lost": "off_bus",
    "nvml_missing": "off_bus",
    "aer_uncorrected": "link",
    "aer_rate": "link",
    "link_narrow": "link",
    "driver_other": "driver_missing",
    "init_failed": "init_failed",
    "no_power_cable": "power",
    "api_mismatch": "driver_mismatch",
    "nvml_mismatch": "driver_mismatch",
    "nvml_not_loaded": "driver_missing",
    "nvml_no_library": "driver_missing",
    "nvml_failed": "nvml_failed",
    "nvml_hung": "nvml_hung",
    "heat": "heat",
    "ecc_uncorrected": "ecc",
    "pages_pending": "ecc",
    "pages_many": "ecc",
    "throttled": "throttle",
    "power_cap": "power_cap",
    "unit_down": "engine_dead",
    "unit_restarted": "engine_restarted",
    "engine_no_answer": "engine_dead",
    "engine_frozen": "engine_stuck",
    "engine_stalled": "engine_stuck",
    "engine_garbage": "engine_garbage",
    "engine_refuses": "engine_refuses",
    "disk_full": "disk_full",
    "sensor_silent": "sensor_silent",
    "log_flood": "log_flood",
    "psu_trip": "psu_trip",
    "unclean_boot": "unclean_boot",
}

# Classes by how bad they are; an incident that gets worse than what was told is told again.
SEVERITY_OF_CLASS: Mapping[str, str] = {
    "card_gone": "critical",
    "card_swapped": "critical",
    "off_bus": "critical",
    "init_failed": "critical",
    "power": "critical",
    "driver_mismatch": "critical",
    "driver_missing": "critical",
    "nvml_hung": "critical",
    "nvml_failed": "warning",
    "heat": "critical",
    "ecc": "critical",
    "link": "warning",
    "throttle": "warning",
    "power_cap": "warning",
    "engine_dead": "critical",
    "engine_restarted": "warning",
    "engine_stuck": "critical",
    "engine_garbage": "critical",
    "engine_refuses": "warning",
    "disk_full": "critical",
    "sensor_silent": "warning",
    "log_flood": "warning",
    "psu_trip": "critical",
    "unclean_boot": "warning",
    "xid_application": "warning",
    "xid_other": "warning",
}

# A card that is lost is the worst that can happen, whatever else came before it.
LOSSES = frozenset({"card_gone", "off_bus"})

# What only goes with something else when both come in one burst: never the root cause beside a fault of the hardware.
SYMPTOMS = frozenset(
    {
        "aer_uncorrected",
        "aer_rate",
        "log_flood",
        "throttled",
        "unit_down",
        "unit_restarted",
        "engine_no_answer",
        "engine_frozen",
        "engine_stalled",
        "engine_garbage",
        "engine_refuses",
        "sensor_silent",
    }
)


@dataclass(frozen=True)
class Signal:
    """One thing seen. `lasting` ones are conditions, reported for as long as they hold; the others are events.

    `seen` is the evidence in the machine's own words; `values` fill the message of its kind; `origin` tells an event of the
    kernel log from the same words later (boot and sequence number); `subject` is what it is about when that is no card (a
    mount point, a sensor).
    """

    kind: str
    sensor: str
    bdf: str | None = None
    xid: int | None = None
    subject: str = ""
    seen: str = ""
    values: Mapping[str, str | int | float] = field(default_factory=dict)
    lasting: bool = True
    origin: str = ""
    drill: bool = False

    @property
    def key(self) -> tuple[str, str | None, int | None, str]:
        """What makes it the same signal as before."""
        return (self.kind, self.bdf, self.xid, self.subject)


@dataclass(frozen=True)
class Reading:
    """What one sensor says at one time. `unknown`: could not look, so nothing it said before is taken back; the same holds
    for the single cards in `unread`.
    """

    sensor: str
    verdict: SensorVerdict
    signals: tuple[Signal, ...] = ()
    detail: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
