"""Commands for the steps of a driver change: the script of the steps goes with each, so that it is there and is this one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import cache
from importlib import resources

from laoka.facts.driver import FOLDER


@cache
def script() -> str:
    """The steps' shell text."""
    return (resources.files("laoka.operations") / "driver_steps.sh").read_text(encoding="utf-8")


def step(verb: str, *arguments: str) -> str:
    """A command that runs one step on the host."""
    words = " ".join(shlex.quote(word) for word in (verb, *arguments))
    file = f"{FOLDER}/steps.sh"
    # It is written only where it is another one, so that a step of the way back runs on a disk that is full.
    return (
        f'mkdir -p {FOLDER} && s={shlex.quote(script())} && {{ printf %s "$s" | cmp -s - {file} || '
        f'{{ printf %s "$s" > {file}.new && mv {file}.new {file}; }}; }} && sh {file} {words}'
    )


def step_as_unit(deadline_s: int, verb: str, *arguments: str) -> str:
    """The same as a unit of its own, which outlives the connection. It succeeds; how the step ended is told by the fact Said."""
    return step("unit", str(deadline_s), verb, *arguments)


def noted(name: str, command: str) -> str:
    """A command that succeeds however it ends; that, and its words, are told by the fact Said, as those of a step."""
    path = f"{FOLDER}/change/{name}"
    return f"mkdir -p {FOLDER}/change; rm -f {path}.status; {{ {command}; }} >{path}.log 2>&1; echo $? >{path}.status || true"


def quietly(command: str, complaint: str, log: str, lines: int = 8) -> str:
    """A command whose words go to a file; when it fails, a complaint and its last lines are told."""
    folder = log.rsplit("/", 1)[0]
    told = f"{{ echo {shlex.quote(complaint)} >&2; tail -n {lines} {log} >&2; exit 1; }}"
    return f"mkdir -p {folder}; {{ {command}; }} >{log} 2>&1 || {told}"


def install(first: Sequence[str], packages: Sequence[str], remove: Sequence[str]) -> tuple[str, ...]:
    """Verb and arguments that install packages, `first` before all others, and remove some."""
    return ("install", *first, "--", *packages, *(f"{name}-" for name in remove))
