"""The flood sensor: how fast the kernel log grows. A flood of PCIe errors once wrote 18 GB of logs and filled a root disk."""

from __future__ import annotations

from dataclasses import dataclass

from laoka.agent.signals import Reading, Signal

FLOOD_PER_S = 100.0
CALM_PER_S = 20.0
WINDOW_S = 10.0


@dataclass(frozen=True)
class Rate:
    """Records seen at a moment (monotonic), and whether it was a flood then."""

    records: int
    at_s: float
    flooded: bool = False


def judge(records: int, now_s: float, before: Rate) -> tuple[Reading, Rate]:
    """Signal: log_flood, from FLOOD_PER_S until it is below CALM_PER_S again. `records` counts since the watchdog's start."""
    passed_s = max(0.001, now_s - before.at_s)
    rate = max(0, records - before.records) / passed_s
    flooded = rate >= (CALM_PER_S if before.flooded else FLOOD_PER_S)
    facts = {"records_per_s": round(rate, 1)}
    after = Rate(records, now_s, flooded)
    seen = f"{rate:.0f} kernel log records a second"
    if flooded:
        return Reading(
            "flood", "bad", (Signal("log_flood", "flood", seen=seen, values={"rate": f"{rate:.0f}"}),), seen, facts
        ), after
    return Reading("flood", "ok", detail=seen, facts=facts), after
