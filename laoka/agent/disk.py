"""The disk sensor: how much room is left where the watchdog and the system write."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from laoka.agent.signals import Reading, Signal

MB = 1000 * 1000


def read_free_mb(paths: tuple[str, ...]) -> dict[str, int | None]:
    """Free space of the file systems that hold `paths`, 10^6 bytes; None: could not be read."""
    found: dict[str, int | None] = {}
    for path in paths:
        try:
            found[path] = shutil.disk_usage(path).free // MB
        except OSError:
            found[path] = None
    return found


def judge(free_mb: Mapping[str, int | None], min_mb: int) -> Reading:
    """Signal: disk_full, one for each path with less than `min_mb` free."""
    signals = []
    for path, free in free_mb.items():
        if free is not None and free < min_mb:
            values: dict[str, str | int | float] = {"path": path, "free_mb": free, "min_mb": min_mb}
            signals.append(Signal("disk_full", "disk", subject=path, seen=f"{path}: {free} MB free", values=values))
    unread = [path for path, free in free_mb.items() if free is None]
    detail = ", ".join(f"{path}: {'not readable' if free is None else f'{free} MB free'}" for path, free in free_mb.items())
    facts = {"free_mb": dict(free_mb)}
    if signals:
        return Reading("disk", "bad", tuple(signals), detail, facts)
    return Reading("disk", "unknown" if unread else "ok", (), detail, facts)
