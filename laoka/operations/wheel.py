"""Builds, on the operator's machine, the wheel of laoka that goes to the hosts."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from pathlib import Path

import platformdirs

import laoka
from laoka.process import ProcessError, run

SOURCE = Path(laoka.__file__).resolve().parent
PROJECT = SOURCE.parent


class WheelError(Exception):
    """No wheel of laoka can be made here; the message says why."""


def source_hash(folder: Path = SOURCE) -> str:
    """A hash over laoka's own files: the same sources give the same name on every machine."""
    digest = hashlib.sha256((PROJECT / "pyproject.toml").read_bytes() if (PROJECT / "pyproject.toml").exists() else b"")
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


@cache
def build() -> Path:
    """The wheel of the laoka that runs now; built once for each state of its sources.

    Errors: WheelError when laoka was not installed from its source folder, or hatchling fails.
    """
    if not (PROJECT / "pyproject.toml").exists():
        raise WheelError(
            f"laoka in {SOURCE} is not a source checkout, so its wheel for the hosts can't be built: "
            "clone the repository and run pyinfra from there"
        )
    folder = platformdirs.user_cache_path("laoka") / "wheels" / source_hash()
    found = sorted(folder.glob("*.whl"))
    if not found:
        try:
            argv = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
            run(argv, deadline_s=120, cwd=PROJECT, check=True)
        except ProcessError as error:
            raise WheelError(str(error)) from None
        found = sorted(folder.glob("*.whl"))
    return found[0]
