"""What the kernel log says about cards, links and windows: every line form seen in the field becomes a small event."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

from laoka.host.pci_address import normal

Clock = Literal["boot", "wall", "none"]


@dataclass(frozen=True)
class LogLine:
    """One line without its prefix. `time_s` counts from the boot or from the epoch, as `clock` says; None: no stamp."""

    text: str
    time_s: float | None = None
    clock: Clock = "none"


@dataclass(frozen=True)
class Xid:
    """An NVRM Xid report. `address` is in the form 0000:01:00.0; `process` and `pid` are whom the driver blamed."""

    code: int
    address: str
    body: str
    pid: int | None = None
    process: str | None = None
    mig_instance: str | None = None
    time_s: float | None = None
    clock: Clock = "none"


@dataclass(frozen=True)
class FallenOff:
    """The driver's words "has fallen off the bus" without an Xid of their own (three forms, one over three lines)."""

    address: str
    device_id: str | None = None
    time_s: float | None = None
    clock: Clock = "none"


@dataclass(frozen=True)
class RmInitFailure:
    """`RmInitAdapter failed! (init:rm:line)`; `rm_status` is an NV_STATUS value of nvstatuscodes.h."""

    address: str | None
    init_status: int
    rm_status: int
    time_s: float | None = None
    clock: Clock = "none"


@dataclass(frozen=True)
class InvalidBar:
    """NVRM refused a BAR: `BAR1 is 0M @ 0x0`."""

    address: str
    bar: int
    size_mib: int
    start: int


@dataclass(frozen=True)
class NoSpace:
    """The kernel found no room for a BAR or a bridge window of `size_bytes`; `device` None: the line names none."""

    device: str | None
    what: str
    size_bytes: int
    is_64bit: bool


@dataclass(frozen=True)
class RootWindow:
    """A memory window of a PCI root bus (`0000:00`), both ends included."""

    bus: str
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.start + 1


@dataclass(frozen=True)
class BarLine:
    """A BAR as the kernel printed it at scan time; start 0 means that the firmware left it unassigned."""

    address: str
    bar: int
    start: int
    end: int
    is_64bit: bool
    prefetchable: bool


@dataclass(frozen=True)
class DeviceLine:
    """`pci 0000:01:00.0: [10de:17fd] type 00 class 0x030200`."""

    address: str
    vendor_id: int
    device_id: int
    class_code: int


@dataclass(frozen=True)
class AerError:
    """One AER report of a port or a device."""

    address: str
    severity: Literal["corrected", "nonfatal", "fatal"]
    layer: str
    time_s: float | None = None
    clock: Clock = "none"


@dataclass(frozen=True)
class BandwidthLimited:
    """The kernel's own words about a link that gives less than the card could take."""

    address: str
    available_gb_s: float
    capable_gb_s: float
    limited_by: str


@dataclass(frozen=True)
class ApiMismatch:
    """Userspace and kernel module have different driver versions."""

    client_version: str
    module_version: str


@dataclass(frozen=True)
class CardIgnored:
    """The loaded driver branch no longer drives this card and says so."""

    card: str
    driver_version: str | None
    last_branch: str | None


@dataclass(frozen=True)
class OpenModuleRefused:
    """The open kernel module found a card without a GSP (everything before Turing)."""

    address: str | None


@dataclass(frozen=True)
class NoPowerCable:
    """`GPU does not have the necessary power cables connected`."""

    address: str | None


Event: TypeAlias = (
    Xid
    | FallenOff
    | RmInitFailure
    | InvalidBar
    | NoSpace
    | RootWindow
    | BarLine
    | DeviceLine
    | AerError
    | BandwidthLimited
    | ApiMismatch
    | CardIgnored
    | OpenModuleRefused
    | NoPowerCable
)

_SYSLOG = re.compile(r"(?P<when>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) \S+ kernel: ")
_ISO = re.compile(r"(?P<when>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:[+-]\d\d:?\d\d|Z)?) \S+ kernel: ")
_EPOCH = re.compile(r"(?P<when>\d{9,}\.\d+) \S+ kernel: ")
_BARE_KERNEL = re.compile(r"kernel: ")
_MONOTONIC = re.compile(r"\[ *(?P<s>\d+\.\d+)\] (?:\[ *[TC]\d+\] ?)?(?:\S+ kernel: )?")
_DELTA = re.compile(r"\[ *[+<] *\d+\.\d+>?\] ")
_CTIME = re.compile(r"\[(?P<when>[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4})\] ")
_LEVEL = re.compile(r"<\d{1,3}>")


def read_line(line: str) -> LogLine:
    """Split a kernel log line in its time and its text. Prefixes known: none, `[  12.3] `, `[12.3] [ T42] `, `[+0.1] `,
    `[Tue Apr 15 16:50:03 2025] `, `Feb 01 14:25:31 host kernel: `, ISO or epoch time of journalctl, stacked or not.
    """
    text = line.rstrip("\r\n")
    time_s: float | None = None
    clock: Clock = "none"
    text = _LEVEL.sub("", text, count=1) if text.startswith("<") else text
    for pattern in (_EPOCH, _ISO, _SYSLOG, _BARE_KERNEL):
        found = pattern.match(text)
        if found:
            stamp = found.groupdict().get("when")
            time_s, clock = _wall(stamp) if stamp else (None, "none")
            text = text[found.end() :]
            break
    for pattern in (_MONOTONIC, _DELTA, _CTIME):
        found = pattern.match(text)
        if found:
            groups = found.groupdict()
            if clock == "none" and groups.get("s"):
                time_s, clock = float(groups["s"]), "boot"
            elif clock == "none" and groups.get("when"):
                time_s, clock = _wall(groups["when"])
            text = text[found.end() :]
            break
    return LogLine(text.strip(), time_s, clock)


def _wall(stamp: str) -> tuple[float | None, Clock]:
    if re.fullmatch(r"\d+\.\d+", stamp):
        return float(stamp), "wall"
    for form in ("%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%dT%H:%M:%S.%f%z", "%a %b %d %H:%M:%S %Y"):
        try:
            return datetime.strptime(stamp, form).timestamp(), "wall"
        except ValueError:
            continue
    try:
        # Syslog stamps have no year: good for distances inside one log, so any leap year will do.
        return datetime.strptime(f"2000 {stamp}", "%Y %b %d %H:%M:%S").timestamp(), "wall"
    except ValueError:
        return None, "none"


_ADDR = r"[0-9A-Fa-f]{2,8}(?::[0-9A-Fa-f]{2}){1,2}(?:\.[0-7])?"
_XID = re.compile(rf"NVRM: Xid \((?:PCI:)?({_ADDR})(?: (GPU-I:\d+))?\): (\d+)(?:,\s*(.*))?$")
_BLAME = re.compile(r"(?:pid=(?P<pid>[^,]*)(?:,\s*|$))?(?:name=(?P<name>[^,]*)(?:,\s*|$))?(?P<rest>.*)$")
_FALLEN = re.compile(rf"NVRM: GPU (?:at )?(?:PCI:)?({_ADDR}):? (?:GPU )?has fallen off the bus")
_FALLEN_SPLIT = re.compile(
    rf"The NVIDIA GPU.*? ({_ADDR}) .*?\(PCI ID: (?:[0-9a-f]{{4}}:)?([0-9a-f]{{4}})\).*?fallen off the bus",
    re.IGNORECASE,
)
_RMINIT = re.compile(rf"NVRM: (?:GPU ({_ADDR}):? )?.*?RmInitAdapter failed! \(0x([0-9a-f]+):0x([0-9a-f]+)", re.IGNORECASE)
_INVALID_BAR = re.compile(r"NVRM: BAR(\d) is (\d+)M @ 0x([0-9a-f]+) \(PCI:([0-9a-f:.]+)\)", re.IGNORECASE)
_NO_SPACE = re.compile(
    rf"(?:({_ADDR}): )?(BAR \d+|bridge window|VF BAR \d+)"
    r"(?::? \[mem size 0x([0-9a-f]+)([^\]]*)\]: (?:can't assign; no space|failed to assign)"
    r"|: (?:no space for|failed to assign) \[mem size 0x([0-9a-f]+)([^\]]*)\])"
)
_ROOT_WINDOW = re.compile(r"pci_bus ([0-9a-f]{4}:[0-9a-f]{2}): root bus resource \[mem 0x([0-9a-f]+)-0x([0-9a-f]+)")
_BAR = re.compile(
    rf"pci ({_ADDR}): (?:BAR (\d)|reg 0x([0-9a-f]+)):?(?: assigned)? \[mem 0x([0-9a-f]+)-0x([0-9a-f]+)( 64bit)?( pref)?"
)
_DEVICE = re.compile(rf"pci ({_ADDR}): \[([0-9a-f]{{4}}):([0-9a-f]{{4}})\] type [0-9a-f]+ class (?:0x)?([0-9a-f]+)")
_AER = re.compile(rf"({_ADDR}): (?:AER: )?PCIe Bus Error: severity=(\S+)( \([^)]*\))?,(?: type=([^,]*))?")
_BANDWIDTH = re.compile(rf"({_ADDR}): ([\d.]+) Gb/s available PCIe bandwidth, limited by (.+?) \(capable of (\d+(?:\.\d+)?) Gb/s")
_MISMATCH = re.compile(r"has the version ([\d.]+?),? but(?: this kernel module has)?.*?the version ([\d.]+?)\.(?:\s|$)")
_IGNORED = re.compile(r"The NVIDIA (.+?) GPU\b.*?supported through the NVIDIA (\d+)\.")
_IGNORED_BY = re.compile(r"The (\d+(?:\.\d+)+) NVIDIA driver will ignore")
_OPEN_REFUSED = re.compile(rf"(?:({_ADDR})\D.*?)?not supported by open nvidia\.ko")
_POWER_CABLE = re.compile(rf"(?:({_ADDR})\D.*?)?does not have the necessary power cables connected")

# A cheap look before any pattern: a flooded log has a million lines that say nothing to us.
_INTERESTING = re.compile(
    r"NVRM|PCIe Bus Error|root bus resource|BAR|reg 0x|bridge window|\] type |available PCIe bandwidth|power cables"
)
_STITCHED_LINES = 6


def read_lines(text: str) -> tuple[LogLine, ...]:
    """Every non-empty line of a kernel log, without the comment lines of a saved sample."""
    return tuple(read_line(line) for line in text.splitlines() if line.strip() and not line.startswith(("# ", "$ ")))


def read_events(text: str) -> tuple[Event, ...]:
    """All events of a kernel log in the order of its lines; no input makes it fail."""
    lines = [line for line in text.splitlines() if _INTERESTING.search(line) and not line.startswith(("# ", "$ "))]
    return tuple(_events([read_line(line) for line in lines]))


def _events(lines: list[LogLine]) -> Iterator[Event]:
    for index, line in enumerate(lines):
        if "NVRM" in line.text:
            yield from _nvrm(line, lines[index : index + _STITCHED_LINES])
        else:
            yield from _kernel(line)


def _nvrm(line: LogLine, following: list[LogLine]) -> Iterator[Event]:
    text = line.text
    if found := _XID.search(text):
        address = normal(found[1])
        if address:
            pid, process, body = _blame(found[4] or "")
            yield Xid(int(found[3]), address, body, pid, process, found[2], line.time_s, line.clock)
    elif found := _FALLEN.search(text):
        address = normal(found[1])
        if address:
            yield FallenOff(address, None, line.time_s, line.clock)
    elif found := _RMINIT.search(text):
        address = normal(found[1]) if found[1] else None
        yield RmInitFailure(address, int(found[2], 16), int(found[3], 16), line.time_s, line.clock)
    elif found := _INVALID_BAR.search(text):
        # The oldest form is bus:device.function with a four digit bus: 0001:00.0
        address = normal(found[4]) or normal(found[4].removeprefix("00"))
        if address:
            yield InvalidBar(address, int(found[1]), int(found[2]), int(found[3], 16))
    elif "The NVIDIA " in text or "API mismatch" in text:
        yield from _stitched(line, _joined(following))
    elif found := _POWER_CABLE.search(text):
        yield NoPowerCable(normal(found[1]) if found[1] else None)
    elif "not supported by open" in text:
        yield OpenModuleRefused(None)


def _stitched(line: LogLine, text: str) -> Iterator[Event]:
    """Messages that the driver prints over several lines; `text` is the first line and those after it, joined."""
    if found := _FALLEN_SPLIT.match(text):
        address = normal(found[1])
        if address:
            yield FallenOff(address, found[2].lower(), line.time_s, line.clock)
    elif text.startswith("API mismatch") and (found := _MISMATCH.search(text)):
        yield ApiMismatch(found[1], found[2])
    elif found := _IGNORED.match(text):
        driver = _IGNORED_BY.search(text)
        yield CardIgnored(found[1], driver[1] if driver else None, found[2])
    elif found := _OPEN_REFUSED.search(text):
        yield OpenModuleRefused(normal(found[1]) if found[1] else None)
    elif found := _POWER_CABLE.search(text):
        yield NoPowerCable(normal(found[1]) if found[1] else None)


def _joined(lines: Iterable[LogLine]) -> str:
    """The messages of consecutive NVRM lines as one, up to where a new message clearly begins."""
    parts: list[str] = []
    for line in lines:
        _, marker, message = line.text.partition("NVRM: ")
        if not marker or (parts and re.match(r"The NVIDIA |API mismatch|Xid |GPU ", message)):
            break
        parts.append(message.strip())
    return " ".join(parts)


def _blame(body: str) -> tuple[int | None, str | None, str]:
    found = _BLAME.match(body)
    if not found:
        return None, None, body
    pid, name = ((found[group] or "").strip("' ") for group in ("pid", "name"))
    return int(pid) if pid.isdecimal() else None, None if name in ("", "<unknown>") else name, found["rest"].strip()


def _kernel(line: LogLine) -> Iterator[Event]:
    text = line.text
    if found := _NO_SPACE.search(text):
        what, flags = found[2], found[4] or found[6] or ""
        # Before 6.x a bridge's own windows were numbered after its BARs: 7-9, or 13-15 with SR-IOV built in.
        if what.startswith("BAR ") and int(what[4:]) > 6:
            what = "bridge window"
        device = normal(found[1]) if found[1] else None
        yield NoSpace(device, what, int(found[3] or found[5], 16), "64bit" in flags)
    elif found := _ROOT_WINDOW.search(text):
        yield RootWindow(found[1], int(found[2], 16), int(found[3], 16))
    elif found := _BAR.search(text):
        address = normal(found[1])
        bar = int(found[2]) if found[2] else (int(found[3], 16) - 0x10) // 4
        if address and 0 <= bar <= 5:
            yield BarLine(address, bar, int(found[4], 16), int(found[5], 16), bool(found[6]), bool(found[7]))
    elif found := _DEVICE.search(text):
        address = normal(found[1])
        if address:
            yield DeviceLine(address, int(found[2], 16), int(found[3], 16), int(found[4], 16))
    elif found := _AER.search(text):
        address = normal(found[1])
        if address:
            yield AerError(address, _severity(found[2], found[3] or ""), (found[4] or "").strip(), line.time_s, line.clock)
    elif found := _BANDWIDTH.search(text):
        address = normal(found[1])
        if address:
            yield BandwidthLimited(address, float(found[2]), float(found[4]), found[3])


def _severity(word: str, detail: str) -> Literal["corrected", "nonfatal", "fatal"]:
    if word.startswith(("Correct",)):
        return "corrected"
    return "nonfatal" if "non" in detail.lower() else "fatal"
