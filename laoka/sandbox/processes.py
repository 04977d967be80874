"""Background processes of the sandbox: started in a session of their own, recorded, and ended by that record only."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessRecord:
    """A process we started. `start_ticks` (field 22 of /proc/PID/stat) tells it from a later one with the same id."""

    pid: int
    start_ticks: int


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def start(argv: Sequence[str], log: Path) -> ProcessRecord:
    """Start a program in the background, its output appended to `log`. Errors: OSError."""
    with log.open("ab") as stream:
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True)
    return ProcessRecord(child.pid, start_ticks(child.pid) or 0)


def alive(record: ProcessRecord) -> bool:
    """Whether the recorded process still runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{record.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z" and start_ticks(record.pid) == record.start_ticks


def end(record: ProcessRecord, deadline_s: float = 5) -> None:
    """End the recorded process and its process group; nothing is sent to anything else."""
    if start_ticks(record.pid) != record.start_ticks:
        return
    try:
        os.killpg(record.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    until = time.monotonic() + deadline_s
    while alive(record) and time.monotonic() < until:
        time.sleep(0.02)
    with suppress(ChildProcessError):  # one that an earlier command started is init's to collect
        os.waitpid(record.pid, os.WNOHANG)
