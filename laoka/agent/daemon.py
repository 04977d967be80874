"""The watchdog's main loop: takes what sensors say, keeps incidents, queues alerts, says that it lives.

Nothing here waits for a card, a driver or a network: those waits are in threads and children of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from laoka.agent import channels, evidence, incidents, outbox, state, store, wording
from laoka.agent.clock import now as _now
from laoka.agent.config import Config
from laoka.agent.follow import boot_id
from laoka.agent.history import Row
from laoka.agent.incidents import Incident, Step
from laoka.agent.kernel_log import Position
from laoka.agent.metrics import Metrics
from laoka.agent.recovery import Begun, Recovery
from laoka.agent.sensors import Sensors
from laoka.agent.signals import Reading, Signal
from laoka.catalog.messages import text
from laoka.files import why_unread, write_atomic
from laoka.notify import Notifier

STATE_EVERY_S = 6.0
"""News are written at once; this is for what only ages. Well under state.STALE_AFTER_S, and half of what the main loop costs."""
METRICS_FILE_EVERY_S = 15.0
URLS_AGAIN_S = 30.0
BATCH = 200
NOTES_KEPT = 10
HEARTBEAT_LATE_S = 30.0


def say(line: str) -> None:
    """A line for the journal."""
    print(line, file=sys.stderr, flush=True)


class Daemon:
    """Everything that the main loop holds."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = Path(config.state_dir)
        self.incident_folder = self.folder / "incidents"
        self.position_file = self.folder / "kernel-log.json"
        self.sensors = Sensors(config)
        self.outbox = outbox.Outbox(self.folder / "outbox", per_hour=config.alerts_per_hour, quiet_hours=config.quiet_hours)
        self.metrics = Metrics(config)
        self.notifier = Notifier()
        self.readings: dict[str, Reading] = {}
        self.notes: deque[str] = deque(maxlen=NOTES_KEPT)
        self.unsaved: dict[str, Incident] = {}
        self.position: Position | None = None
        self.saved_position: Position | None = None
        self.addresses = outbox.Addresses()
        self.urls_source = "not read yet"
        self.wake_sender = threading.Event()
        self.last_state = "{}"
        self.looped_s = time.monotonic()
        self.heartbeat_ok: bool | None = None
        self.recovery = Recovery(config, boot_id(), self._collect, self._wait_for_alerts, self.note)
        stored, faults = store.load(self.incident_folder)
        for line in (*faults, *self.outbox.faults):
            self.note(line)
        self.outbox.faults.clear()
        self.closed = deque((item for item in stored if item.state != "open"), maxlen=state.RECENT)
        self.tracker = incidents.resume(
            stored, _now(), burst_quiet_s=config.burst_quiet_s, recovered_after_s=config.recovered_after_s
        )

    def note(self, line: str) -> None:
        """Say a trouble of our own, and show it in the status."""
        say(line)
        self.notes.append(line)

    def run(self) -> int:
        """Run until SIGTERM or SIGINT; returns the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        self._make_room()
        self.recovery.open(_now())
        self.metrics.steps.update(self.recovery.left)
        self._read_urls()
        self.sensors.start(self._read_position(), self.recovery.last_boot())
        threading.Thread(target=self._send, name="alerts", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        ready = False
        pet_s = state_s = metrics_s = float("-inf")
        while not self.sensors.stopping.is_set():
            self._take(self._next_readings())
            now_s = self.looped_s = time.monotonic()
            if not ready and "pci" in self.readings:
                # Nobody asks before the first look at the bus is over: a metric of no card seen would be an alarm.
                ready = True
                self._write_state()
                if self.config.metrics_address and (fault := self.metrics.serve(self.config.metrics_address)):
                    self.note(fault)
                self.notifier.send("READY=1")
                say(f"watching {len(self.config.gpu)} card(s) on {self.config.host}; recovery: {self.config.recovery}")
            if now_s - pet_s >= min(5.0, self.notifier.watchdog_s / 3 if self.notifier.watchdog_s else 5.0):
                pet_s = now_s
                self.notifier.send("WATCHDOG=1", f"STATUS={self._status_line()}")
            if ready and now_s - state_s >= STATE_EVERY_S:
                state_s = now_s
                self._silent_sensors()
                for bdf in self.recovery.watch_cards(self.readings):
                    self.note(f"{bdf} was given up and is there again: the engine may use it from its next start on")
                self._write_state()
            if ready and self.config.metrics_file and now_s - metrics_s >= METRICS_FILE_EVERY_S:
                metrics_s = now_s
                if (fault := self.metrics.write(self.config.metrics_file)) and fault not in self.notes:
                    self.note(fault)
        self.notifier.send("STOPPING=1")
        self._save()
        self._write_state()
        return 0

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.sensors.stopping.set()

    def _next_readings(self) -> list[Reading]:
        found: list[Reading] = []
        with contextlib.suppress(queue.Empty):
            found.append(self.sensors.readings.get(timeout=incidents.next_due_s(self.tracker, _now())))
            while len(found) < BATCH:
                found.append(self.sensors.readings.get_nowait())
        return found

    def _take(self, readings: Sequence[Reading]) -> None:
        told = False
        for reading in readings:
            self.readings[reading.sensor] = reading
            if reading.sensor == "kernel_log" and "position" in reading.facts:
                self.position = Position(**reading.facts["position"])
            told = self._follow(incidents.feed(self.tracker, self.recovery.without_own_doing(reading), _now())) or told
        told = self._follow(incidents.tick(self.tracker, _now())) or told
        told = self._recover() or told
        if self.outbox.release(self._summary):
            self.wake_sender.set()
        self._save()
        if told:
            self._write_state()
        for line in self.outbox.faults:
            self.note(line)
        self.outbox.faults.clear()

    def _recover(self) -> bool:
        """Note steps that ended, begin one that is due, tell what has to be told. Returns whether anything was told."""
        told = False
        for ended in self.recovery.settle():
            if not ended.begun.incident.drill:
                self.metrics.steps[ended.begun.step, ended.outcome] += 1
            say(f"recovery: {ended.begun.step}: {ended.outcome}: {ended.detail} [{ended.begun.incident.id}]")
        begun = self.recovery.consider(self.tracker, self.readings, _now())
        if begun is not None:
            say(f"recovery: {begun.step} begins {' '.join(begun.cards)} [{begun.incident.id}]")
            told = self._tell_begun(begun) or told
        for live in self.tracker.live:
            decision = self.recovery.decisions.get(live.incident.id)
            if decision is not None and decision.mode == "gave_up" and live.incident.told_rank >= 0:
                words = wording.of_end(live.incident, decision, self._tried(live.incident), self.config)
                told = self._tell("gave-up", live.incident, words) or told
        return told

    def _tell_begun(self, begun: Begun) -> bool:
        if begun.step not in ("reboot", "cold_cycle") or begun.incident.drill:
            return False
        words = wording.of_step(begun.incident, begun.step, self.config)
        return self._tell(f"{begun.step}-{begun.number}", begun.incident, words)

    def _tell(self, name: str, incident: Incident, words: wording.Words) -> bool:
        if not self.outbox.put(f"{incident.id}-{name}", "step", words.title, words.body, incident=incident.id):
            return False
        say(f"told: {words.title}")
        self.wake_sender.set()
        return True

    def _tried(self, incident: Incident) -> tuple[Row, ...]:
        return self.recovery.rows(incident.id)

    def _collect(self, incident: Incident) -> str:
        kept = evidence.collect(self.config, incident, self.last_state)
        say(f"evidence: {kept}")
        return kept

    def _wait_for_alerts(self, seconds: float) -> bool:
        """Give the sender a moment before the host goes down; called by the recovery thread."""
        end_s = time.monotonic() + seconds
        while self.outbox.waiting and time.monotonic() < end_s:
            time.sleep(0.1)
        return not self.outbox.waiting

    def _follow(self, step: Step) -> bool:
        """Keep what a step did. The alert is queued before the incident says that it was: a crash between the two asks for
        it again, and the queue knows it already.
        """
        self.tracker = step.tracker
        for alert in step.alerts:
            kind, incident = alert.kind, alert.incident
            if kind == "opened":
                # What will be done about it belongs in its first alert: decided before anything is queued.
                self.recovery.consider(self.tracker, self.readings, _now(), begin=False)
            decision = self.recovery.decisions.get(incident.id)
            words = wording.of_alert(alert, self.config, decision, self._tried(incident))
            # A later alert of the same incident is another one when it told of more than the one before.
            suffix = f"-{len(incident.told)}-{incident.told_rank}" if kind == "worse" else ""
            name = f"{incident.id}-{kind}{suffix}"
            self.outbox.put(name, kind, words.title, words.body, severity=incident.severity, incident=incident.id)
            say(f"{kind}: {incident.class_of(alert.subject.signal)}: {alert.subject.signal.seen} [{incident.id}]")
            if kind == "opened" and not incident.drill:
                self.metrics.incidents[incident.incident_class] += 1
        for incident in step.changed:
            self.unsaved[incident.id] = incident
            if incident.state != "open":
                self.closed.append(incident)
        if step.alerts:
            self.wake_sender.set()
        return bool(step.alerts)

    def _save(self) -> None:
        """Write incidents that changed, then how far the kernel log is covered by them. A full disk keeps them in memory."""
        for incident in list(self.unsaved.values()):
            try:
                store.save(self.incident_folder, incident)
                del self.unsaved[incident.id]
                if incident.state != "open":
                    store.prune(self.incident_folder, frozenset(live.incident.id for live in self.tracker.live))
            except OSError as error:
                line = f"{self.incident_folder}: {error.strerror}: incidents are kept in memory"
                if line not in self.notes:
                    self.note(line)
                return
        if self.position is not None and self.position != self.saved_position:
            with contextlib.suppress(OSError):
                write_atomic(self.position_file, json.dumps(asdict(self.position)) + "\n", 0o600)
                self.saved_position = self.position

    def _read_position(self) -> Position | None:
        try:
            return Position(**json.loads(self.position_file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            self.note(f"{self.position_file}: {type(error).__name__}: the kernel log is followed from now on")
            return None

    def _make_room(self) -> None:
        for folder in (self.folder, self.incident_folder, self.folder / "outbox"):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                self.note(f"{folder}: {error.strerror}: incidents and alerts are kept in memory")

    def _silent_sensors(self) -> None:
        now_s = time.monotonic()
        found = []
        for name, max_age_s in self.sensors.max_age_s.items():
            age_s = now_s - self.sensors.heard_s[name]
            if age_s > max_age_s:
                values: dict[str, str | int | float] = {"sensor": name, "age_s": round(age_s)}
                found.append(Signal("sensor_silent", "sensors", subject=name, seen=f"sensor {name} is silent", values=values))
        self._follow(incidents.feed(self.tracker, Reading("sensors", "bad" if found else "ok", tuple(found)), _now()))

    def _summary(self, titles: Sequence[str]) -> tuple[str, str]:
        lang = self.config.lang
        values = {"marks": wording.marks(self.config), "host": self.config.host, "count": len(titles)}
        listed = "\n".join(f"- {title}" for title in titles[:50])
        body = text("watchdog.body.summary", lang, cap=self.config.alerts_per_hour, titles=listed)
        return text("watchdog.title.summary", lang, **values), body

    def _status_line(self) -> str:
        pci = self.readings.get("pci")
        seen = pci.facts.get("seen", "?") if pci else "?"
        mark = "simulated card; " if self.config.simulated else ""
        open_ones = f"{len(self.tracker.live)} open incident(s)"
        return f"{mark}{seen} of {len(self.config.gpu)} cards seen; {open_ones}; recovery {self.config.recovery}"

    def _write_state(self) -> None:
        current = self._state()
        self.metrics.update(current)
        self.last_state = json.dumps(current, ensure_ascii=False)
        try:
            write_atomic(self.config.state_file, f"{self.last_state}\n", 0o644)
        except OSError as error:
            line = f"{self.config.state_file}: {error.strerror}: laoka watchdog status will not work"
            if line not in self.notes:
                self.note(line)

    def _state(self) -> dict[str, Any]:
        alerts = {
            "channels": len(self.addresses.urls),
            "source": self.urls_source,
            "waiting": self.outbox.waiting,
            "held": self.outbox.held,
            "failing": self.outbox.failing(),
            "delivered": self.outbox.delivered_total,
            "dropped": self.outbox.dropped,
            "heartbeat": self.heartbeat_ok,
        }
        return state.build(
            self.config,
            self.readings,
            self.sensors.heard_s,
            self.tracker,
            tuple(self.closed),
            alerts,
            tuple(self.notes),
            _now(),
            self.recovery.decisions,
            {live.incident.id: self._tried(live.incident) for live in self.tracker.live},
            self.recovery.fences,
        )

    def _read_urls(self) -> bool:
        """Read the addresses (a credential or a file, which may change); False when they can't be read."""
        try:
            self.addresses, self.urls_source = outbox.read_addresses(self.config.alert_urls_file)
        except (OSError, UnicodeDecodeError) as error:
            self.addresses, self.urls_source = outbox.Addresses(), f"{self.config.alert_urls_file}: {why_unread(error)}"
            return False
        return True

    def _beat(self) -> None:
        """The heartbeat's thread: asks an address of the owner's while the main loop lives; whoever misses it raises the alarm."""
        while not self.sensors.stopping.is_set():
            if self.addresses.heartbeat and time.monotonic() - self.looped_s < HEARTBEAT_LATE_S:
                self.heartbeat_ok = channels.beat(self.addresses.heartbeat)
            self.sensors.stopping.wait(self.config.heartbeat_interval_s)

    def _send(self) -> None:
        """The sender's thread: delivers what waits."""
        channels.load(self.addresses.urls)
        again = text("watchdog.title.again", self.config.lang)
        wait_s = 0.0
        while not self.sensors.stopping.is_set():
            self.wake_sender.wait(min(wait_s, URLS_AGAIN_S))
            self.wake_sender.clear()
            try:
                wait_s = self.outbox.deliver(self.addresses, channels.send, again) if self._read_urls() else URLS_AGAIN_S
            except Exception as error:  # noqa: BLE001 - the thread must go on; the text could hold an address
                say(f"alerts: {type(error).__name__} while sending; trying again")
                wait_s = URLS_AGAIN_S


def run(config: Config) -> None:
    """Run the watchdog and leave. Errors: none; never returns."""
    status = Daemon(config).run()
    sys.stderr.flush()
    # A thread that hangs in a read of a wedged card would keep the interpreter from ending.
    os._exit(status)
