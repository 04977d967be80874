"""Power: cables, caps, supplies, and whether the last boot ended because the power went."""

from __future__ import annotations

import re
from collections.abc import Iterator

from laoka.checks.facts import cards, catalogue_cards, events, listed_cards, name_of
from laoka.checks.finding import Outcome
from laoka.checks.registry import Wanted, check, fail, info, ok, unread, warn
from laoka.host.kernel_log import NoPowerCable, RmInitFailure
from laoka.host.report import HostReport
from laoka.host.unread import Unread

# NV_ERR_INSUFFICIENT_POWER of nvstatuscodes.h
INSUFFICIENT_POWER = 0x1C


@check("power.cable", source="NVRM's own words; NV_STATUS 0x1c of nvstatuscodes.h")
def cable(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """The card's power connector: a Tesla takes a CPU (EPS) plug, and without it the driver refuses the card."""
    words = [event.address for event in events(report, NoPowerCable)]
    words += [event.address for event in events(report, RmInitFailure) if event.rm_status == INSUFFICIENT_POWER]
    for address in dict.fromkeys(words):
        yield fail("missing", f"{address or 'a card'}: the driver says that power cables are missing", subject=address)
    if not words and not isinstance(report.kernel_log.boot, Unread):
        yield ok("no complaint about power cables in the kernel log")


@check("power.limit", source="nvidia-smi; a V100 32GB behind a 40 mm fan held its memory below 85 C at 175 W, not at 250 W")
def limit(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """The power limit against the card's own default and maximum."""
    listed = listed_cards(report)
    if isinstance(listed, Unread):
        yield unread(listed)
        return
    for gpu in listed:
        now, default = gpu.power_limit_w, gpu.power_limit_default_w
        if isinstance(now, Unread) or isinstance(default, Unread):
            yield unread(now if isinstance(now, Unread) else Unread(str(default)), subject=name_of(gpu))
            continue
        evidence = f"{name_of(gpu)}: limit {now:g} W, default {default:g} W"
        if now < default:
            yield ok(evidence, subject=name_of(gpu))
        else:
            yield info("uncapped", evidence, subject=name_of(gpu), limit=f"{now:g}")


@check("power.supply", source="DMI type 39; the catalogue's power limits")
def supply(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """What the cards may draw together against what the power supplies give, where DMI knows them."""
    listed = listed_cards(report)
    limits = [gpu.power_limit_w for gpu in (() if isinstance(listed, Unread) else listed) if isinstance(gpu.power_limit_w, float)]
    if not limits:
        limits = [float(known.power_limit_max_w) for known in catalogue_cards(report) if known.power_limit_max_w]
    if not limits or len(limits) < len(cards(report)):
        return
    total = sum(limits)
    evidence = f"{len(limits)} cards may draw {total:g} W together"
    supplies = report.firmware.power_supplies
    watts = [] if isinstance(supplies, Unread) else [s.max_power_w for s in supplies if s.max_power_w]
    if not watts:
        yield info("sum", evidence, "DMI does not say what the power supply gives", total=f"{total:g}")
    elif sum(watts) < total:
        yield fail("too-weak", evidence, f"power supplies: {sum(watts)} W", total=f"{total:g}", given=sum(watts))
    else:
        yield ok(evidence, f"power supplies: {sum(watts)} W")


@check("power.persistence", source="nvidia-smi; limits do not survive a driver reload without it")
def persistence(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Without persistence mode the driver forgets limits and takes seconds for every first call."""
    listed = listed_cards(report)
    for gpu in () if isinstance(listed, Unread) else listed:
        if isinstance(gpu.persistence_mode, Unread):
            yield unread(gpu.persistence_mode, subject=name_of(gpu))
        elif gpu.persistence_mode:
            yield ok(f"{name_of(gpu)}: persistence mode on", subject=name_of(gpu))
        else:
            yield warn("off", f"{name_of(gpu)}: persistence mode off", subject=name_of(gpu))


@check("power.brake", source="clocks_event_reasons: hw_power_brake_slowdown, sw_power_cap")
def brake(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """The board or the supply is slowing a card down right now."""
    listed = listed_cards(report)
    for gpu in () if isinstance(listed, Unread) else listed:
        if isinstance(gpu.throttle_reasons, Unread):
            continue
        active = [reason for reason in gpu.throttle_reasons if "power_brake" in reason]
        evidence = f"{name_of(gpu)}: {', '.join(gpu.throttle_reasons) or 'no'} slowdown reason active"
        yield fail("active", evidence, subject=name_of(gpu)) if active else ok(evidence, subject=name_of(gpu))


_ORDERLY = re.compile(
    r"Journal stopped|Reached target .*(Power-Off|Reboot|Shutdown|Halt|System Shutdown)|systemd-shutdown|Shutting down|"
    r"System is (rebooting|powering down|halted)|reboot: |Unmounting|Stopped target|Rebooting|Power down"
)


@check("power.last-boot-end", source="the tail of the previous boot; a tripped supply leaves a journal that stops mid-write")
def last_boot_end(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """A journal that ends without a shutdown: the power went, the supply tripped, or the machine hung."""
    previous = report.system.previous_boot
    if isinstance(previous, Unread) or not previous:
        return
    if any(_ORDERLY.search(line.text) for line in previous):
        yield ok("the previous boot ended with a shutdown")
    else:
        yield warn("cut", f"last line of the previous boot: {previous[-1].text[:160]}")
