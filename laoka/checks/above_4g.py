"""The evidence ladder for "Above 4G Decoding": no single signal is trusted, the verdict names the rung that decided it.

Rung 1: BAR1 of the card has its full size and an address.   2: BAR1 has no address, 3 to 5 say why.
Rung 3: no window above 4 GiB on the card's root bus.   4: the window is too small, or the kernel found no room.
Rung 5: a bridge on the path decodes 32-bit prefetchable only.     6: no card: other devices above 4 GiB are a hint.
Sources: the sysfs ABI (`resource`), ReBarUEFI issues 11, 329 and 395, kernel messages of real boards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from laoka.checks.expected import bar1_bytes
from laoka.host.kernel_log import InvalidBar, NoSpace
from laoka.host.pci import FOUR_GIB, Bar, PciDevice
from laoka.host.report import HostReport
from laoka.host.unread import Maybe, Unread

GIB = 1 << 30
# The kernel asked for a 48 GiB bridge window for a 32 GiB BAR1 plus a 32 MiB BAR3 (ReBarUEFI issue 395).
WINDOW_PER_BAR1 = 1.5
# Below this a BAR also fits under 4 GiB, and proves nothing by lying above.
LARGE_BAR_BYTES = 4 * GIB
SMALLEST_WINDOW_BYTES = int(16 * GIB * WINDOW_PER_BAR1)

State = Literal[
    "on", "small", "off", "too-small", "no-room", "bridge-32bit", "no-address", "likely-on", "fits-below", "unknown", "unread"
]


@dataclass(frozen=True)
class Ladder:
    """Where the climb ended for one card (or for a host without one): the state, the deciding rung, what was seen."""

    state: State
    rung: int
    evidence: tuple[str, ...]


def size_text(size_bytes: int) -> str:
    """`32 GiB`, `16 MiB`: as people write BAR and window sizes."""
    for unit, factor in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:g} {unit}" if size_bytes % factor == 0 else f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes} B"


def windows_above_4g(report: HostReport, bus: Maybe[str]) -> Maybe[tuple[tuple[int, int], ...]]:
    """Windows that begin at 4 GiB or higher on one root bus; on all of them when the bus is not known."""
    windows = report.root_windows
    if isinstance(windows, Unread):
        return windows
    buses = windows.values() if isinstance(bus, Unread) else [windows.get(bus, ())]
    return tuple(window for group in buses for window in group if window[0] >= FOUR_GIB)


def window_needed_bytes(report: HostReport, bus: Maybe[str]) -> int:
    """Window that all known cards of a root bus need together (1.5 times their BAR1 sizes)."""
    gpus = report.gpus
    if isinstance(gpus, Unread):
        return 0
    sizes = (bar1_bytes(gpu) or 0 for gpu in gpus if isinstance(bus, Unread) or gpu.root_bus == bus)
    return int(sum(sizes) * WINDOW_PER_BAR1)


def climb(report: HostReport, gpu: PciDevice) -> Ladder:
    """Rungs 1 to 5 for one card."""
    expected = bar1_bytes(gpu)
    bar = gpu.bar1
    seen: list[str] = []
    if isinstance(bar, Bar) and bar.state == "assigned":
        seen.append(f"{gpu.address} BAR1 at {bar.start:#x}, size {size_text(bar.size_bytes)}")
        if expected is not None and bar.size_bytes < expected:
            seen.append(f"a {gpu.id_text} has a BAR1 of {size_text(expected)}")
            return Ladder("small", 1, tuple(seen))
        if bar.start >= FOUR_GIB or expected is not None:
            return Ladder("on", 1, tuple(seen))
        seen.append("a BAR below 4 GiB proves nothing about Above 4G Decoding")
        return Ladder("fits-below", 1, tuple(seen))

    refused = _refused(report, gpu)
    if isinstance(bar, Unread) and not refused and not _no_space(report, gpu):
        return Ladder("unknown", 2, (f"{gpu.address} BAR1: {bar.reason}",))
    seen.append(refused or f"{gpu.address} BAR1 has no address")
    if not isinstance(gpu.config, Unread) and gpu.config[0x14:0x1C] == bytes([0x0C, 0, 0, 0, 0, 0, 0, 0]):
        seen.append("BAR1's register reads 0000000c 00000000: 64-bit prefetchable, never assigned")
    return _why_no_address(report, gpu, seen)


def _refused(report: HostReport, gpu: PciDevice) -> str | None:
    """The driver's own words about a BAR1 of 0 MiB."""
    events = report.kernel_log.boot
    for event in () if isinstance(events, Unread) else events:
        if isinstance(event, InvalidBar) and event.address == gpu.address and event.bar == 1 and event.size_mib == 0:
            return f"NVRM: BAR1 is 0M @ {event.start:#x} (PCI:{event.address})"
    return None


def _why_no_address(report: HostReport, gpu: PciDevice, seen: list[str]) -> Ladder:
    windows = windows_above_4g(report, gpu.root_bus)
    no_space = _no_space(report, gpu)
    bus = "every root bus" if isinstance(gpu.root_bus, Unread) else f"root bus {gpu.root_bus}"
    cmdline = report.kernel.cmdline
    if not isinstance(cmdline, Unread) and any("nocrs" in word for word in cmdline):
        windows = Unread("pci=nocrs: the windows are not the firmware's")
    if isinstance(windows, Unread):
        seen.append(f"windows of {bus}: {windows.reason}")
        return Ladder("no-room", 4, (*seen, no_space)) if no_space else Ladder("no-address", 2, tuple(seen))
    if not windows:
        return Ladder("off", 3, (*seen, f"no window above 4 GiB on {bus}", *([no_space] if no_space else [])))
    largest = max(end - start + 1 for start, end in windows)
    needed = window_needed_bytes(report, gpu.root_bus)
    seen += [f"window of {bus}: {start:#x}-{end:#x} ({size_text(end - start + 1)})" for start, end in windows]
    if largest < needed:
        seen.append(f"the cards of {bus} need about {size_text(needed)}")
        return Ladder("too-small", 4, (*seen, *([no_space] if no_space else [])))
    narrow = _narrow_bridge(report, gpu)
    if narrow:
        return Ladder("bridge-32bit", 5, (*seen, narrow))
    if no_space:
        return Ladder("too-small", 4, (*seen, no_space))
    return Ladder("no-address", 2, tuple(seen))


def _no_space(report: HostReport, gpu: PciDevice) -> str | None:
    """The kernel's own words about missing room for this card or for a bridge above it."""
    events = report.kernel_log.boot
    path = () if isinstance(gpu.path, Unread) else gpu.path
    for event in () if isinstance(events, Unread) else events:
        if not isinstance(event, NoSpace) or event.size_bytes < GIB:
            continue
        if event.device is None or event.device == gpu.address or event.device in path or not path:
            return f"{event.device or 'kernel'}: no space for {event.what} of {size_text(event.size_bytes)}"
    return None


def _narrow_bridge(report: HostReport, gpu: PciDevice) -> str | None:
    """A bridge above the card whose prefetchable window is 32-bit."""
    for address in () if isinstance(gpu.path, Unread) else gpu.path:
        bridge = report.device(address)
        if bridge is None or isinstance(bridge.windows, Unread):
            continue
        for window in bridge.windows:
            if window.prefetchable and window.end and not (window.is_64bit and window.end >= FOUR_GIB):
                return f"bridge {address}: prefetchable window {window.start:#x}-{window.end:#x} is 32-bit"
    return None


def without_card(report: HostReport) -> Ladder:
    """What can be told when no card is known: the kernel's words about room (rung 4), then rung 6: hints."""
    events = () if isinstance(report.kernel_log.boot, Unread) else report.kernel_log.boot
    windows = windows_above_4g(report, Unread("no card"))
    spans = () if isinstance(windows, Unread) else windows
    told = [f"root bus window {start:#x}-{end:#x} ({size_text(end - start + 1)})" for start, end in spans]
    largest = max((end - start + 1 for start, end in spans), default=0)
    for event in events:
        if isinstance(event, NoSpace) and event.size_bytes >= GIB:
            words = f"{event.device or 'kernel'}: no space for {event.what} of {size_text(event.size_bytes)}"
            return Ladder("too-small" if 0 < largest < event.size_bytes else "no-room", 4, (words, *told))
    if 0 < largest < SMALLEST_WINDOW_BYTES:
        return Ladder("too-small", 4, (*told, f"the smallest V100 needs about {size_text(SMALLEST_WINDOW_BYTES)}"))
    bars = [
        (device.address, bar)
        for device in (() if isinstance(report.pci, Unread) else report.pci)
        for bar in (() if isinstance(device.bars, Unread) else device.bars)
        if bar.start >= FOUR_GIB
    ]
    high = [f"{address} BAR{bar.index} at {bar.start:#x}, size {size_text(bar.size_bytes)}" for address, bar in bars]
    if any(bar.size_bytes >= LARGE_BAR_BYTES for _, bar in bars):
        return Ladder("on", 1, tuple(high))
    if high or told:
        return Ladder("likely-on", 6, (*high[:4], *told))
    if isinstance(report.pci, Unread) and isinstance(windows, Unread):
        return Ladder("unread", 6, (f"PCI devices: {report.pci.reason}", f"windows: {windows.reason}"))
    return Ladder("unknown", 6, ("nothing lies above 4 GiB, and no card shows whether something could",))
