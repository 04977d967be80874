"""Incidents in words for people: title and body of an alert, in English or Chinese. Pure."""

from __future__ import annotations

import time
from dataclasses import dataclass

from laoka.agent.config import Config
from laoka.agent.incidents import Alert, Incident, Seen
from laoka.agent.signals import Signal
from laoka.catalog import gpus, xids
from laoka.catalog.messages import text

MAX_SEEN_LINES = 12


@dataclass(frozen=True)
class Words:
    """What an alert says."""

    title: str
    body: str


def of_alert(alert: Alert, config: Config) -> Words:
    """Title and body of an alert about an incident."""
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
        body = text("watchdog.body.recovered", lang, **values, lasted=lasted, next=_after(incident, config))
    else:
        why = text(f"watchdog.why.{incident.class_of(alert.subject.signal)}", lang)
        body = text("watchdog.body.opened", lang, **values, why=why, next=next_step(incident, alert.subject.signal, config))
    notes = [text("watchdog.body.drill", lang)] if incident.drill else []
    notes += [text("watchdog.body.simulated", lang)] if config.simulated else []
    return Words(title, "\n\n".join([*notes, body]))


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
        unknown = "not in the catalogue" if config.lang == "en" else "目录中没有"
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
