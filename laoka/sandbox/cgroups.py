"""A control group of its own for each throw-away host.

systemd-nspawn with --keep-unit puts the groups of a host below the group that it was started in. Hosts started from one session
would then share /system.slice: a systemd that clears a unit's group finds processes of another host there, and gives up.
"""

from __future__ import annotations

import os
from pathlib import Path

from laoka.sandbox.lab import HostFolder


def unified_root(mounts: str) -> Path | None:
    """Where the unified hierarchy is mounted, by /proc/self/mounts; None when it is not."""
    for line in mounts.splitlines():
        words = line.split()
        if len(words) > 2 and words[2] == "cgroup2":
            return Path(words[1])
    return None


def folder_of(machine: str) -> Path | None:
    """The group of one host; None on a machine without the unified hierarchy."""
    root = unified_root(Path("/proc/self/mounts").read_text())
    return root / f"laoka-{machine}" if root else None


def enter(machine: str) -> None:
    """Move this process into the host's group. Errors: OSError."""
    folder = folder_of(machine)
    if folder is not None:
        folder.mkdir(exist_ok=True)
        (folder / "cgroup.procs").write_text(str(os.getpid()))


def remove(host: HostFolder) -> None:
    """Remove the group of a host that has ended; one that still has a process stays."""
    top = folder_of(host.machine)
    if top is None or not top.is_dir():
        return
    for path in sorted((item for item in top.rglob("*") if item.is_dir()), key=lambda item: -len(item.parts)):
        _rmdir(path)
    _rmdir(top)


def _rmdir(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        return  # a process on its way out is still in it: the next `down` finds it empty
