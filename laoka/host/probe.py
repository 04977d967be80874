"""The probe script that is shipped with laoka: what it is and how long it may take."""

from __future__ import annotations

from importlib import resources

# The script stops by itself before 10 s; the rest is for the way there and back.
DEADLINE_S = 10.0


def script() -> str:
    """The probe as text, for `sh -s` on standard input."""
    return (resources.files("laoka.host") / "probe.sh").read_text(encoding="utf-8")
