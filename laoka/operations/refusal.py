"""How a host is refused: one command that prints why and fails, so that pyinfra drops this host and only this one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def refusal(lines: Sequence[str]) -> str:
    """A command that prints `lines` to stderr and fails."""
    return f"printf '%s\\n' {' '.join(shlex.quote(line) for line in lines)} >&2; exit 1"
