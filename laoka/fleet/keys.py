"""Keys of an inventory that nobody reads: which, where they stand, and what they were probably meant to be.

The keys that laoka reads are those of the roles' settings, which only a checkout has; inventory_keys.txt lists them for an
installed laoka (`python -m roles.reference` writes it, a test holds it).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from laoka.catalog.messages import Language, text
from laoka.fleet.inventory import HostEntry

PYINFRA_KEYS = ("ssh_", "docker_", "chroot_", "local_")
"""What pyinfra itself understands in host data, besides its global arguments (they start with "_")."""
HOSTS_NAMED = 3


@cache
def known_keys() -> frozenset[str]:
    """Every key that a role's settings have."""
    return frozenset((resources.files("laoka.fleet") / "inventory_keys.txt").read_text(encoding="utf-8").split())


def unknown_keys(data: Mapping[str, Any], known: Iterable[str]) -> tuple[tuple[str, str | None], ...]:
    """Keys of `data` that no role and not pyinfra knows, each with the known key that it resembles most, if any."""
    names = sorted(known)
    found = []
    for key in data:
        if key in names or key.startswith(("_", *PYINFRA_KEYS)):
            continue
        close = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
        found.append((key, close[0] if close else None))
    return tuple(found)


def unknown_lines(entries: Sequence[HostEntry], known: Iterable[str], files: Sequence[Path], lang: Language) -> tuple[str, ...]:
    """A line for each key that nobody reads, with the hosts that have it. Arguments: `files` as of `inventory_files`."""
    names = frozenset(known)
    hosts: dict[tuple[str, str | None], list[str]] = {}
    for entry in entries:
        for found in unknown_keys(entry.data, names):
            hosts.setdefault(found, []).append(entry.name)
    lines = []
    for (key, close), having in hosts.items():
        host = _named(having, lang)
        hint = text("inventory.close" if close else "inventory.none_close", lang, close=close)
        lines.append(text("inventory.unknown", lang, place=place(key, files), host=host, name=key, hint=hint))
    return tuple(lines)


def _is_port(value: Any) -> bool:
    return str(value).isdecimal() and 0 < int(value) < 65536


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and float(value) > 0
    except (TypeError, ValueError):
        return False


FORMS: Mapping[str, Callable[[Any], bool]] = {
    "ssh_port": _is_port,
    "expected_gpus": lambda value: isinstance(value, (list, tuple)) and all(isinstance(card, Mapping) for card in value),
    "power_limit_w": _is_number,
    "serve_flags": lambda value: isinstance(value, Mapping),
    "serve_instances": lambda value: isinstance(value, Mapping) and all(isinstance(one, Mapping) for one in value.values()),
}
"""The keys of which a command of ours reads more than a text: the roles' settings, which know all, are only in a checkout."""


def form_lines(entries: Sequence[HostEntry], files: Sequence[Path], lang: Language) -> tuple[str, ...]:
    """A line for each value that has not the form which its key has, once for all hosts that have it."""
    hosts: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        for key, fits in FORMS.items():
            value = entry.data.get(key)
            if value is not None and not fits(value):
                hosts.setdefault((key, repr(value)[:60]), []).append(entry.name)
    return tuple(
        text("inventory.wrong", lang, place=place(key, files), host=_named(having, lang), name=key, value=value,
             wanted=text(f"inventory.form.{key}", lang))
        for (key, value), having in hosts.items()
    )  # fmt: skip


def _named(hosts: Sequence[str], lang: Language) -> str:
    named, more = ", ".join(hosts[:HOSTS_NAMED]), len(hosts) - HOSTS_NAMED
    return named if more <= 0 else text("inventory.and_more", lang, hosts=named, count=more)


def inventory_files(inventory: str | Path) -> tuple[Path, ...]:
    """An inventory and the group data beside it."""
    path = Path(inventory)
    return (path, *sorted((path.parent / "group_data").glob("*.py")))


def place(key: str, files: Sequence[Path]) -> str:
    """`FILE:LINE: ` where a key stands, for the head of a message; empty when it is found in none of the files."""
    pattern = re.compile(rf"""(^\s*{re.escape(key)}\s*=|["']{re.escape(key)}["']\s*:)""")
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if pattern.search(line):
                return f"{path}:{number}: "
    return ""
