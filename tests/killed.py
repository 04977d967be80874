"""pyinfra, killed where a test wants it: what a lost laptop does to a run.

`python -m tests.killed NAME#3 ARGUMENT...` ends with SIGKILL when the third command of the operation NAME is about to start.

`python -m tests.killed POINTS.jsonl INSIDE ARGUMENT...` ends so at the first point that the file does not have yet, and adds it.
Points are the first command of each operation that has one, and of the operation INSIDE every command. Called again and again it
is killed once at each point that a run comes to; a run that comes to no new one goes to its end. None can be forgotten in a list.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyinfra.api.command import FileUploadCommand, FunctionCommand, PyinfraCommand, StringCommand
from pyinfra_cli.main import main

from laoka.facts.driver import FOLDER

# What the commands around a reboot are called, by what only they have in them.
OF_A_REBOOT = {
    "no reboot was made": "announce_reboot", "systemctl reboot": "reboot", "is-system-running": "units_up",
    "it has booted, and this run stops here": "after_reboot",
}  # fmt: skip
# (name of the operation with those of its deploys, how many of its commands began, the command) -> whether the run ends here.
Ends = Callable[[str, int, PyinfraCommand], bool]


def at_command(where: str) -> Ends:
    """At a command of an operation: NAME#3."""
    wanted, _, number = where.rpartition("#")
    return lambda name, count, _: name == wanted and count == int(number)


def at_new_point(file: Path, inside: str) -> Ends:
    """At the first point that is not in the file, which has it then."""
    known = file.read_text(encoding="utf-8").splitlines() if file.exists() else []

    def ends(name: str, count: int, command: PyinfraCommand) -> bool:
        if count > 1 and name != inside:
            return False
        point = json.dumps([name, step_of(command) if name == inside else ""])
        if point in known:
            return False
        with file.open("a", encoding="utf-8") as points:
            points.write(f"{point}\n")
        return True

    return ends


def step_of(command: PyinfraCommand) -> str:
    """What a command is called: the step of a driver change by its verb, a function by its name, others by their text."""
    if isinstance(command, FunctionCommand):
        return str(command.function.__name__)
    step = re.search(rf"sh {re.escape(FOLDER)}/steps\.sh (?:unit \d+ )?(\w+)", str(command))
    return step[1] if step else next((name for sign, name in OF_A_REBOOT.items() if sign in str(command)), str(command))


def counted(execute: Callable[..., Any], begun: Counter[str], ends: Ends) -> Callable[..., Any]:
    def run(self: PyinfraCommand, state: Any, host: Any, *arguments: Any) -> Any:
        operation = host.executing_op_hash
        if operation:
            begun[operation] += 1
            (name,) = state.get_op_meta(operation).names
            if ends(name, begun[operation], self):
                os.kill(os.getpid(), signal.SIGKILL)
        return execute(self, state, host, *arguments)

    return run


if __name__ == "__main__":
    if "#" in sys.argv[1]:
        chosen, rest = at_command(sys.argv[1]), sys.argv[2:]
    else:
        chosen, rest = at_new_point(Path(sys.argv[1]), sys.argv[2]), sys.argv[3:]
    counts: Counter[str] = Counter()
    for kind in (StringCommand, FunctionCommand, FileUploadCommand):
        kind.execute = counted(kind.execute, counts, chosen)  # type: ignore[attr-defined]
    sys.argv = ["pyinfra", *rest]
    main()
