"""The link sensor: how often PCIe corrects errors, and how wide each card's link is. Reads counters of sysfs, not the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from laoka.agent.config import ExpectedGpu
from laoka.agent.pci import SeenDevice
from laoka.agent.signals import Reading, Signal

CORRECTED_PER_S = 1.0
"""A link that is well corrects nothing for days; one owner's board with a bad riser corrected several a second."""
TOTALS = {"corrected": "TOTAL_ERR_COR", "nonfatal": "TOTAL_ERR_NONFATAL", "fatal": "TOTAL_ERR_FATAL"}
FILES = {"corrected": "aer_dev_correctable", "nonfatal": "aer_dev_nonfatal", "fatal": "aer_dev_fatal"}


@dataclass(frozen=True)
class Counters:
    """The error counters of a device since boot, when they were read (monotonic)."""

    corrected: int
    nonfatal: int
    fatal: int
    at_s: float


def parse_total(text: str, name: str) -> int | None:
    """The total in one of the aer_dev_* files; None when it has none."""
    for line in text.splitlines():
        word, _, value = line.partition(" ")
        if word == name and value.strip().isdecimal():
            return int(value)
    return None


def read_counters(sysfs_root: str, bdf: str, now_s: float) -> Counters | None:
    """The counters of a device; None where the kernel has none for it (no AER, or the device is gone)."""
    folder = Path(sysfs_root) / "bus/pci/devices" / bdf
    found = {}
    for kind, file in FILES.items():
        try:
            total = parse_total((folder / file).read_text(encoding="ascii"), TOTALS[kind])
        except (OSError, UnicodeDecodeError):
            return None
        if total is None:
            return None
        found[kind] = total
    return Counters(**found, at_s=now_s)


def judge(
    expected: Sequence[ExpectedGpu],
    devices: Mapping[str, SeenDevice],
    before: Mapping[str, Counters],
    now: Mapping[str, Counters],
    port_of: Mapping[str, str],
) -> Reading:
    """Signals: aer_rate (a card or the port above it corrects errors faster than CORRECTED_PER_S), link_narrow (fewer lanes than
    the card has). `before` and `now` are the counters of cards and ports at the last look and at this one.
    """
    signals = []
    rates: dict[str, float] = {}
    for gpu in expected:
        for bdf in (gpu.bdf, port_of.get(gpu.bdf, "")):
            if bdf in before and bdf in now and now[bdf].at_s > before[bdf].at_s:
                # A device that came back counts from zero again.
                grown = max(0, now[bdf].corrected - before[bdf].corrected)
                rates[bdf] = grown / (now[bdf].at_s - before[bdf].at_s)
                if rates[bdf] > CORRECTED_PER_S:
                    values: dict[str, str | int | float] = {"device": bdf, "rate": f"{rates[bdf]:.1f}"}
                    seen = f"{bdf}: {rates[bdf]:.1f} corrected PCIe errors a second"
                    signals.append(Signal("aer_rate", "link", gpu.bdf, subject=bdf, seen=seen, values=values))
        device = devices.get(gpu.bdf)
        if device is not None and not device.dead and device.narrow:
            values = {"width": device.link_width, "most": device.max_link_width}
            seen = f"{gpu.bdf}: link x{device.link_width} of x{device.max_link_width}"
            signals.append(Signal("link_narrow", "link", gpu.bdf, seen=seen, values=values))
    totals = {bdf: {"corrected": item.corrected, "nonfatal": item.nonfatal, "fatal": item.fatal} for bdf, item in now.items()}
    facts = {"errors": totals, "corrected_per_s": {bdf: round(rate, 2) for bdf, rate in rates.items()}}
    unread = frozenset(gpu.bdf for gpu in expected if gpu.bdf not in devices)
    if signals:
        return Reading("link", "bad", tuple(signals), signals[0].seen, facts, unread)
    if not now:
        return Reading("link", "unknown" if expected else "ok", (), "no error counters: the kernel has no AER here", facts, unread)
    return Reading("link", "ok", (), f"counters of {len(now)} devices", facts, unread)
