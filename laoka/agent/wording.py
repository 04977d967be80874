"""Incidents in words for people: title and body of an alert, in English or Chinese. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from laoka.agent.config import Config
from laoka.agent.history import Row
from laoka.agent.incidents import Alert, Incident, Seen
from laoka.agent.ladder import Decision
from laoka.agent.signals import Signal
from laoka.catalog import gpus, xids
from laoka.catalog.messages import text

MAX_SEEN_LINES = 12


@dataclass(frozen=True)
class Words:
    """What an alert says."""

    title: str
    body: str


def of_alert(alert: Alert, config: Config, decision: Decision | None = None, tried: Sequence[Row] = ()) -> Words:
    """Title and body of an alert about an incident; `decision` is what the ladder does next, `tried` what it did."""
    lang, kind, incident = config.lang, alert.kind, alert.incident
    title = text(
        f"watchdog.title.{kind}",
        lang,
        marks=marks(config, drill=incident.drill),
        host=config.host,
        what=headline(incident, alert.subject.signal, config),
        card=concerned(incident, alert.subject.signal, config),
    )
    lines = [f"{_clock(item.first_unix_s)} {line_of(item, config)}" for item in incident.seen[:MAX_SEEN_LINES]]
    hidden = len(incident.seen) - len(lines) + incident.not_kept
    if hidden:
        lines.append(text("watchdog.body.not_kept", lang, count=hidden))
    values = {"seen": "\n".join(lines), "id": incident.id}
    if kind == "recovered":
        lasted = _lasted((incident.closed_unix_s or incident.opened_unix_s) - incident.opened_unix_s)
        done = steps_done(tried, config)
        doing = text("watchdog.doing.did", lang, steps=done) if done else text("watchdog.doing.did_nothing", lang)
        body = text("watchdog.body.recovered", lang, **values, lasted=lasted, next=_after(incident, config), doing=doing)
    else:
        why = text(f"watchdog.why.{incident.class_of(alert.subject.signal)}", lang)
        body = text(
            "watchdog.body.opened",
            lang,
            **values,
            why=why,
            next=next_step(incident, alert.subject.signal, config),
            doing=doing_next(decision, config),
        )
    return Words(title, _noted(incident, body, config))


def _noted(incident: Incident, body: str, config: Config) -> str:
    notes = [text("watchdog.body.drill", config.lang)] if incident.drill else []
    notes += [text("watchdog.body.simulated", config.lang)] if config.simulated else []
    return "\n\n".join([*notes, body])


def doing_next(decision: Decision | None, config: Config) -> str:
    """What the watchdog will do by itself, or why it does nothing."""
    lang = config.lang
    if decision is None or not decision.rungs:
        return text("watchdog.doing.nothing", lang)
    left = [rung.step for rung in decision.rungs if rung.hindrance not in ("done", "needless")]
    step = decision.step or (left[0] if left else None)
    if decision.mode in ("act", "wait") and step:
        return text("watchdog.doing.next", lang, step=text(f"watchdog.step.{step}", lang))
    reason = text(f"watchdog.hindrance.{decision.reason or 'tried_all'}", lang)
    if decision.mode == "blocked" and left:
        would = next((item for item in left if item != "stop_users"), left[0])
        return text("watchdog.doing.blocked", lang, reason=reason, step=text(f"watchdog.step.{would}", lang))
    return text("watchdog.doing.not_now", lang, reason=reason)


def steps_done(tried: Sequence[Row], config: Config) -> str:
    """What was tried and how it ended, a line each."""
    lines = []
    for row in tried:
        step = text(f"watchdog.step.{row.attempt.step}", config.lang)
        outcome = text(f"watchdog.outcome.{row.attempt.outcome or 'running'}", config.lang)
        detail = f" ({row.attempt.detail})" if row.attempt.detail else ""
        lines.append(f"{_clock(row.begun_unix_s)} {step}: {outcome}{detail}")
    return "\n".join(lines)


def of_step(incident: Incident, step: str, config: Config) -> Words:
    """What is told before a step that takes the host down."""
    return _of_ladder("step", incident, config, step=text(f"watchdog.step.{step}", config.lang))


def of_end(incident: Incident, decision: Decision, tried: Sequence[Row], config: Config) -> Words:
    """What is told when the ladder is at its end: a card was given up, or a person has to come."""
    reason = text(f"watchdog.hindrance.{decision.reason or 'tried_all'}", config.lang)
    steps = steps_done(tried, config) or text("watchdog.tried_nothing", config.lang)
    return _of_ladder("gave_up", incident, config, reason=reason, steps=steps)


def _of_ladder(name: str, incident: Incident, config: Config, **more: str) -> Words:
    lead = incident.lead.signal
    values = {
        "marks": marks(config, drill=incident.drill),
        "host": config.host,
        "what": headline(incident, lead, config),
        "card": concerned(incident, lead, config),
        "next": next_step(incident, lead, config),
        "id": incident.id,
        **more,
    }
    body = text(f"watchdog.body.{name}", config.lang, **values)
    return Words(text(f"watchdog.title.{name}", config.lang, **values), _noted(incident, body, config))


def marks(config: Config, *, drill: bool = False) -> str:
    """What must stand before everything: that the card is simulated, that this is a drill."""
    found = [text("watchdog.simulated", config.lang)] if config.simulated else []
    found += [text("watchdog.drill", config.lang)] if drill else []
    return "".join(f"{mark} " for mark in found)


def headline(incident: Incident, subject: Signal, config: Config) -> str:
    """What happened, in a few words; with the Xid's number where it is one."""
    what = text(f"watchdog.class.{incident.class_of(subject)}", config.lang)
    return f"{what} (Xid {subject.xid})" if subject.xid is not None else what


def concerned(incident: Incident, subject: Signal, config: Config) -> str:
    """The card of an incident, with name, address and slot; and how many more."""
    cards = tuple(dict.fromkeys(bdf for bdf in (subject.bdf, *incident.cards) if bdf))
    if not cards:
        return text("watchdog.card.none", config.lang)
    first = card(cards[0], config)
    known = [bdf for bdf in cards[1:] if any(gpu.bdf == bdf for gpu in config.gpu)]
    return text("watchdog.cards.more", config.lang, card=first, count=len(known)) if known else first


def card(bdf: str, config: Config) -> str:
    """A card as a person knows it. Its name is the catalogue's for the PCI id that the inventory gives."""
    expected = next((gpu for gpu in config.gpu if gpu.bdf == bdf), None)
    if expected is None:
        return text("watchdog.card.unexpected", config.lang, bdf=bdf)
    row = gpus.by_device_id(expected.device_id)
    slot = expected.slot or text("watchdog.slot.unknown", config.lang)
    return text("watchdog.card", config.lang, name=row.name if row else expected.device_id, bdf=bdf, slot=slot)


def line_of(item: Seen, config: Config) -> str:
    """One signal in words."""
    signal = item.signal
    values: dict[str, object] = {"bdf": signal.bdf or "?", "subject": signal.subject, **signal.values}
    if signal.kind == "xid" and signal.xid is not None:
        row = xids.by_number(signal.xid)
        unknown = "not in the catalogue" if config.lang == "en" else "资料库中没有"
        name = unknown if row is None else row.name if config.lang == "en" else row.name_zh
        values = {"xid": signal.xid, "name": name, "body": "", **values}
    line = text(f"watchdog.seen.{signal.kind}", config.lang, **values)
    return f"{line} (x{item.count})" if item.count > 1 else line


def next_step(incident: Incident, subject: Signal, config: Config) -> str:
    """What to do: about the Xid first, where it is one, then about the class."""
    lang = config.lang
    limit = "?" if config.power_limit_w is None else f"{config.power_limit_w:g}"
    values = {"bdf": subject.bdf or "BDF", "unit": config.unit or "qwen-serve.service", "limit": limit}
    steps = [text(f"watchdog.next.{incident.class_of(subject)}", lang, **values)]
    row = xids.by_number(subject.xid) if subject.xid is not None else None
    if row is not None:
        steps.insert(0, text(f"watchdog.action.{row.action}", lang, **values))
    return " ".join(steps)


def _after(incident: Incident, config: Config) -> str:
    if incident.incident_class in ("card_gone", "off_bus", "card_swapped", "driver_mismatch", "driver_missing", "nvml_hung"):
        return text("watchdog.next.recovered", config.lang)
    if incident.incident_class.startswith("engine_"):
        return text("watchdog.next.recovered_engine", config.lang, unit=config.unit or "qwen-serve.service")
    return text("watchdog.next.recovered_other", config.lang)


def _clock(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def _lasted(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
