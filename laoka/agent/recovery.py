"""The ladder at work: asks the pure policy what comes next, notes it, has a child do it, notes how it ended.

The main loop calls `consider` and never waits; evidence and step are in a thread of their own. Whatever is not on the disk did not
happen: where the database can't be written nothing is done at all.
"""

from __future__ import annotations

import json
import queue
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from laoka.agent import act, ladder
from laoka.agent.clock import Now
from laoka.agent.config import Config
from laoka.agent.history import History, Row
from laoka.agent.incidents import Incident, Tracker
from laoka.agent.ladder import CardState, Case, Decision, Rules
from laoka.agent.sensors import LastBoot
from laoka.agent.signals import Reading
from laoka.catalog import xids
from laoka.files import write_atomic
from laoka.process import run

KEEP_RUNNING_TIME_S = 60.0
TELL_BEFORE_REBOOT_S = 10.0
CHECK_S = 15.0
"""After a step that healed, every sensor looks again before the next step is thought of: NVML's interval and deadline, and this."""
ENGINE_SENSORS = ("unit", "completion", "engine")
CARD_SENSORS = ("pci", "nvml", "link")


def rules_of(config: Config) -> Rules:
    """What the settings allow."""
    return Rules(
        config.recovery,
        config.reboot,
        config.reboots_per_day,
        bool(config.power_cycle_command),
        bool(config.unit),
        config.act_after_s,
    )


def card_states(config: Config, readings: Mapping[str, Reading], fences: Sequence[str]) -> dict[str, CardState]:
    """Every expected card as the sensors saw it last."""
    pci, nvml = readings.get("pci"), readings.get("nvml")
    listed = {card["bdf"]: card["state"] for card in (pci.facts.get("cards", ()) if pci else ())}
    asked = nvml is not None and nvml.verdict != "off"
    answers = nvml.facts.get("cards", {}) if nvml else {}
    found = {}
    for gpu in config.gpu:
        state = listed.get(gpu.bdf, "gone")
        alive = state in ("present", "swapped")
        good = not asked or (gpu.bdf in answers and not answers[gpu.bdf].get("lost"))
        found[gpu.bdf] = CardState(gpu.bdf, state != "gone", alive, alive and good, gpu.bdf in fences)
    return found


def case_of(
    incident: Incident,
    config: Config,
    readings: Mapping[str, Reading],
    fences: Sequence[str],
    standing_s: float,
    healed_s: float | None = None,
) -> Case:
    """An incident as the ladder sees it. `standing_s`: since it was first seen; `healed_s`: since a step said that all is back."""
    states = card_states(config, readings, fences)
    named = [states[bdf] for bdf in incident.cards if bdf in states]
    named = [card for card in named if not card.fenced] or named
    lost = [card for card in named if card.lost]
    lead = incident.lead.signal
    row = xids.by_number(lead.xid) if lead.xid is not None else None
    unit, completion = readings.get("unit"), readings.get("completion")
    unit_facts = unit.facts if unit else {}
    stopped = unit_facts.get("active") == "inactive" and unit_facts.get("result") == "success"
    too_few = len(config.gpu) - len(fences) < config.tensor_parallel
    return Case(
        incident.id,
        incident.incident_class,
        tuple(lost or named) if not incident.drill else tuple(states[bdf] for bdf in incident.cards if bdf in states),
        active=incident.has_active,
        standing_s=standing_s,
        action=row.action if row else "",
        engine_ok=bool(completion and completion.verdict == "ok"),
        checking=healed_s is not None and healed_s < config.nvml_interval_s + config.nvml_deadline_s + CHECK_S,
        engine_stopped=stopped or bool(fences and too_few),
        engine_starting=unit_facts.get("active") == "activating",
        engine_final=bool(unit_facts.get("final")),
        engine_looked_at=(not config.unit or unit is not None) and (not config.completion_url or completion is not None),
        drill=incident.drill,
    )


@dataclass(frozen=True)
class Begun:
    """A step that has just been noted as begun."""

    incident: Incident
    step: str
    cards: tuple[str, ...]
    number: int


@dataclass(frozen=True)
class Ended:
    """A step that ended."""

    begun: Begun
    outcome: str
    detail: str


@dataclass
class Recovery:
    """Everything that is known of recovery. `collect` makes the evidence of an incident; `told` waits until alerts are out."""

    config: Config
    boot_id: str
    collect: Callable[[Incident], str]
    told: Callable[[float], bool]
    note: Callable[[str], None]
    decisions: dict[str, Decision] = field(default_factory=dict)
    fences: tuple[str, ...] = ()
    running: Begun | None = None
    left: tuple[tuple[str, str], ...] = ()
    """Step and outcome of what an earlier run was at when it ended."""
    _history: History | None = None
    _ended: queue.Queue[Ended] = field(default_factory=queue.Queue)
    _first_seen_s: dict[str, float] = field(default_factory=dict)
    _healed_s: dict[str, float] = field(default_factory=dict)
    _engine_wanted: dict[str, bool] = field(default_factory=dict)
    _ports: dict[str, str] = field(default_factory=dict)
    _run_base_s: float = 0.0
    _run_since_s: float = 0.0
    _kept_s: float = 0.0

    def open(self, now: Now) -> None:
        """Open the database, and settle what an earlier run left. A database that can't be opened means: observe only."""
        self._run_since_s = self._kept_s = now.mono_s
        try:
            self._history = History(Path(self.config.state_dir) / "recovery.sqlite", self.boot_id)
            self._run_base_s = float(self._history.fact("running_s") or 0.0)
            self._ports = json.loads(self._history.fact("ports") or "{}")
            self.left = self._history.end_interrupted()
            if self.left:
                self.note(f"recovery: {len(self.left)} step(s) were under way when the watchdog or the host went down")
            self.fences = self._history.fences()
        except (sqlite3.Error, OSError, ValueError) as error:
            self._broken(error)

    def _broken(self, error: Exception) -> None:
        self.note(f"recovery: {type(error).__name__}: {error}: nothing is done by itself, as it could not be counted")
        self._history = None

    def last_boot(self) -> LastBoot:
        """This boot and the last one that the watchdog ran in; this one is noted as known."""
        if self._history is None or not self.boot_id:
            return LastBoot(self.boot_id)
        try:
            known = self._history.fact("boot_id")
            self._history.keep("boot_id", self.boot_id)
            return LastBoot(self.boot_id, known, self._history.cut_power_in(known))
        except sqlite3.Error as error:
            self._broken(error)
            return LastBoot(self.boot_id)

    def run_s(self, now: Now) -> float:
        """The watchdog's running time, all its runs together."""
        return self._run_base_s + now.mono_s - self._run_since_s

    def without_own_doing(self, reading: Reading) -> Reading:
        """A reading without what a step that is under way brings about itself: an engine that it stopped, a card that it took off
        the bus. What was said of them before stands until the step ended.
        """
        if self.running is None or self.running.step in ("apply_caps", "reboot", "cold_cycle") or self.running.incident.drill:
            return reading
        if reading.sensor in ENGINE_SENSORS and reading.verdict == "bad":
            return Reading(reading.sensor, "unknown", detail=reading.detail, facts=reading.facts)
        if reading.sensor in CARD_SENSORS and self.running.step != "restart_engine":
            held = frozenset(self.running.cards)
            signals = tuple(signal for signal in reading.signals if signal.bdf not in held)
            return replace(reading, signals=signals, unread=reading.unread | held)
        return reading

    def rows(self, incident: str) -> tuple[Row, ...]:
        """What was tried for an incident, oldest first; none where the database can't be read."""
        try:
            return self._history.rows(incident) if self._history else ()
        except sqlite3.Error as error:
            self._broken(error)
            return ()

    def settle(self) -> list[Ended]:
        """Steps that ended since the last call, noted."""
        found: list[Ended] = []
        while self._history is not None:
            try:
                ended = self._ended.get_nowait()
            except queue.Empty:
                break
            try:
                self._history.end(ended.begun.number, ended.outcome, ended.detail)
                if ended.outcome == "fenced":
                    for bdf in ended.begun.cards:
                        self._history.fence(bdf, ended.begun.incident.id, time.time())
                    self.fences = self._history.fences()
            except sqlite3.Error as error:
                self._broken(error)
            self.running = None
            if ended.outcome == "recovered":
                self._healed_s[ended.begun.incident.id] = time.monotonic()
            found.append(ended)
        return found

    def consider(self, tracker: Tracker, readings: Mapping[str, Reading], now: Now, *, begin: bool = True) -> Begun | None:
        """Decide about every open incident; begin one step where one is due (unless told not to), and return it."""
        if self._history is None:
            self.decisions = {live.incident.id: Decision("blocked", reason="no_history") for live in tracker.live}
            return None
        try:
            return self._consider(self._history, tracker, readings, now, begin)
        except sqlite3.Error as error:
            self._broken(error)
            return None

    def _consider(self, history: History, tracker: Tracker, readings: Mapping[str, Reading], now: Now, begin: bool) -> Begun | None:
        if now.mono_s - self._kept_s >= KEEP_RUNNING_TIME_S:
            self._kept_s = now.mono_s
            history.keep("running_s", f"{self.run_s(now):.0f}")
        if not tracker.live:
            self.decisions = {}
            self._first_seen_s.clear()
            return None
        attempts = history.attempts(tuple(live.incident.id for live in tracker.live), self.run_s(now))
        cases = []
        for live in tracker.live:
            first_s = self._first_seen_s.setdefault(live.incident.id, now.mono_s)
            healed_s = self._healed_s.get(live.incident.id)
            since_s = None if healed_s is None else now.mono_s - healed_s
            case = case_of(live.incident, self.config, readings, self.fences, now.mono_s - first_s, since_s)
            cases.append((ladder.worst_first(case), case, live))
        cases.sort(key=lambda item: item[0])
        self.decisions = {}
        due: Begun | None = None
        for _, case, live in cases:
            decision = ladder.decide(case, rules_of(self.config), attempts, self.run_s(now))
            # Nobody was told yet, or something is under way: what comes after it may be another decision.
            early = live.incident.told_rank < 0 or due is not None or self.running is not None
            if decision.mode == "act" and early:
                decision = Decision("wait", decision.step, "running" if self.running or due else "standing", decision.rungs)
            self.decisions[case.incident] = decision
            if begin and decision.mode == "act" and decision.step is not None:
                cards = tuple(card.bdf for card in case.cards)
                number = history.begin(
                    case.incident,
                    case.incident_class,
                    decision.step,
                    cards,
                    drill=case.drill,
                    unix_s=now.unix_s,
                    run_s=self.run_s(now),
                )
                due = Begun(live.incident, decision.step, cards, number)
        if due is not None:
            self._begin(due, readings)
        return due

    def _begin(self, begun: Begun, readings: Mapping[str, Reading]) -> None:
        self.running = begun
        if begun.incident.drill:
            self._ended.put(Ended(begun, "rehearsed", "a drill: nothing was done"))
            return
        unit = readings.get("unit")
        active = str(unit.facts.get("active", "")) if unit else ""
        wanted = self._engine_wanted.setdefault(begun.incident.id, active not in ("inactive", ""))
        threading.Thread(target=self._work, args=(begun, wanted), name="recovery", daemon=True).start()

    def _work(self, begun: Begun, engine_wanted: bool) -> None:
        try:
            self.collect(begun.incident)
            if begun.step in ladder.REBOOTS:
                self.told(TELL_BEFORE_REBOOT_S)
            outcome, detail = self._child(begun, engine_wanted)
        except Exception as error:  # noqa: BLE001 - whatever it was, the step ended, and the loop must hear of it
            outcome, detail = "failed", f"{type(error).__name__}: {error}"
        self._ended.put(Ended(begun, outcome, detail))

    def _child(self, begun: Begun, engine_wanted: bool) -> tuple[str, str]:
        argv = [sys.executable, "-m", "laoka.agent.act", begun.step, "--config", self.config.source]
        for bdf in begun.cards:
            argv += ["--card", bdf]
        for bdf, port in self._ports.items():
            argv += ["--port", f"{bdf}={port}"]
        for bdf in self.fences:
            argv += ["--fenced", bdf]
        argv += [] if engine_wanted else ["--leave-engine"]
        done = run(argv, deadline_s=act.deadline_s(begun.step, self.config))
        if done.timed_out:
            return "timed_out", "it did not end within its deadline and was abandoned"
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
            return str(answer["outcome"]), str(answer["detail"])
        except (ValueError, KeyError, TypeError):
            return "failed", done.last_line()

    def watch_cards(self, readings: Mapping[str, Reading]) -> tuple[str, ...]:
        """Remember behind which port each card sits, and take back cards that were given up and are there again: those."""
        if self._history is None:
            return ()
        states = card_states(self.config, readings, self.fences)
        try:
            ports = {bdf: act.port_of(self.config.sysfs_root, bdf) for bdf, state in states.items() if state.alive}
            known = {**self._ports, **{bdf: port for bdf, port in ports.items() if port}}
            if known != self._ports:
                self._ports = known
                self._history.keep("ports", json.dumps(known))
            back = tuple(bdf for bdf in self.fences if bdf not in states or not states[bdf].lost) if self.running is None else ()
            for bdf in back:
                self._history.unfence(bdf)
            if back:
                self.fences = self._history.fences()
                fenced = frozenset(self.fences)
                write_atomic(Path(self.config.state_dir) / act.FENCE_FILE, act.fence_text(self.config, fenced), 0o600)
            return back
        except (sqlite3.Error, OSError) as error:
            self._broken(error)
            return ()
