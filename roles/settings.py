"""How a role's typed settings are read from the inventory, and how a wrong key or value is told in one line."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pyinfra.api.exceptions import DeployError
from pyinfra.api.host import Host

# What pyinfra itself understands in host data, besides its global arguments (they start with "_").
PYINFRA_KEYS = ("ssh_", "docker_", "chroot_", "local_")

S = TypeVar("S", bound="RoleSettings")


class InventoryError(DeployError):
    """An inventory says something that laoka can't follow; each line names file, host and key, and what to write instead."""


class RoleSettings(BaseModel):
    """Base of every role's settings: frozen, typed, filled from flat inventory keys of the same names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def of(cls: type[S], host: Host) -> S:
        """The settings of one host. Errors: InventoryError; `check_host` at the head of each deploy finds it earlier."""
        data = data_of(host)
        try:
            return cls(**{key: data[key] for key in cls.model_fields if key in data})
        except ValidationError as error:
            raise InventoryError("; ".join(_validation_lines(host.name, cls, error, ()))) from None


def data_of(host: Host) -> dict[str, Any]:
    """All data that a host has: its own over its groups'."""
    data: dict[str, Any] = host.data.dict()  # type: ignore[no-untyped-call]
    return data


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


def faults(name: str, data: Mapping[str, Any], settings: Sequence[type[RoleSettings]], files: Sequence[Path]) -> list[str]:
    """All that is wrong with one host's data, a line each; empty when nothing is.

    Arguments: `files` are searched for the line where a key stands, so that the message can name it.
    """
    known = {key for cls in settings for key in cls.model_fields}
    lines = []
    for key, close in unknown_keys(data, known):
        hint = f"did you mean {close}?" if close else "no setting has a name like it; docs/inventory.md lists them all"
        lines.append(f"{_place(key, files)}host {name}: unknown key {key}: {hint}")
    for cls in settings:
        try:
            cls(**{key: data[key] for key in cls.model_fields if key in data})
        except ValidationError as error:
            lines += _validation_lines(name, cls, error, files)
    return lines


def inventory_files(argv: Sequence[str]) -> tuple[Path, ...]:
    """The inventory named on pyinfra's command line, and the group data beside it."""
    for word in argv[1:]:
        path = Path(word)
        if path.suffix == ".py" and path.is_file():
            return (path, *sorted((path.parent / "group_data").glob("*.py")))
    return ()


def check_host(host: Host, settings: Sequence[type[RoleSettings]]) -> None:
    """Stop the run before anything changed when the inventory is wrong for this host. Errors: InventoryError."""
    found = faults(host.name, data_of(host), settings, inventory_files(sys.argv))
    if found:
        raise InventoryError("; ".join(found))


def _place(key: str, files: Sequence[Path]) -> str:
    pattern = re.compile(rf"""(^\s*{re.escape(key)}\s*=|["']{re.escape(key)}["']\s*:)""")
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if pattern.search(line):
                return f"{path}:{number}: "
    return ""


def _validation_lines(name: str, cls: type[RoleSettings], error: ValidationError, files: Sequence[Path]) -> list[str]:
    nested = [key for part in cls.model_json_schema().get("$defs", {}).values() for key in part.get("properties", {})]
    lines = []
    for item in error.errors():
        place = _place(str(item["loc"][0]), files)
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            close = difflib.get_close_matches(str(item["loc"][-1]), nested, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(nested)}"
            lines.append(f"{place}host {name}: unknown key {key}: {hint}")
            continue
        # A whole entry is not shown: it may hold a secret.
        shown = "{...}" if isinstance(item.get("input"), Mapping) else repr(item.get("input"))
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        lines.append(f"{place}host {name}: {key} = {shown}: {item['msg']}")
    return lines
