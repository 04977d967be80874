"""The ladder's policy: which step comes next, which never, and that no bound can be got round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.agent import ladder
from laoka.agent.history import History
from laoka.agent.ladder import Attempt, CardState, Case, Decision, Rules, Step, decide
from laoka.agent.signals import SEVERITY_OF_CLASS
from laoka.catalog.messages import text

BDF = "0000:03:00.0"
GONE = Case("i1", "card_gone", (CardState(BDF),))
DEAD = Case("i1", "off_bus", (CardState(BDF, listed=True),))
FULL = Rules("full", reboot=True, reboots_per_day=1, power_cycle=True)


def walk(case: Case, rules: Rules, outcome: str = "failed", limit: int = 30) -> tuple[list[str], Decision]:
    """Take every step that is due, each with the same outcome; the steps, and the decision at the end."""
    attempts: list[Attempt] = []
    while (decision := decide(case, rules, attempts, 1000.0)).mode == "act":
        assert decision.step is not None and len(attempts) < limit
        attempts.append(Attempt(len(attempts), case.incident, decision.step, 1000.0, outcome))
    return [attempt.step for attempt in attempts], decision


def test_a_lost_card_goes_up_the_whole_ladder_in_order() -> None:
    steps, end = walk(GONE, FULL)
    assert steps == ["stop_users", "remove_rescan", "bus_reset", "reboot", "fence"]  # the one reboot of the day is used up
    assert (end.mode, end.reason) == ("gave_up", "fenced")
    steps, _ = walk(GONE, replace(FULL, reboots_per_day=2))
    assert steps == ["stop_users", "remove_rescan", "bus_reset", "reboot", "cold_cycle", "fence"]


def test_a_reset_only_where_the_card_still_answers() -> None:
    assert "gpu_reset" not in walk(DEAD, FULL)[0]
    answering = Case("i1", "xid_other", (CardState(BDF, True, True, True),), action="reset")
    assert walk(answering, FULL)[0][:2] == ["stop_users", "gpu_reset"]


@pytest.mark.parametrize("name", sorted(SEVERITY_OF_CLASS))
def test_engine_only_never_touches_a_card_and_observe_nothing(name: str) -> None:
    for action in ("", *ladder.OF_ACTION):
        case = Case("i1", name, (CardState(BDF),), action=action)
        assert set(walk(case, Rules("engine-only"))[0]) <= {"restart_engine", "apply_caps"}
        assert walk(case, Rules("observe"))[0] == []


def test_a_reboot_needs_opting_in() -> None:
    steps, _ = walk(GONE, replace(FULL, reboot=False))
    assert steps == ["stop_users", "remove_rescan", "bus_reset", "fence"]


def test_the_engine_is_restarted_twice_then_a_person_is_called() -> None:
    case = Case("i1", "engine_stuck")
    steps, end = walk(case, Rules("engine-only"))
    assert steps == ["restart_engine", "restart_engine"]
    assert (end.mode, end.reason) == ("gave_up", "tried_all")
    assert decide(replace(case, engine_stopped=True), Rules(), (), 0.0).reason == "stopped"


@pytest.mark.parametrize("incident_class", ["engine_dead", "engine_stuck", "engine_garbage"])
def test_an_engine_that_systemd_is_starting_is_not_restarted_on_its_way_up(incident_class: str) -> None:
    case = Case("i1", incident_class, engine_starting=True)
    decision = decide(case, Rules("engine-only"), (), 0.0)
    assert (decision.mode, decision.reason) == ("wait", "starting")
    assert decide(replace(case, engine_starting=False), Rules("engine-only"), (), 0.0).step == "restart_engine"


@pytest.mark.parametrize("incident_class", ["engine_dead", "engine_stuck"])
def test_an_engine_that_refuses_its_flags_is_a_persons(incident_class: str) -> None:
    decision = decide(Case("i1", incident_class, engine_final=True), Rules("full", reboot=True), (), 0.0)
    assert (decision.mode, decision.reason) == ("gave_up", "final")


def test_an_engine_is_not_restarted_for_what_an_earlier_run_of_the_watchdog_saw() -> None:
    case = Case("i1", "engine_dead", engine_looked_at=False)
    assert decide(case, Rules("engine-only"), (), 0.0).mode == "wait"
    assert decide(replace(case, engine_looked_at=True), Rules("engine-only"), (), 0.0).step == "restart_engine"


def test_an_engine_that_was_stopped_for_nothing_is_started_again() -> None:
    case = Case("i1", "driver_mismatch", (CardState(BDF, True, True),))
    steps, end = walk(case, replace(FULL, reboot=False))
    assert steps == ["stop_users", "module_reload", "start_engine"]
    assert end.mode == "gave_up"


def test_a_card_that_comes_back_by_itself_is_left_alone() -> None:
    assert decide(replace(GONE, standing_s=3.0), FULL, (), 0.0).mode == "wait"
    assert decide(replace(GONE, active=False), FULL, (), 0.0).mode == "nothing"


def test_one_step_at_a_time() -> None:
    running = (Attempt(1, "other", "remove_rescan", 0.0),)
    assert decide(GONE, FULL, running, 0.0).mode == "wait"


def test_an_interrupted_step_is_tried_once_more_and_a_reboot_is_counted_all_the_same() -> None:
    def seen(step: str, *outcomes: str) -> tuple[Attempt, ...]:
        before = (Attempt(0, "i1", "stop_users", 0.0, "done"),)
        return before + tuple(Attempt(number, "i1", step, 0.0, outcome) for number, outcome in enumerate(outcomes, 1))

    assert decide(GONE, FULL, seen("remove_rescan", "interrupted"), 1.0).step == "remove_rescan"
    assert decide(GONE, FULL, seen("remove_rescan", "interrupted", "interrupted"), 1.0).step == "bus_reset"
    tried = (
        *seen("remove_rescan", "failed"),
        Attempt(8, "i1", "bus_reset", 0.0, "failed"),
        Attempt(9, "i1", "reboot", 0.0, "interrupted"),
    )
    assert decide(GONE, FULL, tried, 1.0).step == "fence"


def test_reboots_of_other_incidents_count_for_a_day_of_running_time() -> None:
    other = (Attempt(1, "i0", "reboot", 100.0, "booted"),)
    reboot = next(rung for rung in decide(GONE, FULL, other, 100.0 + ladder.DAY_S - 1).rungs if rung.step == "reboot")
    assert reboot.hindrance == "reboots_per_day"
    reboot = next(rung for rung in decide(GONE, FULL, other, 100.0 + ladder.DAY_S + 1).rungs if rung.step == "reboot")
    assert reboot.hindrance == ""


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(SEVERITY_OF_CLASS)),
            st.sampled_from(["", *ladder.OF_ACTION]),
            st.sampled_from(["failed", "skipped", "timed_out", "interrupted", "booted"]),
            st.floats(0, 3600),
        ),
        max_size=25,
    ),
    st.integers(1, 3),
)
def test_whatever_happens_in_a_day_there_are_never_more_reboots_than_allowed(
    events: list[tuple[str, str, str, float]], per_day: int
) -> None:
    rules = replace(FULL, reboots_per_day=per_day)
    attempts: list[Attempt] = []
    run_s = 0.0
    for number, (name, action, outcome, later_s) in enumerate(events):
        run_s = min(run_s + later_s, ladder.DAY_S - 1)
        case = Case(f"i{number % 7}", name, (CardState(BDF),), action=action)
        for _ in range(12):
            decision = decide(case, rules, attempts, run_s)
            if decision.mode != "act" or decision.step is None:
                break
            attempts.append(Attempt(len(attempts), case.incident, decision.step, run_s, outcome))
    assert sum(attempt.step in ladder.REBOOTS for attempt in attempts) <= per_day
    for step, most in ladder.TRIES_PER_DAY.items():
        assert sum(attempt.step == step for attempt in attempts) <= most


def test_every_step_and_every_reason_has_words() -> None:
    for step in get_args(Step):
        assert text(f"watchdog.step.{step}", "zh") != text(f"watchdog.step.{step}", "en")
    for name in SEVERITY_OF_CLASS:
        for rules in (FULL, Rules(), Rules("observe"), replace(FULL, reboot=False)):
            _, end = walk(Case("i1", name, (CardState(BDF),)), rules)
            if end.reason:
                assert text(f"watchdog.hindrance.{end.reason}", "en")


# ---- what is kept -----------------------------------------------------------------------------------------------------------


def test_counts_survive_a_reboot_and_a_step_that_was_under_way_is_settled(tmp_path: Path) -> None:
    path = tmp_path / "state" / "recovery.sqlite"
    first = History(path, "boot-1")
    number = first.begin("i1", "card_gone", "remove_rescan", (BDF,), drill=False, unix_s=1.0, run_s=10.0)
    first.end(number, "failed", "why")
    first.begin("i1", "card_gone", "reboot", (BDF,), drill=False, unix_s=2.0, run_s=20.0)
    first.close()
    second = History(path, "boot-2")
    assert second.end_interrupted() == (("reboot", "booted"),)
    assert [(item.step, item.outcome) for item in second.attempts(("i1",), 30.0)] == [
        ("remove_rescan", "failed"),
        ("reboot", "booted"),
    ]
    second.begin("i1", "card_gone", "bus_reset", (BDF,), drill=True, unix_s=3.0, run_s=30.0)
    second.close()
    third = History(path, "boot-2")
    assert third.end_interrupted() == ()  # a drill's is ended too, and not counted
    assert third.rows("i1")[-1].attempt.outcome == "interrupted"
    assert third.attempts((), 20.0 + ladder.DAY_S + 11) == ()
    third.fence(BDF, "i1", 4.0)
    third.keep("running_s", "31")
    assert (third.fences(), third.fact("running_s"), third.fact("none")) == ((BDF,), "31", "")
    third.unfence(BDF)
    assert third.fences() == ()
    assert path.stat().st_mode & 0o777 == 0o600
