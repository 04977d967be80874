"""A pyinfra inventory as plain values: hosts, their groups and their data, loaded by pyinfra's own loader.

pyinfra's command line patches sockets and threads of the process that imports it, and an inventory is somebody's program:
both happen in a child (`python -m laoka.fleet.inventory FILE`), which answers in JSON.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laoka.process import run

DEADLINE_S = 60
MAX_OUTPUT_BYTES = 64 * 1024 * 1024
HOSTS_AT_ONCE = 32
"""Hosts of a fleet that are read side by side."""


class InventoryUnread(ValueError):
    """An inventory that can't be loaded; the message is one line with the file and the reason."""


@dataclass(frozen=True)
class HostEntry:
    """One host of an inventory. `data` is what the host sees: its own over its groups' over group_data/all.py.

    Values are JSON's: a tuple has become a list, a path a text.
    """

    name: str
    groups: tuple[str, ...]
    data: Mapping[str, Any]


def load_inventory(path: str | Path) -> tuple[HostEntry, ...]:
    """Every host of an inventory file, in its order.

    The file is Python and is run, as `pyinfra FILE` runs it; what it prints goes nowhere.
    Errors: InventoryUnread for a file that is missing, fails, takes more than a minute, or has no host.
    """
    file = Path(path)
    if not file.is_file():
        raise InventoryUnread(f"{file}: there is no such inventory file")
    argv = [sys.executable, "-m", "laoka.fleet.inventory", str(file)]
    done = run(argv, deadline_s=DEADLINE_S, max_output_bytes=MAX_OUTPUT_BYTES)
    if not done.ok:
        reason = f"takes more than {DEADLINE_S} s" if done.timed_out else done.last_line()
        raise InventoryUnread(f"{file}: can't be loaded: {reason}")
    try:
        hosts = tuple(HostEntry(raw["name"], tuple(raw["groups"]), raw["data"]) for raw in json.loads(done.stdout))
    except (ValueError, KeyError, TypeError) as error:
        raise InventoryUnread(f"{file}: can't be loaded: its answer is not JSON ({type(error).__name__})") from None
    if not hosts:
        raise InventoryUnread(f"{file}: no host in it (a group is a list, or a tuple of a list and data, at the top level)")
    return hosts


def answer(path: str) -> str:
    """In the child: the inventory in JSON. Errors: whatever the file raises."""
    # paramiko asks for it where a `Match exec` of an ssh configuration runs, which nothing does here, and a fifth of all that is
    # imported here is its doing.
    sys.modules.setdefault("invoke", None)  # type: ignore[arg-type]
    from pyinfra.api.state import State
    from pyinfra.context import ctx_state
    from pyinfra_cli.inventory import make_inventory  # type: ignore[import-untyped]

    # The loader notes which file it runs in the state of the run; here there is no run.
    ctx_state.set(State())  # type: ignore[no-untyped-call]
    inventory = make_inventory(path, cwd=str(Path(path).resolve().parent))
    hosts = [{"name": host.name, "groups": sorted(host.groups), "data": host.data.dict()} for host in inventory]
    return json.dumps(hosts, default=str)


def line_of(error: BaseException, path: str) -> int | None:
    """The line of the inventory at which it was raised; None: not in there."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == Path(path).name]
    return lines[-1] if lines else None


def main() -> int:
    """Answer on what was stdout; everything that the inventory prints goes to stderr."""
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        told = answer(sys.argv[1])
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the file is somebody's program: it may raise anything
        error = getattr(error, "exception", None) or error
        reason = str(error).strip().splitlines()
        where = f"line {line}: " if (line := line_of(error, sys.argv[1])) else ""
        print(f"{where}{type(error).__name__}: {reason[0] if reason else 'no reason given'}", file=sys.stderr)
        return 1
    with os.fdopen(out, "w", encoding="utf-8") as stream:
        stream.write(told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
