"""Unit, engine and disk sensors: what systemd, the server and the file system say, judged."""

from __future__ import annotations

import pytest

from laoka.agent import disk, engine, unit
from laoka.agent.unit import UnitMemory, UnitState
from laoka.process import Completed
from laoka.serving.completion import Verdict

UNIT = "qwen-serve.service"


def show(stdout: str, status: int = 0, stderr: str = "") -> UnitState:
    return unit.parse_show(Completed(("systemctl",), status, stdout, stderr))


def test_parse_show() -> None:
    text = "Result=success\nNRestarts=3\nLoadState=loaded\nActiveState=active\nSubState=running\n"
    assert show(text) == UnitState("loaded", "active", "running", "success", 3)
    assert show("", 1, "Failed to connect to bus\n").fault == "systemctl show: Failed to connect to bus"
    assert show("nonsense").fault
    assert show("ActiveState=active\nNRestarts=[not set]\n").restarts is None
    failed = "LoadState=loaded\nActiveState=failed\nSubState=failed\nResult=exit-code\nNRestarts=0\nExecMainStatus="
    assert [show(failed + status).final for status in ("2", "1", "0", "")] == [True, False, False, False]
    assert not show("ActiveState=activating\nResult=exit-code\nExecMainStatus=2").final


def states(*names: str) -> list[list[str]]:
    memory, found = UnitMemory(), []
    for name in names:
        active, _, restarts = name.partition(":")
        state = UnitState("loaded", active, "x", "success", int(restarts or 0))
        reading, memory = unit.judge(UNIT, state, memory)
        found.append([signal.kind for signal in reading.signals])
    return found


def test_a_restart_by_hand_is_not_down() -> None:
    assert states("active", "deactivating", "inactive", "activating", "active") == [[], [], [], [], []]


def test_down() -> None:
    assert states("active", "failed", "failed") == [[], ["unit_down"], ["unit_down"]]
    assert states("active", "inactive", "inactive", "active") == [[], [], ["unit_down"], []]


def test_a_restart_by_systemd_lasts_until_it_is_up() -> None:
    found = states("active:0", "activating:1", "activating:1", "active:1", "active:1", "active:0", "active:1", "active:1")
    assert found == [[], ["unit_restarted"], ["unit_restarted"], [], [], [], ["unit_restarted"], []]
    # What happened before the watchdog began is no news.
    assert states("active:7") == [[]]


def test_not_installed_and_not_answering() -> None:
    state = UnitState("not-found", "inactive", "dead", "success", 0)
    _, memory = unit.judge(UNIT, state, UnitMemory())
    reading, _ = unit.judge(UNIT, state, memory)
    assert (reading.verdict, reading.signals[0].values["state"]) == ("bad", "not installed")
    assert unit.judge(UNIT, UnitState(fault="f"), UnitMemory())[0].verdict == "unknown"
    assert unit.judge(UNIT, UnitState("loaded", "activating", "start-post"), UnitMemory())[0].verdict == "unknown"


@pytest.mark.parametrize(
    ("kind", "signal"),
    [
        ("port_closed", "engine_no_answer"),
        ("not_ready", "engine_no_answer"),
        ("timed_out", "engine_no_answer"),
        ("engine_frozen", "engine_frozen"),
        ("garbage", "engine_garbage"),
        ("repeating", "engine_garbage"),
        ("refused", "engine_refuses"),
    ],
)
def test_the_second_bad_answer_counts(kind: str, signal: str) -> None:
    verdict = Verdict(kind, "words")  # type: ignore[arg-type]
    first, failures = engine.judge(verdict, 0)
    assert (first.verdict, first.signals, failures) == ("unknown", (), 1)
    second, failures = engine.judge(verdict, failures)
    assert (second.verdict, [item.kind for item in second.signals], failures) == ("bad", [signal], 2)
    third, failures = engine.judge(Verdict("healthy", "words", latency_s=0.1), failures)
    assert (third.verdict, failures) == ("ok", 0)


def test_unjudged_words_are_said_to_be_so() -> None:
    reading, _ = engine.judge(Verdict("healthy", "a completion", text_judged=False), 0)
    assert "words not judged" in reading.detail


def test_disk() -> None:
    assert disk.judge({"/": 5000, "/var": 900}, 512).verdict == "ok"
    full = disk.judge({"/": 5000, "/var": 511}, 512)
    assert [(signal.kind, signal.subject) for signal in full.signals] == [("disk_full", "/var")]
    assert disk.judge({"/": None}, 512).verdict == "unknown"
    assert disk.read_free_mb(("/", "/no/such/place"))["/no/such/place"] is None
    assert (disk.read_free_mb(("/",))["/"] or 0) > 0
