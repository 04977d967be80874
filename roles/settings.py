"""How a role's typed settings are read from the inventory, and how a wrong key or value is told in one line."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pyinfra.api.exceptions import DeployError
from pyinfra.api.host import Host

from laoka.fleet.inventory import HostEntry
from laoka.fleet.keys import inventory_files, place, unknown_lines

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


def faults(name: str, data: Mapping[str, Any], settings: Sequence[type[RoleSettings]], files: Sequence[Path]) -> list[str]:
    """All that is wrong with one host's data, a line each; empty when nothing is.

    Arguments: `files` are searched for the line where a key stands, so that the message can name it.
    """
    known = {key for cls in settings for key in cls.model_fields}
    lines = list(unknown_lines([HostEntry(name, (), data)], known, files, "en"))
    for cls in settings:
        try:
            cls(**{key: data[key] for key in cls.model_fields if key in data})
        except ValidationError as error:
            lines += _validation_lines(name, cls, error, files)
    return lines


def _inventory_files(argv: Sequence[str]) -> tuple[Path, ...]:
    """The inventory named on pyinfra's command line, and the group data beside it."""
    for word in argv[1:]:
        path = Path(word)
        if path.suffix == ".py" and path.is_file():
            return inventory_files(path)
    return ()


def check_host(host: Host, settings: Sequence[type[RoleSettings]]) -> None:
    """Stop the run before anything changed when the inventory is wrong for this host. Errors: InventoryError."""
    found = faults(host.name, data_of(host), settings, _inventory_files(sys.argv))
    if found:
        raise InventoryError("; ".join(found))


def _validation_lines(name: str, cls: type[RoleSettings], error: ValidationError, files: Sequence[Path]) -> list[str]:
    nested = [key for part in cls.model_json_schema().get("$defs", {}).values() for key in part.get("properties", {})]
    lines = []
    for item in error.errors():
        where = place(str(item["loc"][0]), files)
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            close = difflib.get_close_matches(str(item["loc"][-1]), nested, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(nested)}"
            lines.append(f"{where}host {name}: unknown key {key}: {hint}")
            continue
        # A whole entry is not shown: it may hold a secret.
        shown = "{...}" if isinstance(item.get("input"), Mapping) else repr(item.get("input"))
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        lines.append(f"{where}host {name}: {key} = {shown}: {item['msg']}")
    return lines
