"""Signals become incidents: what belongs together, what was first, what it is called, when it is over. Pure.

Signals of the host join the newest open incident until it has been quiet for `burst_quiet_s`. Root cause is the earliest
meaningful signal: never an Xid 45 (cleanup) or 154 (about another Xid), and never an engine that died beside a fault of the
hardware that killed it. The incident is called after its root cause until something worse joins it: a card that drops after a
program's Xid is a dropped card. An incident is over when all its conditions are gone for `recovered_after_s`; one of events
only is closed without a word when its burst is quiet, as nobody saw anything heal.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from laoka.agent.clock import Now
from laoka.agent.signals import CLASS_OF_KIND, LOSSES, SEVERITY_OF_CLASS, SYMPTOMS, Reading, Signal
from laoka.catalog import xids

SCHEMA = 1
MAX_SIGNALS = 60
"""Kept per incident; what comes after is counted only."""
SETTLE_HARDWARE_S = 0.3
SETTLE_SYMPTOM_S = 3.0
"""Before the first alert: signals of one fault come within so long, and the alert should name the cause, not the symptom."""

_SEVERITIES = ("notice", "warning", "critical")
State = Literal["open", "recovered", "closed"]
"""`recovered`: its conditions are gone. `closed`: there were only events, and no more came; nobody saw it heal."""
AlertKind = Literal["opened", "worse", "recovered"]


@dataclass(frozen=True)
class Seen:
    """A signal in an incident. `active`: a condition that still holds. `count`: how often an event came."""

    signal: Signal
    first_unix_s: float
    active: bool
    count: int = 1


@dataclass(frozen=True)
class Incident:
    """One incident as it is kept on disk.

    `told_rank` is how bad the alerts so far said it was (-1: none was queued yet), `told` the classes and lost cards they were of.
    """

    id: str
    opened_unix_s: float
    seen: tuple[Seen, ...]
    state: State = "open"
    closed_unix_s: float | None = None
    last_signal_unix_s: float = 0.0
    told_rank: int = -1
    told: tuple[str, ...] = ()
    not_kept: int = 0

    @property
    def root(self) -> Seen:
        """The earliest meaningful signal."""
        return min(self.seen, key=lambda item: _hollow(item.signal))  # in order of arrival: clocks jump

    @property
    def lead(self) -> Seen:
        """What the incident is called after: its root cause, or the first of what is worse."""
        return max((self.root, *self.seen), key=lambda item: rank(item.signal))

    @property
    def incident_class(self) -> str:
        """The class of the lead."""
        return self.class_of(self.lead.signal)

    def class_of(self, signal: Signal) -> str:
        """The class of one of its signals; a card that left the bus is `card_gone` once sysfs shows that it is not listed."""
        found = class_of(signal)
        if found == "off_bus" and any(item.signal.kind == "card_gone" and item.signal.bdf == signal.bdf for item in self.seen):
            return "card_gone"
        return found

    @property
    def news(self) -> Seen | None:
        """What nobody was told yet and has to be: something worse than before, another lost card, another critical fault that
        is not a mere symptom. None: nothing.
        """
        found = [item for item in self.seen if _is_news(item.signal, self)]
        return max(found, key=lambda item: (rank(item.signal), -_hollow(item.signal)), default=None)

    @property
    def severity(self) -> str:
        """notice, warning or critical."""
        return _SEVERITIES[min(rank(self.lead.signal), 2)]

    @property
    def drill(self) -> bool:
        """True when nothing but drill signals made it."""
        return all(item.signal.drill for item in self.seen)

    @property
    def cards(self) -> tuple[str, ...]:
        """PCI addresses concerned, the lead's first."""
        found = dict.fromkeys(item.signal.bdf for item in (self.lead, *self.seen) if item.signal.bdf)
        return tuple(found)

    @property
    def has_active(self) -> bool:
        return any(item.active for item in self.seen)


def class_of(signal: Signal) -> str:
    """The class of incident that a signal speaks for; an Xid's is its row's, `xid_other` when the catalogue lacks it."""
    if signal.kind == "xid":
        row = xids.by_number(signal.xid) if signal.xid is not None else None
        return row.incident_class if row else "xid_other"
    return CLASS_OF_KIND[signal.kind]


def rank(signal: Signal) -> int:
    """How bad a signal is: 0 notice, 1 warning, 2 critical, 3 a card is lost."""
    found = class_of(signal)
    if found in LOSSES:
        return 3
    row = xids.by_number(signal.xid) if signal.xid is not None else None
    return _SEVERITIES.index(row.severity if row else SEVERITY_OF_CLASS[found])


def _token(signal: Signal) -> str:
    return f"lost {signal.bdf}" if class_of(signal) in LOSSES else class_of(signal)


def _is_news(signal: Signal, incident: Incident) -> bool:
    if _follows(signal):
        return False
    if rank(signal) > incident.told_rank:
        return True
    return rank(signal) >= 2 and signal.kind not in SYMPTOMS and _token(signal) not in incident.told


def _follows(signal: Signal) -> bool:
    """True for an Xid that only tells about another one."""
    row = xids.by_number(signal.xid) if signal.xid is not None else None
    return row is not None and row.action == "follow_previous"


def _hollow(signal: Signal) -> int:
    """How little a signal says about the cause: 0 a cause, 1 a symptom, 2 what only follows."""
    if _follows(signal):
        return 2
    return 1 if signal.kind in SYMPTOMS else 0


@dataclass(frozen=True)
class Live:
    """An open incident and what only counts while we run (times of the monotonic clock, so that clock jumps do no harm)."""

    incident: Incident
    last_signal_s: float
    alert_due_s: float | None = None
    clear_since_s: float | None = None


@dataclass(frozen=True)
class Tracker:
    """All open incidents, oldest first."""

    live: tuple[Live, ...] = ()
    burst_quiet_s: float = 180.0
    recovered_after_s: float = 30.0


@dataclass(frozen=True)
class Alert:
    """Something to tell about an incident; `subject` is the signal that the title names."""

    kind: AlertKind
    incident: Incident
    subject: Seen


@dataclass(frozen=True)
class Step:
    """What a step did: the new state, the incidents to save, and what to tell, in order."""

    tracker: Tracker
    changed: tuple[Incident, ...] = ()
    alerts: tuple[Alert, ...] = ()


def resume(incidents: Sequence[Incident], now: Now, *, burst_quiet_s: float, recovered_after_s: float) -> Tracker:
    """A tracker that goes on with the open incidents of an earlier run. An incident that nobody was told of is due at once."""
    live = []
    for incident in sorted(incidents, key=lambda item: item.opened_unix_s):
        if incident.state == "open":
            quiet_s = min(max(0.0, now.unix_s - incident.last_signal_unix_s), burst_quiet_s)
            live.append(Live(incident, now.mono_s - quiet_s, None if incident.told_rank >= 0 else now.mono_s))
    return Tracker(tuple(live), burst_quiet_s, recovered_after_s)


def feed(tracker: Tracker, reading: Reading, now: Now) -> Step:
    """Take in what a sensor says."""
    live = list(tracker.live)
    changed: dict[str, Incident] = {}
    if reading.verdict != "unknown":
        live = [_cleared(item, reading, changed) for item in live]
    for signal in reading.signals:
        _take(live, signal, tracker.burst_quiet_s, now, changed)
    done = tick(replace(tracker, live=tuple(live)), now)
    merged = {**changed, **{incident.id: incident for incident in done.changed}}
    return replace(done, changed=tuple(merged.values()))


def _cleared(live: Live, reading: Reading, changed: dict[str, Incident]) -> Live:
    """Conditions of this sensor that it no longer reports are over."""
    keys = {signal.key for signal in reading.signals}
    seen = tuple(
        replace(item, active=False)
        if item.active
        and item.signal.sensor == reading.sensor
        and item.signal.key not in keys
        and item.signal.bdf not in reading.unread
        else item
        for item in live.incident.seen
    )
    if seen == live.incident.seen:
        return live
    incident = replace(live.incident, seen=seen)
    changed[incident.id] = incident
    return replace(live, incident=incident)


def _take(live: list[Live], signal: Signal, burst_quiet_s: float, now: Now, changed: dict[str, Incident]) -> None:
    for index, item in enumerate(live):
        known = next((seen for seen in item.incident.seen if seen.signal.key == signal.key), None)
        if known is None:
            continue
        if signal.lasting and known.active:
            return  # the same condition, still there
        if not signal.lasting and signal.origin and signal.origin == known.signal.origin:
            return  # the same record of the log, read again after a restart
        if signal.lasting or now.mono_s - item.last_signal_s < burst_quiet_s:
            again = replace(known, active=signal.lasting, count=known.count + 1)
            again = replace(again, signal=signal) if not signal.lasting else again
            seen = tuple(again if seen is known else seen for seen in item.incident.seen)
            _put(live, index, replace(item.incident, seen=seen), now, changed)
            return
    new = Seen(signal, now.unix_s, signal.lasting)
    for index in reversed(range(len(live))):
        item = live[index]
        if item.incident.drill == signal.drill and (
            now.mono_s - item.last_signal_s < burst_quiet_s or _goes_on(item.incident, signal)
        ):
            incident = item.incident
            if len(incident.seen) >= MAX_SIGNALS:
                incident = replace(incident, not_kept=incident.not_kept + 1)
            else:
                incident = replace(incident, seen=(*incident.seen, new))
            _put(live, index, incident, now, changed)
            return
    if _hollow(signal) == 2:
        return  # a cleanup or a recovery notice alone is no incident: a job that was killed prints an Xid 45
    name = _name(now)
    incident = Incident(name, now.unix_s, (new,), last_signal_unix_s=now.unix_s)
    live.append(Live(incident, now.mono_s, now.mono_s + _settle_s(signal)))
    changed[incident.id] = incident


def _goes_on(incident: Incident, signal: Signal) -> bool:
    """The same sensor now says something else about the same thing: a frozen engine that died, a dead card that vanished."""
    return signal.lasting and any(
        (item.signal.sensor, item.signal.bdf, item.signal.subject) == (signal.sensor, signal.bdf, signal.subject)
        for item in incident.seen
        if item.signal.lasting
    )


def _put(live: list[Live], index: int, incident: Incident, now: Now, changed: dict[str, Incident]) -> None:
    incident = replace(incident, last_signal_unix_s=now.unix_s)
    changed[incident.id] = incident
    item = live[index]
    due_s = item.alert_due_s
    if news := incident.news:
        settled_s = now.mono_s + _settle_s(news.signal)
        due_s = settled_s if due_s is None else min(due_s, settled_s)
    live[index] = replace(item, incident=incident, last_signal_s=now.mono_s, alert_due_s=due_s)


def _settle_s(signal: Signal) -> float:
    return SETTLE_SYMPTOM_S if _hollow(signal) else SETTLE_HARDWARE_S


def _name(now: Now) -> str:
    """A name that sorts by time and stays one of its kind when the clock is set back."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now.unix_s))}-{int(now.mono_s * 1e6) & 0xFFFFFFFF:08x}"


def tick(tracker: Tracker, now: Now) -> Step:
    """Let time pass: alerts whose moment has come, and incidents that are over."""
    live: list[Live] = []
    changed: list[Incident] = []
    alerts: list[Alert] = []
    for item in tracker.live:
        incident = item.incident
        if item.alert_due_s is not None and now.mono_s >= item.alert_due_s:
            kind: AlertKind = "worse" if incident.told_rank >= 0 else "opened"
            # Its first alert is called after the lead; a later one after what is new.
            subject = (incident.news if kind == "worse" else None) or incident.lead
            told = tuple(dict.fromkeys(_token(seen.signal) for seen in incident.seen))
            incident = replace(incident, told_rank=rank(incident.lead.signal), told=told)
            alerts.append(Alert(kind, incident, subject))
            changed.append(incident)
            item = replace(item, incident=incident, alert_due_s=None)
        clear_since_s = None if incident.has_active else item.clear_since_s if item.clear_since_s is not None else now.mono_s
        item = replace(item, clear_since_s=clear_since_s)
        if _over(item, tracker, now):
            state: State = "recovered" if _had_conditions(incident) else "closed"
            incident = replace(incident, state=state, closed_unix_s=now.unix_s)
            changed.append(incident)
            if state == "recovered":
                alerts.append(Alert("recovered", incident, incident.lead))
        else:
            live.append(item)
    last = {incident.id: incident for incident in changed}
    return Step(replace(tracker, live=tuple(live)), tuple(last.values()), tuple(alerts))


def _over(item: Live, tracker: Tracker, now: Now) -> bool:
    if item.clear_since_s is None or item.alert_due_s is not None:
        return False
    if _had_conditions(item.incident):
        return now.mono_s - item.clear_since_s >= tracker.recovered_after_s
    return now.mono_s - item.last_signal_s >= tracker.burst_quiet_s


def _had_conditions(incident: Incident) -> bool:
    return any(seen.signal.lasting for seen in incident.seen)


def next_due_s(tracker: Tracker, now: Now) -> float:
    """Seconds until something falls due, at most one second."""
    due = [item.alert_due_s - now.mono_s for item in tracker.live if item.alert_due_s is not None]
    return min(1.0, max(0.01, *due)) if due else 1.0


# ---- on disk ------------------------------------------------------------------------------------------------------------


class StoredError(ValueError):
    """A stored incident that can't be read."""


def to_json(incident: Incident) -> dict[str, Any]:
    """An incident as it is written, with what a reader wants to know spelled out."""
    return {
        "schema": SCHEMA,
        "id": incident.id,
        "state": incident.state,
        "class": incident.incident_class,
        "severity": incident.severity,
        "drill": incident.drill,
        "cards": list(incident.cards),
        "opened_unix_s": incident.opened_unix_s,
        "closed_unix_s": incident.closed_unix_s,
        "last_signal_unix_s": incident.last_signal_unix_s,
        "root": {"kind": incident.root.signal.kind, "bdf": incident.root.signal.bdf, "xid": incident.root.signal.xid},
        "told_rank": incident.told_rank,
        "told": list(incident.told),
        "not_kept": incident.not_kept,
        "signals": [
            {
                "kind": item.signal.kind,
                "sensor": item.signal.sensor,
                "bdf": item.signal.bdf,
                "xid": item.signal.xid,
                "subject": item.signal.subject,
                "seen": item.signal.seen,
                "values": dict(item.signal.values),
                "lasting": item.signal.lasting,
                "origin": item.signal.origin,
                "drill": item.signal.drill,
                "first_unix_s": item.first_unix_s,
                "active": item.active,
                "count": item.count,
            }
            for item in incident.seen
        ],
    }


def _state(value: Any) -> State:
    if value not in get_args(State):
        raise StoredError(f"state {value!r}")
    found: State = value
    return found


def from_json(raw: Mapping[str, Any]) -> Incident:
    """A stored incident. Errors: StoredError."""
    try:
        if raw["schema"] != SCHEMA:
            raise StoredError(f"schema {raw['schema']}, this laoka reads {SCHEMA}")
        seen = tuple(
            Seen(
                Signal(
                    kind=item["kind"],
                    sensor=item["sensor"],
                    bdf=item["bdf"],
                    xid=item["xid"],
                    subject=item["subject"],
                    seen=item["seen"],
                    values=item["values"],
                    lasting=item["lasting"],
                    origin=item["origin"],
                    drill=item["drill"],
                ),
                float(item["first_unix_s"]),
                bool(item["active"]),
                int(item["count"]),
            )
            for item in raw["signals"]
        )
        if not seen or any(item.signal.kind != "xid" and item.signal.kind not in CLASS_OF_KIND for item in seen):
            raise StoredError("no signal, or one of a kind that this laoka does not know")
        return Incident(
            id=raw["id"],
            opened_unix_s=float(raw["opened_unix_s"]),
            seen=seen,
            state=_state(raw["state"]),
            closed_unix_s=raw["closed_unix_s"],
            last_signal_unix_s=float(raw["last_signal_unix_s"]),
            told_rank=int(raw["told_rank"]),
            told=tuple(raw["told"]),
            not_kept=int(raw["not_kept"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StoredError(str(error)) from None
