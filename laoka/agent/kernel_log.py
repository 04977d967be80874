"""Records of the kernel log as events: what the NVIDIA driver and the PCIe ports say about a card. Pure.

The line forms themselves are read by laoka.host.kernel_log; here are the records of /dev/kmsg (Documentation/ABI/testing/dev-kmsg):
`PRIORITY,SEQUENCE,MICROSECONDS,FLAGS[,...];text`, with \\xHH for bytes that could confuse, then lines ` KEY=value`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from laoka.agent.signals import Signal
from laoka.host.kernel_log import (
    AerError,
    ApiMismatch,
    Event,
    FallenOff,
    NoPowerCable,
    RmInitFailure,
    Xid,
    read_events,
)

# A flooded log brings thousands of records a second, most of them corrected AER errors: a few searches tell which can matter.
MARKS = (b"NVRM", b"PCIe Bus Error")
FLOOD = b"severity=Correct"
DRILL_MARK = b"laoka drill:"
"""Begins a record of user space that rehearses what the kernel log never tells (see laoka.agent.drill)."""
STITCHED_RECORDS = 6
FACILITY_KERNEL = 0


@dataclass(frozen=True)
class KernelEvent:
    """What one or more records say about a card. `kind` is a signal's (see laoka.agent.signals); `bdf` None: no card named."""

    kind: str
    bdf: str | None
    text: str
    xid: int | None = None
    pid: int | None = None
    process: str | None = None
    values: tuple[tuple[str, str | int], ...] = ()


@dataclass(frozen=True)
class KmsgRecord:
    """One record of /dev/kmsg. `facility` 0 is the kernel's own: records that user space writes can't have it."""

    facility: int
    level: int
    sequence: int
    time_us: int
    text: str

    @property
    def from_kernel(self) -> bool:
        return self.facility == FACILITY_KERNEL


_RECORD = re.compile(r"(\d{1,9}),(\d{1,20}),(\d{1,20}),[^;,]*(?:,[^;]*)?;(.*)", re.DOTALL | re.ASCII)
_ESCAPE = re.compile(rb"\\x([0-9a-fA-F]{2})")


def parse_kmsg_record(data: bytes | str) -> KmsgRecord | None:
    """One record, or None for what is none (a continuation line with KEY=value, a broken line)."""
    raw = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
    found = _RECORD.match(raw.split(b"\n", 1)[0].decode("utf-8", "replace"))
    if not found:
        return None
    priority, sequence, time_us, text = found.groups()
    unescaped = _ESCAPE.sub(lambda item: bytes([int(item[1], 16)]), text.encode("utf-8", "replace"))
    return KmsgRecord(int(priority) >> 3, int(priority) & 7, int(sequence), int(time_us), unescaped.decode("utf-8", "replace"))


def parse_kernel_line(text: str) -> KernelEvent | None:
    """The event of a line (or of a record of several lines) of the kernel log, with or without a prefix; None: says nothing
    about a card. Corrected AER errors are none: a flood of them is normal on some boards.
    """
    for event in read_events(text):
        if found := _event(event, " ".join(text.split())):
            return found
    return None


def _event(event: Event, text: str) -> KernelEvent | None:
    if isinstance(event, Xid):
        values: tuple[tuple[str, str | int], ...] = (("body", event.body),)
        return KernelEvent("xid", event.address, text, event.code, event.pid, event.process, values)
    if isinstance(event, FallenOff):
        return KernelEvent("fallen_off", event.address, text)
    if isinstance(event, RmInitFailure):
        codes = f"{event.init_status:#x}:{event.rm_status:#x}"
        return KernelEvent("init_failed", event.address, text, values=(("codes", codes),))
    if isinstance(event, ApiMismatch):
        return KernelEvent("api_mismatch", None, text, values=(("client", event.client_version), ("module", event.module_version)))
    if isinstance(event, NoPowerCable):
        return KernelEvent("no_power_cable", event.address, text)
    if isinstance(event, AerError) and event.severity != "corrected":
        values = (("severity", event.severity), ("layer", event.layer or "?"))
        return KernelEvent("aer_uncorrected", event.address, text, values=values)
    return None


@dataclass(frozen=True)
class Stitcher:
    """Remembers the records that begin a message of several records ("The NVIDIA GPU ...", "API mismatch")."""

    begun: tuple[str, ...] = ()

    def feed(self, text: str) -> tuple[Stitcher, KernelEvent | None]:
        """Take in a record's text; an event comes out as soon as its message is complete."""
        if "NVRM" not in text:
            return self, parse_kernel_line(text)
        if begins := re.search(r"NVRM: (The NVIDIA |API mismatch)", text):
            event = parse_kernel_line(text)
            return (Stitcher() if event else Stitcher((text[begins.start() :],))), event
        if event := parse_kernel_line(text):
            return Stitcher(), event
        if not self.begun:
            return self, None
        parts = (*self.begun, text)
        event = parse_kernel_line("\n".join(parts))
        return (Stitcher() if event or len(parts) >= STITCHED_RECORDS else Stitcher(parts)), event


def signal_of(event: KernelEvent, record: KmsgRecord, boot_id: str) -> Signal:
    """The signal that an event gives. A record of user space gives a drill's."""
    values: dict[str, str | int | float] = dict(event.values)
    return Signal(
        kind=event.kind,
        sensor="kernel_log",
        bdf=event.bdf,
        xid=event.xid,
        seen=event.text[:400],
        values=values,
        lasting=False,
        origin=f"{boot_id}:{record.sequence}",
        drill=not record.from_kernel,
    )


def interesting(data: bytes) -> bool:
    """The cheap look: whether a record can hold anything for us."""
    return (any(mark in data for mark in MARKS) and FLOOD not in data) or DRILL_MARK in data


def holds_nothing(data: bytes) -> bool:
    """The cheapest look, at many records at once: True when `interesting` would be False for each of them."""
    bus_errors = data.count(MARKS[1])
    # Not severity alone: the same words in another record must not make up for an error that matters.
    return (
        MARKS[0] not in data and DRILL_MARK not in data and (not bus_errors or bus_errors == data.count(MARKS[1] + b": " + FLOOD))
    )


@dataclass(frozen=True)
class Position:
    """How far a log was read: the boot it belongs to, the last sequence number, and for a file its identity and offset."""

    boot_id: str = ""
    sequence: int = -1
    inode: int = 0
    offset: int = 0


def after_replacement(records: Iterable[KmsgRecord], last_sequence: int) -> tuple[KmsgRecord, ...]:
    """The records of a file that took another one's place that are new: numbering that goes on means that the old ones are in
    it again; numbering that began anew means that all are new.
    """
    found = tuple(records)
    if found and found[-1].sequence > last_sequence:
        return tuple(record for record in found if record.sequence > last_sequence)
    if found and found[-1].sequence == last_sequence:
        return ()
    return found
