"""What a unit is made of, as one hash: how a deploy and a switch on the host agree on whether it runs with what is on disk."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

STAMPS = "/var/lib/laoka/stamps"


def stamp_of(unit: str) -> Path:
    """Where the hash is noted that a unit last started well with; below it the paths that were hashed, one a line."""
    return Path(f"{STAMPS}/{unit}.config")


def config_hash_command(paths: Sequence[str]) -> str:
    """Shell text that prints one hash over files and over where links point; a missing path counts as such."""
    quoted = " ".join(shlex.quote(path) for path in paths)
    return (
        f'for p in {quoted}; do printf "%s " "$p"; '
        'if [ -L "$p" ]; then readlink -f "$p"; elif [ -f "$p" ]; then sha256sum < "$p"; else echo none; fi; '
        "done | sha256sum | cut -d ' ' -f 1"
    )
