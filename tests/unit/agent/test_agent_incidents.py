"""Signals become incidents: what belongs together, what the cause was, when it is over, and what a restart remembers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.agent import incidents, store
from laoka.agent.clock import Now
from laoka.agent.incidents import Alert, Incident, Step, StoredError, Tracker, feed, from_json, resume, tick, to_json
from laoka.agent.kernel_log import KmsgRecord, Stitcher, interesting, signal_of
from laoka.agent.signals import CLASS_OF_KIND, SEVERITY_OF_CLASS, SYMPTOMS, Reading, Signal
from laoka.catalog.messages import catalogue

CAPTURES = Path(__file__).resolve().parents[2] / "data" / "captures"
BDF = "0000:03:00.0"
OTHER = "0000:04:00.0"


def at(seconds: float, unix_s: float | None = None) -> Now:
    return Now(1_796_000_000.0 + seconds if unix_s is None else unix_s, 1000.0 + seconds)


def xid(number: int, bdf: str = BDF, origin: str = "") -> Signal:
    return Signal("xid", "kernel_log", bdf, number, seen=f"Xid {number}", values={"body": "words"}, lasting=False, origin=origin)


def pci(*signals: Signal) -> Reading:
    return Reading("pci", "bad" if signals else "ok", signals)


GONE = Signal("card_gone", "pci", BDF)
DEAD = Signal("config_dead", "pci", BDF)
FROZEN = Signal("engine_frozen", "completion", values={"kind": "engine_frozen", "detail": "d"})
SILENT = Signal("engine_no_answer", "completion", values={"kind": "port_closed", "detail": "d"})


def log(*signals: Signal) -> Reading:
    return Reading("kernel_log", "ok", signals)


class Story:
    """Feeds readings at given seconds and keeps what came of it."""

    def __init__(self, tracker: Tracker | None = None) -> None:
        self.tracker = tracker or Tracker()
        self.alerts: list[Alert] = []
        self.saved: dict[str, Incident] = {}

    def _keep(self, step: Step) -> None:
        self.tracker = step.tracker
        self.alerts += step.alerts
        self.saved |= {incident.id: incident for incident in step.changed}

    def hear(self, seconds: float, reading: Reading) -> None:
        self._keep(feed(self.tracker, reading, at(seconds)))

    def wait(self, seconds: float) -> None:
        self._keep(tick(self.tracker, at(seconds)))

    @property
    def told(self) -> list[tuple[str, str]]:
        return [(alert.kind, alert.incident.class_of(alert.subject.signal)) for alert in self.alerts]


def test_a_card_that_vanishes_is_one_incident_with_one_alert() -> None:
    story = Story()
    story.hear(0, log(xid(79)))
    story.hear(0.1, log(Signal("fallen_off", "kernel_log", BDF, lasting=False)))
    story.hear(0.2, pci(GONE))
    assert story.told == []
    story.wait(0.5)
    assert story.told == [("opened", "card_gone")]
    for second in range(1, 60):
        story.hear(second, pci(GONE))
    assert story.told == [("opened", "card_gone")]
    assert len(story.saved) == 1
    assert story.tracker.live[0].incident.root.signal.xid == 79


def test_it_is_over_when_the_card_is_back_for_long_enough() -> None:
    story = Story()
    story.hear(0, pci(GONE))
    story.wait(1)
    story.hear(50, pci())
    story.wait(79)
    assert story.told == [("opened", "card_gone")]
    story.hear(60, pci(GONE))  # gone again before it counted as recovered: the same incident, no second alert
    story.hear(100, pci())
    story.wait(131)
    assert story.told == [("opened", "card_gone"), ("recovered", "card_gone")]
    assert story.tracker.live == ()
    (incident,) = story.saved.values()
    assert (incident.state, incident.seen[0].count) == ("recovered", 2)


def test_not_being_able_to_look_takes_nothing_back() -> None:
    story = Story()
    story.hear(0, pci(GONE))
    story.wait(1)
    story.hear(2, Reading("pci", "unknown"))
    story.wait(500)
    assert story.told == [("opened", "card_gone")]
    story.hear(501, replace(pci(Signal("card_gone", "pci", OTHER)), unread=frozenset({BDF})))
    assert all(item.active for live in story.tracker.live for item in live.incident.seen)


@pytest.mark.parametrize(
    ("signals", "incident_class"),
    [
        ((xid(45), xid(79)), "off_bus"),
        ((xid(79), xid(45), xid(154)), "off_bus"),
        ((xid(154), xid(62), xid(48)), "xid_other"),
        ((xid(13), xid(79)), "off_bus"),
        ((Signal("heat", "nvml", BDF, subject="memory"), xid(79)), "off_bus"),
        ((xid(13), SILENT), "engine_dead"),
        ((xid(48), xid(63), xid(45)), "ecc"),
        ((xid(13), xid(45)), "xid_application"),
        ((xid(9999),), "xid_other"),
        ((DEAD, xid(79)), "off_bus"),
        ((DEAD, GONE), "card_gone"),
        ((xid(79, OTHER), GONE), "off_bus"),
        ((FROZEN, xid(79)), "off_bus"),
        ((Signal("unit_restarted", "unit"), xid(31)), "xid_application"),
        ((Signal("disk_full", "disk", subject="/"), SILENT), "disk_full"),
        ((FROZEN,), "engine_stuck"),
        ((SILENT,), "engine_dead"),
        ((Signal("aer_uncorrected", "kernel_log", "0000:00:02.0", lasting=False), xid(79)), "off_bus"),
        ((Signal("aer_uncorrected", "kernel_log", "0000:00:02.0", lasting=False),), "link"),
    ],
)
def test_root_cause_and_class(signals: tuple[Signal, ...], incident_class: str) -> None:
    story = Story()
    for number, signal in enumerate(signals):
        story.hear(number * 0.01, Reading(signal.sensor, "bad", (signal,)))
    found = [live.incident.incident_class for live in story.tracker.live]
    assert found[-1] == incident_class


def test_an_xid_45_alone_is_no_incident() -> None:
    story = Story()
    story.hear(0, log(xid(45)))
    story.hear(1, log(xid(154)))
    story.wait(300)
    assert (story.tracker.live, story.alerts) == ((), [])


def test_a_burst_ends_after_three_quiet_minutes() -> None:
    story = Story()
    story.hear(0, log(xid(13, origin="b:1")))
    story.hear(170, log(xid(31, origin="b:2")))
    story.hear(340, log(xid(13, origin="b:3")))
    assert len(story.tracker.live) == 1
    assert story.tracker.live[0].incident.seen[0].count == 2
    story.wait(519)
    assert story.told == [("opened", "xid_application")]
    story.wait(521)
    assert story.told == [("opened", "xid_application")]  # nobody saw anything heal: no word of recovery
    assert story.tracker.live == ()
    assert [incident.state for incident in story.saved.values()] == ["closed"]
    story.hear(530, log(xid(13, origin="b:4")))
    story.wait(540)
    assert len(story.saved) == 2


def test_what_comes_after_the_burst_is_an_incident_of_its_own() -> None:
    story = Story()
    story.hear(0, pci(GONE))
    story.hear(200, Reading("disk", "bad", (Signal("disk_full", "disk", subject="/"),)))
    story.wait(210)
    assert story.told == [("opened", "card_gone"), ("opened", "disk_full")]


def test_two_cards_at_once_are_one_incident() -> None:
    story = Story()
    story.hear(0, pci(GONE, Signal("card_gone", "pci", OTHER)))
    story.wait(1)
    assert len(story.alerts) == 1
    assert story.alerts[0].incident.cards == (BDF, OTHER)


def test_the_alert_names_the_cause_even_when_the_symptom_came_first() -> None:
    story = Story()
    story.hear(0, Reading("completion", "bad", (SILENT,)))
    story.wait(0.5)
    story.hear(1.0, pci(GONE))
    story.wait(1.4)
    assert story.told == [("opened", "card_gone")]


def test_an_incident_that_gets_worse_is_told_again_once() -> None:
    story = Story()
    story.hear(0, log(xid(13)))
    story.wait(1)
    story.hear(10, log(xid(79)))
    story.hear(10.1, pci(GONE))
    story.wait(11)
    story.hear(12, log(xid(79)))
    story.wait(13)
    assert story.told == [("opened", "xid_application"), ("worse", "card_gone")]
    assert story.tracker.live[0].incident.root.signal.xid == 13
    assert story.tracker.live[0].incident.lead.signal.xid == 79


def test_a_program_that_takes_the_engine_with_it_is_told() -> None:
    story = Story()
    story.hear(0, log(xid(31)))
    story.wait(1)
    story.hear(20, Reading("completion", "bad", (SILENT,)))
    story.wait(24)
    assert story.told == [("opened", "xid_application"), ("worse", "engine_dead")]


def test_a_second_card_and_another_fault_in_the_same_burst_are_told_too() -> None:
    story = Story()
    story.hear(0, pci(GONE))
    story.wait(1)
    story.hear(60, pci(GONE, Signal("card_gone", "pci", OTHER)))
    story.wait(61)
    story.hear(62, Reading("disk", "bad", (Signal("disk_full", "disk", subject="/"),)))
    story.wait(63)
    story.hear(64, Reading("completion", "bad", (SILENT,)))  # what follows from a lost card is not told apart
    story.wait(80)
    assert story.told == [("opened", "card_gone"), ("worse", "card_gone"), ("worse", "disk_full")]
    assert [alert.subject.signal.bdf for alert in story.alerts] == [BDF, OTHER, None]


def test_an_engine_that_changes_its_trouble_stays_one_incident() -> None:
    story = Story()
    story.hear(0, Reading("completion", "bad", (FROZEN,)))
    story.wait(10)
    story.hear(1000, Reading("completion", "bad", (SILENT,)))
    story.hear(1010, Reading("completion", "bad", (SILENT,)))
    story.wait(1020)
    assert story.told == [("opened", "engine_stuck")]
    story.hear(1030, Reading("completion", "ok"))
    story.wait(1061)
    assert story.told == [("opened", "engine_stuck"), ("recovered", "engine_stuck")]


def test_a_clock_that_jumps_does_no_harm() -> None:
    step = feed(Tracker(), pci(GONE), at(0, unix_s=5.0))
    step = tick(step.tracker, at(1, unix_s=2e9))
    assert len(step.alerts) == 1
    step = feed(step.tracker, pci(), at(2, unix_s=0.0))
    assert tick(step.tracker, at(20, unix_s=3e9)).alerts == ()
    assert [alert.kind for alert in tick(step.tracker, at(33, unix_s=1.0)).alerts] == ["recovered"]


def test_drills_stay_apart_from_what_is_real() -> None:
    story = Story()
    story.hear(0, log(replace(xid(79), drill=True)))
    story.hear(1, log(xid(79, OTHER)))
    assert [live.incident.drill for live in story.tracker.live] == [True, False]


def test_a_flood_is_counted_not_kept() -> None:
    story = Story()
    for number in range(100):
        story.hear(number * 0.01, log(xid(13, f"0000:{number:02x}:00.0")))
    (live,) = story.tracker.live
    assert len(live.incident.seen) == incidents.MAX_SIGNALS
    assert live.incident.not_kept == 100 - incidents.MAX_SIGNALS


# ---- restarts ----


def again(story: Story, seconds: float) -> Story:
    """The story as it goes on after the process was killed: only what was saved is left."""
    stored = [from_json(json.loads(json.dumps(to_json(incident)))) for incident in story.saved.values()]
    return Story(resume(stored, at(seconds), burst_quiet_s=180, recovered_after_s=30))


def test_a_restart_does_not_open_or_tell_twice() -> None:
    story = Story()
    story.hear(0, log(xid(79, origin="boot:7")))
    story.hear(0.1, pci(GONE))
    story.wait(1)
    later = again(story, 60)
    later.hear(61, pci(GONE))
    later.hear(61, log(xid(79, origin="boot:7")))
    later.wait(100)
    assert later.told == []
    assert len(later.tracker.live) == 1
    assert [item.count for item in later.tracker.live[0].incident.seen] == [1, 1]
    later.hear(110, pci())
    later.wait(141)
    assert later.told == [("recovered", "card_gone")]


def test_a_restart_before_the_alert_tells_it() -> None:
    story = Story()
    story.hear(0, pci(GONE))
    later = again(story, 5)
    later.wait(5)
    assert later.told == [("opened", "card_gone")]


def test_closed_incidents_stay_closed_after_a_restart() -> None:
    story = Story()
    story.hear(0, pci(GONE))
    story.wait(1)
    story.hear(2, pci())
    story.wait(33)
    assert again(story, 40).tracker.live == ()


# ---- captures of real drops ----


@pytest.mark.parametrize(
    ("name", "incident_class", "root_xid"),
    [
        ("dmesg_xid79_fallen_off_pid_unknown.txt", "off_bus", 79),
        ("dmesg_xid79_new_5080.txt", "off_bus", 79),
        ("dmesg_fallen_off_multiline_no_xid.txt", "off_bus", None),
        ("dmesg_fallen_off_2012_format.txt", "off_bus", None),
        ("dmesg_aer_fatal_then_xid79_bdw_ep.txt", "off_bus", 79),
        ("dmesg_xid13_43.txt", "xid_application", 13),
        ("smi_api_mismatch_ubuntu_unattended.txt", "driver_mismatch", None),
        ("dmesg_xid63_row_remap_ampere.txt", "ecc", 63),
        ("dmesg_xid74_nvlink_fatal.txt", "link", 74),
    ],
)
def test_captures_lead_to_the_right_class(name: str, incident_class: str, root_xid: int | None) -> None:
    story = Story()
    stitcher = Stitcher()
    for number, line in enumerate((CAPTURES / name).read_text().splitlines()):
        if interesting(line.encode()) and not line.startswith(("# ", "$ ")):
            stitcher, event = stitcher.feed(line)
            if event:
                story.hear(number * 0.001, log(signal_of(event, KmsgRecord(0, 3, number, 0, line), "boot")))
    (live,) = story.tracker.live
    assert (live.incident.incident_class, live.incident.root.signal.xid) == (incident_class, root_xid)


# ---- the tables ----


def test_every_class_has_a_severity_and_words() -> None:
    classes = set(CLASS_OF_KIND.values()) | {"off_bus", "ecc", "link", "power", "xid_application", "xid_other"}
    assert classes == set(SEVERITY_OF_CLASS)
    for name in classes:
        assert {f"watchdog.{part}.{name}" for part in ("class", "why", "next")} <= set(catalogue())
    assert {f"watchdog.seen.{kind}" for kind in (*CLASS_OF_KIND, "xid")} <= set(catalogue())
    assert set(CLASS_OF_KIND) >= SYMPTOMS


# ---- on disk ----


def test_store(tmp_path: Path) -> None:
    story = Story()
    story.hear(0, pci(GONE))
    (incident,) = story.saved.values()
    store.save(tmp_path, incident)
    (path,) = tmp_path.glob("*.json")
    assert path.stat().st_mode & 0o777 == 0o600
    assert store.load(tmp_path) == ((incident,), ())


def test_a_broken_file_is_set_aside_and_told(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text('{"schema": 99}')
    found, faults = store.load(tmp_path)
    assert found == ()
    assert len(faults) == 2
    assert "schema 99" in faults[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json.unreadable", "b.json.unreadable"]
    assert store.load(tmp_path / "none") == ((), ())


def test_prune_keeps_the_newest_and_all_open_ones(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"{number}.json").write_text("{}")
    store.prune(tmp_path, frozenset({"0"}), keep=2)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["0", "4", "5"]


KINDS = [GONE, DEAD, FROZEN, SILENT, xid(79), xid(45), xid(13), Signal("disk_full", "disk", subject="/")]


@given(st.lists(st.tuples(st.floats(0, 400), st.sampled_from(KINDS), st.booleans()), max_size=25))
def test_nothing_that_sensors_say_breaks_it_and_each_incident_is_told_in_order(steps: list[tuple[float, Signal, bool]]) -> None:
    story = Story()
    clock = 0.0
    for seconds, signal, present in steps:
        clock += seconds
        story.hear(clock, Reading(signal.sensor, "bad" if present else "ok", (signal,) if present else ()))
    for name, incident in story.saved.items():
        assert from_json(json.loads(json.dumps(to_json(incident)))) == incident
        kinds = [alert.kind for alert in story.alerts if alert.incident.id == name and alert.kind != "worse"]
        assert kinds in ([], ["opened"], ["opened", "recovered"])


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=4), lambda x: st.dictionaries(st.text(max_size=4), x))
)
def test_no_stored_text_breaks_the_reader(value: object) -> None:
    for raw in (value, {"schema": 1, "signals": value}, {"schema": 1, "signals": [value]}):
        with pytest.raises(StoredError):
            from_json(raw)  # type: ignore[arg-type]
