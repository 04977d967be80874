"""/proc/iomem: which memory windows the firmware gave each PCI bus."""

from __future__ import annotations

import re
from dataclasses import dataclass

from laoka.host.unread import Maybe, Unread

_RANGE = re.compile(r"( *)([0-9a-f]{8,16})-([0-9a-f]{8,16}) : (.*)$")
_BUS = re.compile(r"PCI Bus ([0-9a-f]{4}:[0-9a-f]{2})$")


@dataclass(frozen=True)
class MemoryRange:
    """One line: both ends included, `depth` the nesting level, `owner` the text after the colon."""

    start: int
    end: int
    depth: int
    owner: str

    @property
    def size_bytes(self) -> int:
        return self.end - self.start + 1

    @property
    def bus(self) -> str | None:
        """`0000:00` of `PCI Bus 0000:00`, else None."""
        found = _BUS.match(self.owner)
        return found[1] if found else None


def read_iomem(text: str) -> Maybe[tuple[MemoryRange, ...]]:
    """The ranges in file order. Unread when there are none, or when all are zero: the kernel hides them from users."""
    ranges = tuple(
        MemoryRange(int(found[2], 16), int(found[3], 16), len(found[1]) // 2, found[4].strip())
        for line in text.splitlines()
        if (found := _RANGE.match(line))
    )
    if not ranges:
        return Unread("no memory range in it")
    if all(r.start == 0 and r.end == 0 for r in ranges):
        return Unread("the kernel shows the addresses to root only")
    return ranges


def root_windows(ranges: tuple[MemoryRange, ...]) -> dict[str, tuple[MemoryRange, ...]]:
    """The windows of each PCI bus that are not inside another range: those of root buses."""
    found: dict[str, list[MemoryRange]] = {}
    for item in ranges:
        if item.depth == 0 and item.bus:
            found.setdefault(item.bus, []).append(item)
    return {bus: tuple(windows) for bus, windows in found.items()}
