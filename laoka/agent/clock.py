"""The two clocks of one moment: the wall clock, which people and time servers set, and the monotonic one, which only runs on."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Now:
    """One moment on both clocks."""

    unix_s: float
    mono_s: float


def now() -> Now:
    """This moment."""
    return Now(time.time(), time.monotonic())
