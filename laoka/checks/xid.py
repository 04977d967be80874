"""Xid history: bursts of errors, each with the one that began it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from laoka.checks.expected import card
from laoka.checks.facts import cards, events
from laoka.checks.finding import Outcome
from laoka.checks.registry import Wanted, check, fail, info, ok, unread, warn
from laoka.host.kernel_log import FallenOff, Xid
from laoka.host.report import HostReport
from laoka.host.unread import Unread

# NVIDIA Fleet Intelligence: a burst is all Xids of a node until 3 minutes of silence.
BURST_SILENCE_S = 180
# Volta's own judgement (NVIDIA's current catalogue is for Ampere and later, and says so).
HARDWARE = {48, 54, 57, 58, 61, 62, 64, 74, 79, 109, 110, 122, 123, 140, 143, 171, 172}
CARE = {8, 32, 38, 56, 63, 69, 92, 93, 95}
FOLLOWS = {45}
# Ampere's contained errors, GSP errors, Grace's C2C and NVLink 5: no Volta card has the parts that report these.
NOT_ON_VOLTA = {94, 95, 119, 120, 121, *range(144, 151)}


@dataclass(frozen=True)
class Burst:
    """Xids of a node without a long silence between them; `root` is the earliest that is not mere clean-up (45)."""

    xids: tuple[Xid, ...]

    @property
    def root(self) -> Xid:
        return next((xid for xid in self.xids if xid.code not in FOLLOWS), self.xids[0])


def bursts(xids: tuple[Xid, ...]) -> tuple[Burst, ...]:
    """Group Xids; those without a time, or of another clock than the one before, stay in their order."""
    groups: list[list[Xid]] = []
    for xid in xids:
        last = groups[-1][-1] if groups else None
        near = (
            last is not None
            and (xid.time_s is None or last.time_s is None or xid.clock == last.clock)
            and abs((xid.time_s or 0) - (last.time_s or 0) if xid.time_s and last.time_s else 0) <= BURST_SILENCE_S
        )
        if near:
            groups[-1].append(xid)
        else:
            groups.append([xid])
    return tuple(Burst(tuple(group)) for group in groups)


@check("xid.bursts", source="NVRM Xid lines; names of nverror.h; NVIDIA Fleet Intelligence's rule for bursts")
def history(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Each burst of Xids with its root cause: the earliest that is not clean-up."""
    log = report.kernel_log.history
    if isinstance(log, Unread):
        yield unread(log)
        return
    found = bursts(tuple(event for event in log if isinstance(event, Xid)))
    for burst in found[-8:]:
        root = burst.root
        codes = ", ".join(str(code) for code in dict.fromkeys(xid.code for xid in burst.xids))
        evidence = (f"{root.address}: Xid {root.code}, {root.body[:140]}", f"{len(burst.xids)} Xids in the burst: {codes}")
        values = {"code": root.code, "subject_name": root.address}
        every = {xid.code for xid in burst.xids}
        if {62, 48} <= every or 64 in every:
            yield fail("retire", *evidence, subject=root.address, **values)
        elif root.code == 79:
            yield fail("off-the-bus", *evidence, subject=root.address, **values)
        elif root.code in HARDWARE or every & {48, 79}:
            yield fail("hardware", *evidence, subject=root.address, **values)
        elif root.code in CARE:
            yield warn("care", *evidence, subject=root.address, **values)
        else:
            yield info("software", *evidence, subject=root.address, **values)
    if not found:
        yield ok("no Xid in the kernel log")


@check("xid.fell-off", source="the driver's three wordings of `has fallen off the bus`, one of them over three lines")
def fell_off(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """A card left the bus since the boot, with or without an Xid."""
    addresses = {event.address: None for event in events(report, FallenOff)}
    addresses |= {event.address: None for event in events(report, Xid) if event.code == 79}
    for address in addresses:
        device = report.device(address)
        if device is not None and device.answers is True:
            yield warn("back", f"{address} fell off since the boot and answers now", subject=address)
        else:
            yield fail("gone", f"{address} fell off the bus since the boot", subject=address)
    if not addresses and not isinstance(report.kernel_log.boot, Unread):
        yield ok("no card fell off the bus since the boot")


@check("xid.repeated", source="gpud: after the second time, inspect the hardware")
def repeated(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """The same card left the bus more than once in what the log keeps."""
    log = report.kernel_log.history
    times: dict[str, int] = {}
    for burst in bursts(tuple(event for event in (() if isinstance(log, Unread) else log) if isinstance(event, Xid))):
        for address in {xid.address for xid in burst.xids if xid.code == 79}:
            times[address] = times.get(address, 0) + 1
    for address, count in times.items():
        if count > 1:
            yield fail("again", f"{address}: {count} times", subject=address, count=count)


@check("xid.impossible", source="Xids 94, 95, 119-121 and 144-150 come from parts that no card before Ampere has")
def impossible(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """An Xid that this card can't raise: the address is mapped to the wrong card, or the log is another host's."""
    volta = {gpu.address for gpu in cards(report) if (row := card(gpu)) and row.sm <= 70}
    for address, code in dict.fromkeys((event.address, event.code) for event in events(report, Xid)):
        if code in NOT_ON_VOLTA and address in volta:
            yield warn("wrong-card", f"{address}: Xid {code}", subject=address, code=code)
