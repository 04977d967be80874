"""The unit sensor: is the served model's unit up, and did systemd have to restart it?"""

from __future__ import annotations

from dataclasses import dataclass

from laoka.agent.signals import Reading, Signal
from laoka.process import Completed, run
from laoka.serving.failure import FINAL_STATUS

PROPERTIES = ("LoadState", "ActiveState", "SubState", "Result", "NRestarts", "ExecMainStatus")
DEADLINE_S = 5.0
DOWN_LOOKS = 2
"""A restart passes through "inactive" for a moment: only what is down twice in a row is down."""


@dataclass(frozen=True)
class UnitState:
    """What systemd says of a unit. `fault` is not empty when it could not be asked."""

    load: str = ""
    active: str = ""
    sub: str = ""
    result: str = ""
    restarts: int | None = None
    status: int | None = None
    """The exit status of its main process."""
    fault: str = ""

    @property
    def final(self) -> bool:
        """It ended with the status after which systemd leaves it alone (RestartPreventExitStatus in the unit): what it was told
        to run can't run, and a restart changes nothing about that.
        """
        return self.active == "failed" and self.result == "exit-code" and self.status == FINAL_STATUS


@dataclass(frozen=True)
class UnitMemory:
    """What the judgement of the next look needs: how often it was down in a row, the restarts counted so far, and whether it is
    on its way up after one.
    """

    down_looks: int = 0
    restarts: int | None = None
    restarting: bool = False


def read_unit(unit: str) -> UnitState:
    """Ask systemd, with a deadline."""
    return parse_show(run(["systemctl", "show", unit, f"--property={','.join(PROPERTIES)}"], deadline_s=DEADLINE_S))


def parse_show(done: Completed) -> UnitState:
    """The answer of `systemctl show`."""
    if not done.ok:
        return UnitState(fault=f"systemctl show: {done.last_line()}")
    values = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    if "ActiveState" not in values:
        return UnitState(fault="systemctl show: no ActiveState in its answer")
    return UnitState(
        values.get("LoadState", ""),
        values["ActiveState"],
        values.get("SubState", ""),
        values.get("Result", ""),
        _count(values.get("NRestarts", "")),
        _count(values.get("ExecMainStatus", "")),
    )


def _count(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() else None


def judge(unit: str, state: UnitState, memory: UnitMemory) -> tuple[Reading, UnitMemory]:
    """Signals: unit_down (failed, not installed, or inactive twice in a row), unit_restarted (systemd restarted it, until it is
    up again).
    """
    facts = {"unit": unit, "active": state.active, "sub": state.sub, "result": state.result, "restarts": state.restarts}
    facts |= {"final": state.final}
    if state.fault:
        return Reading("unit", "unknown", detail=state.fault, facts=facts), memory
    shown = "not installed" if state.load == "not-found" else f"{state.active} ({state.sub})"
    values: dict[str, str | int | float] = {"unit": unit, "state": shown, "result": state.result or "?"}
    down_looks = memory.down_looks + 1 if state.active in ("inactive", "failed") else 0
    signals = []
    if state.active == "failed" or down_looks >= DOWN_LOOKS:
        signals.append(Signal("unit_down", "unit", subject=unit, seen=f"{unit}: {shown}", values=values))
    # systemd counts from zero again when somebody starts or stops the unit by hand.
    again = memory.restarts is not None and state.restarts is not None and state.restarts > memory.restarts
    restarting = again or (memory.restarting and state.active != "active")
    if restarting:
        values = {"unit": unit, "count": state.restarts or 0}
        seen = f"{unit}: restarted by systemd, {shown}"
        signals.append(Signal("unit_restarted", "unit", subject=unit, seen=seen, values=values))
    after = UnitMemory(down_looks, state.restarts, restarting)
    if signals:
        return Reading("unit", "bad", tuple(signals), f"{unit}: {shown}", facts), after
    if state.active == "active":
        return Reading("unit", "ok", (), f"{unit}: {shown}", facts), after
    return Reading("unit", "unknown", (), f"{unit}: {shown}: on its way", facts), after
