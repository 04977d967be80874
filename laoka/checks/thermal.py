"""Temperatures: memory first, for it is what limits a V100."""

from __future__ import annotations

from collections.abc import Iterator

from laoka.checks.expected import card
from laoka.checks.facts import cards, listed_cards, name_of
from laoka.checks.finding import Outcome
from laoka.checks.registry import Wanted, check, fail, info, ok, unread, warn
from laoka.host.report import HostReport
from laoka.host.unread import Unread

# Three dumps of V100 PCIe 32GB and V100S: memory max operating 85 C, core max operating 83, slowdown 87.
MEMORY_LIMIT_C, CORE_SLOWDOWN_C, WARN_BELOW_C = 85, 87, 5
# Idle above this means bad contact of the cooler (a TITAN V idled at 79-82 C and 59-63 W).
IDLE_LIMIT_C, IDLE_LIMIT_W = 60, 50


@check("thermal.memory", source="nvidia-smi: Memory Max Operating Temp (85 C on V100 PCIe 32GB and V100S)")
def memory(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """The memory runs 15-20 C above the core and throttles first."""
    listed = listed_cards(report)
    if isinstance(listed, Unread):
        yield unread(listed)
        return
    for gpu in listed:
        now, most = gpu.memory_temperature_c, gpu.max_memory_temperature_c
        if isinstance(now, Unread):
            yield unread(now, subject=name_of(gpu))
            continue
        edge = most if isinstance(most, int) else MEMORY_LIMIT_C
        yield _judged(gpu_name=name_of(gpu), what="memory", now=now, edge=edge)


@check("thermal.core", source="nvidia-smi: GPU Slowdown Temp (87 C on V100 PCIe 32GB and V100S)")
def core(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """The core against the temperature at which it slows down."""
    listed = listed_cards(report)
    for gpu in () if isinstance(listed, Unread) else listed:
        now, most = gpu.core_temperature_c, gpu.slowdown_temperature_c
        if isinstance(now, Unread):
            yield unread(now, subject=name_of(gpu))
            continue
        edge = most if isinstance(most, int) else CORE_SLOWDOWN_C
        yield _judged(gpu_name=name_of(gpu), what="core", now=now, edge=edge)


def _judged(*, gpu_name: str, what: str, now: int, edge: int) -> Outcome:
    evidence = f"{gpu_name}: {what} {now} C, limit {edge} C"
    if now >= edge:
        return fail("at-limit", evidence, subject=gpu_name, now=now, limit=edge)
    if now >= edge - WARN_BELOW_C:
        return warn("close", evidence, subject=gpu_name, now=now, limit=edge)
    return ok(evidence, subject=gpu_name)


@check("thermal.slowdown", source="clocks_event_reasons: hw_thermal_slowdown, sw_thermal_slowdown, hw_slowdown")
def slowdown(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """A card is being slowed down for heat right now."""
    listed = listed_cards(report)
    for gpu in () if isinstance(listed, Unread) else listed:
        if isinstance(gpu.throttle_reasons, Unread):
            continue
        hot = [reason for reason in gpu.throttle_reasons if "thermal" in reason]
        if hot:
            yield fail("hot", f"{name_of(gpu)}: {', '.join(hot)}", subject=name_of(gpu))
        elif "hw_slowdown" in gpu.throttle_reasons:
            yield warn("hardware", f"{name_of(gpu)}: hw_slowdown", subject=name_of(gpu))
        else:
            yield ok(f"{name_of(gpu)}: no thermal slowdown", subject=name_of(gpu))


@check("thermal.idle", source="a TITAN V with a bad contact idled at 79-82 C and 59-63 W; healthy V100s idle at 25-43 W")
def idle(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Hot while idle: the cooler has no contact, or no air moves through a passive card."""
    listed = listed_cards(report)
    volta = {gpu.address for gpu in cards(report) if (known := card(gpu)) and known.family == "volta"}
    for gpu in () if isinstance(listed, Unread) else listed:
        use, memory_used, temperature, draw = (
            gpu.gpu_utilization_percent,
            gpu.memory_used_mib,
            gpu.core_temperature_c,
            gpu.power_draw_w,
        )
        idle_now = (isinstance(use, int) and use == 0) or (
            not isinstance(gpu.throttle_reasons, Unread) and "gpu_idle" in gpu.throttle_reasons
        )
        if not idle_now or gpu.address not in volta or not isinstance(memory_used, int) or memory_used > 1024:
            continue
        evidence = f"{name_of(gpu)}: idle at {temperature} C, {draw} W"
        too_hot = isinstance(temperature, int) and temperature > IDLE_LIMIT_C
        too_hungry = isinstance(draw, float) and draw > IDLE_LIMIT_W
        yield warn("hot", evidence, subject=name_of(gpu)) if too_hot or too_hungry else ok(evidence, subject=name_of(gpu))


@check("thermal.fans", source="hwmon; passive cards need a fan that turns")
def fans(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Passive cards and no fan that the board reports as turning."""
    passive = [gpu.address for gpu in cards(report) if (known := card(gpu)) and known.passive]
    speeds = report.system.fans_rpm
    if not passive or isinstance(speeds, Unread):
        return
    turning = [f"{name} {rpm} rpm" for name, rpm in speeds if rpm > 0]
    if turning:
        yield ok(*turning)
    elif speeds:
        yield warn("still", *(f"{name} 0 rpm" for name, _ in speeds))
    else:
        yield info("unseen", "hwmon shows no fan")
