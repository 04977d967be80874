"""A served unit is changed on one host after the other: one that fails stops the rollout, those after it stay as they are."""

from __future__ import annotations

import shlex

from pyinfra.api.operation import operation
from pyinfra.context import host

from laoka.facts.system import MainPid, SameFiles, UnitRuns
from laoka.operations.refusal import refusal
from laoka.operations.steps import Commands, failed_before
from laoka.serving.unit_config import stamp_of


@operation()
def start_unit(unit: str, config: list[str], command: str) -> Commands:
    """Start a unit that does not run, on all hosts at once: nobody is served by it yet. One that runs is left to `roll_unit`.

    + unit: name with its suffix
    + config: files and links that make up its configuration
    + command: the change on the host (laoka.serving.rollout)
    """
    runs = host.get_fact(UnitRuns, unit=unit, paths=config, stamp=str(stamp_of(unit)), test="true")
    if runs.active:
        host.noop(f"{unit} runs")
        return
    yield as_unit(unit, command)


@operation()
def roll_unit(unit: str, config: list[str], staged: list[list[str]], test: str, command: str) -> Commands:
    """Bring a unit that runs to what is on disk now; call it with _serial=True, so that one host is changed at a time.

    + unit: name with its suffix
    + config: files and links that make up its configuration; a change of any restarts the unit
    + staged: pairs of a new file and its place, which the command puts there; until then the unit runs on with the old ones
    + test: shell command that succeeds when the unit does its work; a unit that fails it is restarted
    + command: the change on the host (laoka.serving.rollout): drain, restart, gate, undrain, and the way back
    """
    runs = host.get_fact(UnitRuns, unit=unit, paths=config, stamp=str(stamp_of(unit)), test=test)
    if not runs.active:
        host.noop(f"{unit} is not running: starting it is not this operation's")
        return
    same = host.get_fact(SameFiles, pairs=staged)
    if same and runs.enabled and runs.config_sha256 == runs.running_sha256 and runs.works:
        host.noop(f"{unit} runs with the present configuration, and works")
        return
    failed = failed_before()
    if failed is not None:
        yield refusal([f"{host.name}: {unit} was not touched: the rollout stopped when {failed} failed"])
        return
    yield as_unit(unit, command)


@operation()
def stop_main(unit: str) -> Commands:
    """Stop a unit that has a process of its own; one that only stands for others has none.

    + unit: name with its suffix
    """
    if host.get_fact(MainPid, unit=unit):
        yield f"systemctl disable --now {shlex.quote(unit)} 2>&1"
    else:
        host.noop(f"{unit} has no process of its own")


def as_unit(unit: str, command: str) -> str:
    """A command as a unit of its own: a lost connection does not end it halfway, and a second one can't start beside it."""
    name = f"laoka-roll-{unit.removesuffix('.service').replace('@', '-')}"
    return f"systemd-run --quiet --wait --pipe --collect --unit={shlex.quote(name)} {command}"
