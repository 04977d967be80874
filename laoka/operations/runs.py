"""This run of pyinfra: its id, who runs it, and whether an earlier run of this machine is over."""

from __future__ import annotations

import fcntl
import getpass
import os
import socket
import time
import uuid
from functools import cache
from pathlib import Path

import platformdirs

KEPT_S = 30 * 86400
"""How long the mark of a run that is over stays."""


@cache
def run_id() -> str:
    """The id of this run of pyinfra, the same for all hosts and deploys of it. Its mark on this machine says that it lives."""
    run = uuid.uuid4().hex
    hold_mark(marks(), run)
    return run


@cache
def began_s() -> int:
    """When this run came to its first host, Unix time in seconds."""
    return round(time.time())


@cache
def operator() -> str:
    """Who runs this: user@machine."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = f"uid-{os.getuid()}"
    return f"{name}@{socket.gethostname()}"


def marks() -> Path:
    """The folder of this user's marks."""
    return platformdirs.user_state_path("laoka") / "runs"


def hold_mark(folder: Path, run: str) -> int | None:
    """Leave a file that is locked until this process ends, however it ends; remove old ones. Returns its descriptor.

    None where it can't be written: others then only can't see from here that the run is over.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            if time.time() - old.stat().st_mtime > KEPT_S:
                old.unlink(missing_ok=True)
        descriptor = os.open(folder / run, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return None
    return descriptor


def is_over(folder: Path, run: str) -> bool:
    """Whether a run of this machine is over for sure: it left its mark here, and holds it no more. False: not known."""
    if not run.isalnum():
        return False
    try:
        with (folder / run).open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # no such mark, or it is held
        return False
    return True
