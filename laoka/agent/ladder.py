"""The recovery ladder: what an incident's class, its evidence and what was tried before allow as the next step. Pure.

The steps stand in one order, mildest first, and a class has some of them. Each is tried once for an incident (an engine is
restarted twice), each has a bound for a day, and reboots of any kind share the bound of the inventory. A "day" is 24 hours of the
watchdog's own running time: a clock that jumps, or a board without a battery, can't make room for one more reboot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from laoka.agent.signals import LOSSES

Policy = Literal["observe", "engine-only", "full"]
Step = Literal[
    "apply_caps",
    "restart_engine",
    "stop_users",
    "gpu_reset",
    "module_reload",
    "remove_rescan",
    "bus_reset",
    "reboot",
    "cold_cycle",
    "fence",
    "start_engine",
]
Mode = Literal["nothing", "wait", "act", "blocked", "gave_up"]
"""`blocked`: there are steps, but policy or bounds keep all that are left from being taken."""

DAY_S = 24 * 3600.0
MILD: frozenset[Step] = frozenset({"apply_caps", "restart_engine"})
"""What policy engine-only allows: nothing that touches a card."""
REBOOTS: frozenset[Step] = frozenset({"reboot", "cold_cycle"})
_AROUND: frozenset[str] = frozenset({"stop_users", "start_engine"})
"""What only stands around the steps that heal."""
TRIES_PER_INCIDENT: Mapping[Step, int] = {"restart_engine": 2}
TRIES_PER_DAY: Mapping[Step, int] = {
    "apply_caps": 6,
    "restart_engine": 6,
    "gpu_reset": 3,
    "module_reload": 3,
    "remove_rescan": 3,
    "bus_reset": 2,
}
AGAIN_AFTER_INTERRUPTION = 1
"""A step during which the watchdog was killed may be tried once more: what it had done is not known."""

_LOST: tuple[Step, ...] = ("stop_users", "gpu_reset", "remove_rescan", "bus_reset", "reboot", "cold_cycle", "fence")
_RESET: tuple[Step, ...] = ("stop_users", "gpu_reset", "module_reload", "remove_rescan", "reboot", "cold_cycle", "fence")

OF_CLASS: Mapping[str, tuple[Step, ...]] = {
    "card_gone": _LOST,
    "off_bus": _LOST,
    "init_failed": ("stop_users", "module_reload", "remove_rescan", "bus_reset", "reboot", "cold_cycle", "fence"),
    "ecc": ("stop_users", "gpu_reset", "module_reload", "reboot", "start_engine"),
    "driver_mismatch": ("stop_users", "module_reload", "reboot", "start_engine"),
    "driver_missing": ("module_reload", "reboot"),
    # A hung NVML hangs a reset and a reload as well.
    "nvml_hung": ("stop_users", "reboot", "cold_cycle", "start_engine"),
    "power": ("stop_users", "fence"),
    "power_cap": ("apply_caps",),
    "engine_dead": ("restart_engine",),
    "engine_stuck": ("restart_engine",),
    "engine_garbage": ("restart_engine",),
}
"""Classes that are missing here need a person, or nothing: heat, link, another card than expected, a full disk."""

OF_ACTION: Mapping[str, tuple[Step, ...]] = {
    "reset": _RESET,
    # A halted microcontroller hangs the reset (Xid 62), and a warm reboot keeps standby power on the card.
    "cold_cycle": ("stop_users", "cold_cycle", "reboot", "fence"),
    "reload_driver": ("stop_users", "gpu_reset", "module_reload", "reboot", "start_engine"),
    "replace": ("stop_users", "fence"),
    "check_power": ("stop_users", "fence"),
    "restart_app": ("restart_engine",),
}
"""By the action of the Xid that an incident is called after, where its class is one of an Xid's own."""
_BY_ACTION = frozenset({"ecc", "power", "xid_application", "xid_other"})


@dataclass(frozen=True)
class Rules:
    """What the inventory allows."""

    policy: Policy = "engine-only"
    reboot: bool = False
    """Reboots need opting in, even under policy full."""
    reboots_per_day: int = 1
    power_cycle: bool = False
    """A command is known that cuts the power for a while."""
    engine: bool = True
    """A unit of the served model is watched."""
    act_after_s: float = 15.0
    """A card that comes back by itself does it within seconds; and NVML takes its time after a start."""


@dataclass(frozen=True)
class CardState:
    """A card of an incident. `alive`: its configuration space is not all ones; `answers`: NVML lists it and it is not lost."""

    bdf: str
    listed: bool = False
    alive: bool = False
    answers: bool = False
    fenced: bool = False

    @property
    def lost(self) -> bool:
        return not (self.listed and self.alive and self.answers)


@dataclass(frozen=True)
class Case:
    """An incident as the ladder sees it.

    `active`: a condition holds now. `standing_s`: how long, by the monotonic clock. `action`: that of the Xid it is called
    after, where it is called after one. `engine_ok`: the served model answers.
    """

    incident: str
    incident_class: str
    cards: tuple[CardState, ...] = ()
    active: bool = True
    standing_s: float = 1e9
    action: str = ""
    engine_ok: bool = False
    engine_stopped: bool = False
    """The unit is down because somebody stopped it, or because too few cards are left."""
    engine_starting: bool = False
    """The unit is on its way up: it has a start deadline of its own, and another restart would only begin anew."""
    engine_final: bool = False
    """What the unit was told to run can't run: it ended with the status after which systemd leaves it alone."""
    engine_looked_at: bool = True
    """Its sensors have looked since the watchdog started: what an earlier run saw may be long over."""
    checking: bool = False
    """A step has just said that all is back, and not every sensor has looked again since."""
    drill: bool = False


@dataclass(frozen=True)
class Attempt:
    """A step that was begun. `outcome` is empty while it runs; "interrupted" when the watchdog was killed during it.

    `at_run_s`: the watchdog's own running time when it began.
    """

    number: int
    incident: str
    step: str
    at_run_s: float
    outcome: str = ""
    detail: str = ""
    drill: bool = False

    @property
    def running(self) -> bool:
        return not self.outcome

    @property
    def interrupted(self) -> bool:
        return self.outcome == "interrupted"


@dataclass(frozen=True)
class Rung:
    """A step of a ladder and what keeps it from being taken; "": nothing, "done": it was tried."""

    step: Step
    hindrance: str = ""


@dataclass(frozen=True)
class Decision:
    """What comes next for an incident. `rungs` is the whole ladder; `reason` why nothing is done, where nothing is."""

    mode: Mode
    step: Step | None = None
    reason: str = ""
    rungs: tuple[Rung, ...] = ()


ENGINE_ACT_AFTER_S = 0.0
"""An engine was judged twice before it is called dead or frozen."""


def ladder(case: Case) -> tuple[Step, ...]:
    """The steps of a case, mildest first; none when it is a person's."""
    if case.incident_class in _BY_ACTION and case.action:
        steps = OF_ACTION.get(case.action, ())
    else:
        steps = OF_CLASS.get(case.incident_class, ())
    if not case.cards:
        steps = tuple(step for step in steps if step not in ("gpu_reset", "remove_rescan", "bus_reset", "fence"))
    return steps


def decide(case: Case, rules: Rules, attempts: Sequence[Attempt], now_run_s: float) -> Decision:
    """The next step of a case.

    Arguments: `attempts` are those of the last day and of this incident, of all incidents; `now_run_s` the watchdog's running time.
    """
    steps = ladder(case)
    mine = [attempt for attempt in attempts if attempt.incident == case.incident]
    rungs = tuple(Rung(step, hindrance(step, case, rules, attempts, now_run_s)) for step in steps)
    if not rungs:
        return Decision("nothing", reason="person")
    if any(attempt.running for attempt in attempts if attempt.drill == case.drill):
        return Decision("wait", reason="running", rungs=rungs)
    if case.checking:
        return Decision("wait", reason="recovered", rungs=rungs)
    if any(attempt.outcome == "recovered" for attempt in mine) and not case.active:
        return Decision("nothing", reason="recovered", rungs=rungs)
    if not case.active and not _of_event(case):
        return Decision("nothing", reason="over", rungs=rungs)
    if case.incident_class == "xid_application" and case.engine_ok:
        return Decision("nothing", reason="engine_ok", rungs=rungs)
    fenced = any(attempt.step == "fence" and attempt.outcome for attempt in mine if not attempt.interrupted)
    if fenced or (case.cards and all(card.fenced for card in case.cards)):
        return Decision("gave_up", reason="fenced", rungs=rungs)
    if steps[0] == "restart_engine" and case.engine_stopped:
        return Decision("nothing", reason="stopped", rungs=rungs)
    if steps[0] == "restart_engine" and case.engine_final and not case.drill:
        return Decision("gave_up", reason="final", rungs=rungs)
    if steps[0] == "restart_engine" and case.engine_starting and not case.drill:
        return Decision("wait", reason="starting", rungs=rungs)
    if steps[0] == "restart_engine" and not case.engine_looked_at and not case.drill:
        return Decision("wait", reason="standing", rungs=rungs)
    wait_s = ENGINE_ACT_AFTER_S if steps[0] == "restart_engine" else rules.act_after_s
    following = next((rung.step for rung in rungs if not rung.hindrance), None)
    if following is None:
        hindrances = {rung.hindrance for rung in rungs} - {"done", "needless"}
        tried = [attempt for attempt in mine if attempt.step not in _AROUND]
        if "policy" in hindrances or not tried:
            return Decision("blocked", reason=_weightiest(hindrances), rungs=rungs)
        return Decision("gave_up", reason=_weightiest(hindrances) or "tried_all", rungs=rungs)
    if following == "stop_users" and not any(not rung.hindrance for rung in rungs if rung.step not in _AROUND):
        # Stopping alone heals nothing.
        hindrances = {rung.hindrance for rung in rungs if rung.hindrance} - {"done", "needless"}
        return Decision("blocked", reason=_weightiest(hindrances) or "policy", rungs=rungs)
    if case.standing_s < wait_s and not case.drill:
        return Decision("wait", following, "standing", rungs)
    return Decision("act", following, rungs=rungs)


def _of_event(case: Case) -> bool:
    """True where one record of the log is enough: the card says that it needs a reset, though nothing lasting is seen."""
    return case.incident_class in _BY_ACTION and case.action in ("reset", "cold_cycle", "reload_driver", "replace", "check_power")


def _weightiest(hindrances: set[str]) -> str:
    order = ("policy", "no_reboot", "reboots_per_day", "no_power_cycle", "per_day", "does_not_answer", "no_engine")
    return next((name for name in order if name in hindrances), "")


def hindrance(step: Step, case: Case, rules: Rules, attempts: Sequence[Attempt], now_run_s: float) -> str:
    """What keeps a step from being taken now; "" when nothing does."""
    mine = [attempt for attempt in attempts if attempt.incident == case.incident and attempt.step == step]
    interrupted = sum(attempt.interrupted for attempt in mine)
    allowed = TRIES_PER_INCIDENT.get(step, 1) + min(interrupted, AGAIN_AFTER_INTERRUPTION)
    if len(mine) >= allowed:
        return "done"
    if rules.policy == "observe" or (rules.policy == "engine-only" and step not in MILD):
        return "policy"
    if step == "start_engine" and not any(item.step == "stop_users" for item in attempts if item.incident == case.incident):
        return "needless"
    if step in ("restart_engine", "stop_users") and not rules.engine:
        return "needless" if step == "stop_users" else "no_engine"
    if step == "gpu_reset" and not all(card.alive and card.answers for card in case.cards):
        return "does_not_answer"
    if step in REBOOTS and not rules.reboot:
        return "no_reboot"
    if step == "cold_cycle" and not rules.power_cycle:
        return "no_power_cycle"
    if case.drill:
        return ""
    lately = [attempt for attempt in attempts if not attempt.drill and now_run_s - attempt.at_run_s < DAY_S]
    if step in REBOOTS and sum(attempt.step in REBOOTS for attempt in lately) >= rules.reboots_per_day:
        return "reboots_per_day"
    if step in TRIES_PER_DAY and sum(attempt.step == step for attempt in lately) >= TRIES_PER_DAY[step]:
        return "per_day"
    return ""


def worst_first(case: Case) -> tuple[bool, bool]:
    """A key that puts lost cards before everything else, and engines last: a restart is useless while a card is lost."""
    return (case.incident_class not in LOSSES, case.incident_class.startswith("engine_"))
