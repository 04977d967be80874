"""The one place that starts other programs: an argument list, a deadline, a bounded output."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

TIMED_OUT_STATUS = 124
NOT_FOUND_STATUS = 127


@dataclass(frozen=True)
class Completed:
    """How a program ended.

    `status` is its exit status; 124 when the deadline passed (and the program's process group was killed),
    127 when the program is not installed, 128 + N when signal N ended it.
    `truncated` says that more than the allowed output was produced and the rest was dropped.
    """

    argv: tuple[str, ...]
    status: int
    stdout: str
    stderr: str
    timed_out: bool = False
    truncated: bool = False

    @property
    def ok(self) -> bool:
        """True when the program ran to its end and returned 0."""
        return self.status == 0

    def last_line(self) -> str:
        """The last non-empty line of stderr, or of stdout: what to show in a one-line error."""
        for stream in (self.stderr, self.stdout):
            lines = [line.strip() for line in stream.splitlines() if line.strip()]
            if lines:
                return lines[-1]
        return f"exit status {self.status}, no output"


class ProcessError(Exception):
    """A program that had to succeed did not; the message is one line and names the program and its last words."""

    def __init__(self, completed: Completed) -> None:
        self.completed = completed
        reason = "passed its deadline" if completed.timed_out else f"exit status {completed.status}"
        super().__init__(f"{' '.join(completed.argv[:4])}: {reason}: {completed.last_line()}")


def run(
    argv: Sequence[str],
    *,
    deadline_s: float,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    max_output_bytes: int = 4 * 1024 * 1024,
    check: bool = False,
    stop: threading.Event | None = None,
) -> Completed:
    """Run a program to its end.

    Arguments: `argv` the program and its arguments (never a shell line); `deadline_s` seconds until its whole
    process group is killed; `stdin` text given to it; `env` variables added to ours; `max_output_bytes` kept per stream;
    `stop` an event that ends it early, as its deadline would.
    A program stuck in an uninterruptible read (a wedged GPU driver does this) is abandoned after the kill.
    Errors: ProcessError when `check` and the program failed; nothing else is raised for a missing program (status 127).
    """
    argv = tuple(str(part) for part in argv)
    # Temporary files, not pipes: an abandoned child can then never block us, and neither can a flood of output.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as inp:
        inp.write(stdin.encode())
        inp.seek(0)
        try:
            child = subprocess.Popen(
                argv,
                stdin=inp,
                stdout=out,
                stderr=err,
                cwd=cwd,
                env=None if env is None else {**os.environ, **env},
                start_new_session=True,
            )
        except FileNotFoundError:
            completed = Completed(argv, NOT_FOUND_STATUS, "", f"{argv[0]}: not installed")
        except OSError as error:
            completed = Completed(argv, 126, "", f"{argv[0]}: {error.strerror}")
        else:
            timed_out = False
            try:
                status = _wait(child, deadline_s, stop)
            except subprocess.TimeoutExpired:
                timed_out, status = True, TIMED_OUT_STATUS
                _kill_group(child)
            except BaseException:
                _kill_group(child)
                raise
            stdout, cut_out = _read(out, max_output_bytes)
            stderr, cut_err = _read(err, max_output_bytes)
            if not timed_out and status < 0:
                status = 128 - status
            completed = Completed(argv, status, stdout, stderr, timed_out, cut_out or cut_err)
    if check and not completed.ok:
        raise ProcessError(completed)
    return completed


def _wait(child: subprocess.Popen[bytes], deadline_s: float, stop: threading.Event | None) -> int:
    if stop is None:
        return child.wait(deadline_s)
    end = time.monotonic() + deadline_s
    while not stop.is_set() and (left_s := end - time.monotonic()) > 0:
        try:
            return child.wait(min(0.2, left_s))
        except subprocess.TimeoutExpired:
            continue
    raise subprocess.TimeoutExpired(child.args, deadline_s)


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(1)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass  # already gone, or in D state: abandoned on purpose


def _read(stream: IO[bytes], limit: int) -> tuple[str, bool]:
    stream.seek(0)
    data = stream.read(limit + 1)
    return data[:limit].decode(errors="replace"), len(data) > limit
