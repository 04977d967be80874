"""The lock that a deploy holds on a host, as it lies there, and whether its run is still under way. Pure.

The file's first line is a line of the ledger without an end. The second one is `boot pid ticks run taken`: the boot in which it
was taken, the process on the host that the run lives by (- where it has none there) and when that started, in ticks since the
boot, the run's id, and when it was taken. A third one, `reboot FROM UNTIL`, is left by a run that is about to reboot the host
itself. Times are Unix seconds by the host's own clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ALONE_S = 3600
"""How long a lock counts whose run has no process on the host (pyinfra's @docker): nothing tells that it ended."""

Stale = Literal["boot", "late", "gone", "old"]
"""Why nobody holds a lock: the host has booted since, and its run announced no reboot; the reboot that it announced took longer
than it gave it; the run's process is gone; a lock without a process is too old."""


@dataclass(frozen=True)
class Owner:
    """The host when its lock was read: its boot, when the lock's process started (empty: there is none), its clock."""

    boot: str
    ticks: str
    now_s: int


@dataclass(frozen=True)
class LockFile:
    """The second and third line of the lock."""

    boot: str
    pid: str
    ticks: str
    run: str
    taken_s: int
    reboot_s: tuple[int, int] | None = None


def read_lock(lines: Sequence[str]) -> LockFile | None:
    """The lock out of the file's lines; None for one that is damaged, which holds nobody up."""
    try:
        boot, pid, ticks, run, taken = lines[1].split()
        reboot = None
        if len(lines) > 2:
            word, since, until = lines[2].split()
            reboot = (int(since), int(until)) if word == "reboot" else None
        return LockFile(boot, pid, ticks, run, int(taken), reboot)
    except (IndexError, ValueError):
        return None


def read_owner(line: str) -> Owner | None:
    """`boot now [ticks]`, as the host said it beside the lock; None for what is none."""
    boot, _, rest = line.strip().partition(" ")
    now, _, ticks = rest.partition(" ")
    return Owner(boot, ticks.strip(), int(now)) if boot and now.isdecimal() else None


def stale(lock: LockFile, owner: Owner) -> Stale | None:
    """Why the run that took a lock is over; None while it may be under way.

    A clock that was put back makes a span end, never last: a lock that is wrongly free is told, one that is wrongly held stops a
    fleet.
    """
    announced = lock.reboot_s is not None
    if lock.reboot_s is not None and lock.reboot_s[0] <= owner.now_s < lock.reboot_s[1]:
        return None
    if lock.boot != owner.boot:
        return "late" if announced else "boot"
    if lock.pid == "-":
        return None if 0 <= owner.now_s - lock.taken_s < ALONE_S else "old"
    return None if owner.ticks and owner.ticks == lock.ticks else "gone"
