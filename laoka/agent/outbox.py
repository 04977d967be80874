"""The alerts' way out: one JSON file each until every channel has it, in order, retried with back-off, capped per hour.

An alert's name is its incident and its kind, so the same one is never queued twice, not even after a crash. That a message is about
to be sent is noted before it is. A crash between the channel's yes and our note of it leaves open whether it arrived: it is then
sent once more with a mark that says so. Better marked and twice than never.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from laoka.agent.clock import Now, now
from laoka.files import write_atomic

FILE_MODE = 0o600
DONE_KEPT = 200
PENDING_MAX = 500
BACKOFF_S = (2.0, 5.0, 15.0, 60.0, 120.0)
HOUR_S = 3600.0
_WEIGHT = ("notice", "warning", "critical")
SEVERITIES = frozenset(_WEIGHT)


@dataclass(frozen=True)
class Alert:
    """A message on its way. `delivered` are the channels that have it, by `channel_name`; `begun` those that may have it."""

    name: str
    sequence: int
    created_unix_s: float
    kind: str
    title: str
    body: str
    delivered: tuple[str, ...] = ()
    begun: tuple[str, ...] = ()
    severity: str = "critical"
    incident: str = ""

    @property
    def file_name(self) -> str:
        return f"{self.sequence:08d}_{self.name}.json"


Send = Callable[[str, str, str, str], bool]
"""Sends (url, title, body, kind) and says whether the channel took it; must come back within its own time-out."""


def channel_name(url: str) -> str:
    """What a channel is called where its secrets must not be: its scheme and a fingerprint."""
    scheme = url.partition("://")[0]
    return f"{scheme if scheme.isalnum() else 'channel'}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Addresses:
    """Where alerts go. `routes`: the severities of a channel that does not take all; `heartbeat`: what is asked to say "I live"."""

    urls: tuple[str, ...] = ()
    routes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    heartbeat: str = ""

    def takes(self, url: str, severity: str) -> bool:
        return severity in self.routes.get(url, SEVERITIES)


def parse_addresses(text: str) -> Addresses:
    """The addresses of a file: one a line, `critical,warning = ADDRESS` for one that takes only these, `heartbeat = URL`; # begins
    a comment.
    """
    urls: list[str] = []
    routes: dict[str, frozenset[str]] = {}
    heartbeat = ""
    for line in (line.strip() for line in text.splitlines()):
        if not line or line.startswith("#"):
            continue
        head, equals, rest = line.partition("=")
        names = frozenset(name.strip() for name in head.split(","))
        if equals and head.strip() == "heartbeat":
            heartbeat = rest.strip()
        elif equals and names <= SEVERITIES:
            url = rest.strip()
            urls.append(url)
            routes[url] = routes.get(url, frozenset()) | names
        else:
            urls.append(line)
    return Addresses(tuple(dict.fromkeys(urls)), routes, heartbeat)


def read_addresses(config_path: str) -> tuple[Addresses, str]:
    """The addresses and where they came from. systemd's credential goes before the file. Errors: OSError, UnicodeDecodeError
    when neither can be read; the addresses themselves are never part of a message.
    """
    credentials = os.environ.get("CREDENTIALS_DIRECTORY")
    paths = [Path(credentials) / "alert-urls"] if credentials else []
    path = next((path for path in paths if path.exists()), Path(config_path))
    return parse_addresses(path.read_text(encoding="utf-8")), str(path)


def read_urls(config_path: str) -> tuple[tuple[str, ...], str]:
    """Alert addresses and where they came from. systemd's credential goes before the file. Errors: OSError when neither
    can be read; the addresses themselves are never part of a message.
    """
    addresses, source = read_addresses(config_path)
    return addresses.urls, source


def is_quiet(quiet_hours: str, minute_of_day: int) -> bool:
    """Whether a minute of the day (local time) lies in `22:30-07:00`; an empty text has none."""
    if not quiet_hours:
        return False
    begin, end = (int(part[:2]) * 60 + int(part[3:]) for part in quiet_hours.split("-"))
    return begin <= minute_of_day < end if begin <= end else minute_of_day >= begin or minute_of_day < end


class Outbox:
    """The queue. `put` and `held_back` are called by the main loop, `deliver` by the sender's thread."""

    def __init__(self, folder: Path, *, per_hour: int, quiet_hours: str = "", now: Callable[[], Now] = now) -> None:
        self._now = now
        self._quiet_hours = quiet_hours
        self._titles: dict[str, float] = {}
        self._folder = folder
        self._done = folder / "done"
        self._held = folder / "held"
        self._per_hour = per_hour
        self._lock = threading.Lock()
        self._pending: dict[str, Alert] = {}
        self._held_back: dict[str, Alert] = {}
        self._known: set[str] = set()
        self._sent_at: list[float] = []
        self._retry: dict[str, tuple[int, float]] = {}
        self.faults: list[str] = []
        self.dropped = 0
        self.delivered_total = 0
        self.failures_total = 0
        self._load()

    def _load(self) -> None:
        now_unix_s, now_s = self._now().unix_s, self._now().mono_s
        sequence = 0
        for folder, into in ((self._folder, self._pending), (self._held, self._held_back), (self._done, None)):
            for path in sorted(folder.glob("*.json")):
                sequence = max(sequence, _number(path.name.partition("_")[0]))
                try:
                    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                    alert = Alert(**{**raw, "delivered": tuple(raw["delivered"]), "begun": tuple(raw.get("begun", ()))})
                except (OSError, ValueError, TypeError, KeyError):
                    self.faults.append(f"{path}: not readable; set aside")
                    with contextlib.suppress(OSError):
                        path.rename(path.with_name(f"{path.name}.unreadable"))
                    continue
                self._known.add(alert.name)
                if into is not None:
                    into[alert.name] = alert
                if folder != self._held and 0 <= (age_s := now_unix_s - alert.created_unix_s) < HOUR_S:
                    self._sent_at.append(now_s - age_s)
        self._sequence = sequence

    def put(self, name: str, kind: str, title: str, body: str, *, severity: str = "critical", incident: str = "") -> bool:
        """Queue an alert; False when one of this name was queued before, delivered or not. A disk that is full does not
        stop it: it is then kept in memory until the disk takes it.
        """
        with self._lock:
            if name in self._known:
                return False
            self._known.add(name)
            self._sequence += 1
            now = self._now()
            alert = Alert(name, self._sequence, now.unix_s, kind, title, body, severity=severity, incident=incident)
            if self._why_held(alert, now):
                self._held_back[name] = alert
                self._write(self._held, alert)
                return True
            self._queue(alert)
            return True

    def _why_held(self, alert: Alert, now: Now) -> str:
        """Why an alert has to wait: the hour is full; it is not critical, and these are quiet hours, or the same was told within
        the hour, or what it belongs to is held itself.
        """
        self._sent_at = [at for at in self._sent_at if now.mono_s - at < HOUR_S]
        if len(self._sent_at) >= self._per_hour:
            return "cap"
        if alert.severity == "critical":
            return ""
        local = time.localtime(now.unix_s)
        if is_quiet(self._quiet_hours, local.tm_hour * 60 + local.tm_min):
            return "quiet"
        told_s = self._titles.get(alert.title)
        if told_s is not None and now.mono_s - told_s < HOUR_S:
            return "repeat"
        others = (other.incident for other in self._held_back.values() if other.name != alert.name)
        return "with" if alert.incident and alert.incident in others else ""

    def _queue(self, alert: Alert) -> None:
        now_s = self._now().mono_s
        self._sent_at.append(now_s)
        self._titles = {title: at for title, at in self._titles.items() if now_s - at < HOUR_S} | {alert.title: now_s}
        self._pending[alert.name] = alert
        self._write(self._folder, alert)
        while len(self._pending) > PENDING_MAX:
            oldest = min(self._pending.values(), key=lambda item: item.sequence)
            self.dropped += 1
            self._finish(oldest)

    def release(self, summary: Callable[[Sequence[str]], tuple[str, str]]) -> bool:
        """When the hour has room again, queue one summary of what was held back; True when there was something.

        `summary` makes title and body of the titles held back.
        """
        with self._lock:
            now = self._now()
            held = sorted(self._held_back.values(), key=lambda item: item.sequence)
            if not held or any(self._why_held(alert, now) in ("cap", "quiet", "repeat") for alert in held):
                return False
            title, body = summary([alert.title for alert in held])
            self._sequence += 1
            name = f"summary-{held[-1].sequence:08d}"
            self._known.add(name)
            worst = max((alert.severity for alert in held), key=_WEIGHT.index)
            self._queue(Alert(name, self._sequence, now.unix_s, "summary", title, body, severity=worst))
            for alert in held:
                del self._held_back[alert.name]
                self._write(self._done, alert)
                with contextlib.suppress(OSError):
                    (self._held / alert.file_name).unlink()
            return True

    def deliver(self, addresses: Addresses, send: Send, again: str = "({title})") -> float:
        """Send what is due, each channel in order; a channel that fails waits, the others go on. Returns the seconds until
        the next try, or a minute when nothing waits. `again` makes the title of a message that may have arrived before a crash.
        """
        with self._lock:
            queue = sorted(self._pending.values(), key=lambda item: item.sequence)
        names = {channel_name(url): url for url in addresses.urls}
        stopped: set[str] = set()
        for alert in queue:
            current = alert
            wanted = {channel: url for channel, url in names.items() if addresses.takes(url, alert.severity)}
            for channel, url in wanted.items():
                if channel in current.delivered or channel in stopped:
                    continue
                tries, not_before_s = self._retry.get(channel, (0, 0.0))
                if self._now().mono_s < not_before_s:
                    stopped.add(channel)
                    continue
                title = again.format(title=current.title) if channel in current.begun else current.title
                current = self._noted(current, begun=(*current.begun, channel))
                if send(url, title, current.body, current.kind):
                    self._retry.pop(channel, None)
                    self.delivered_total += 1
                    current = replace(current, delivered=(*current.delivered, channel))
                    with self._lock:
                        self._pending[current.name] = current
                        self._write(self._folder, current)
                else:
                    self.failures_total += 1
                    current = self._noted(current, begun=tuple(name for name in current.begun if name != channel))
                    wait_s = BACKOFF_S[min(tries, len(BACKOFF_S) - 1)]
                    self._retry[channel] = (tries + 1, self._now().mono_s + wait_s)
                    stopped.add(channel)
            if set(wanted) <= set(current.delivered):
                with self._lock:
                    self._finish(current)
        due = [at for _, at in self._retry.values()]
        return max(0.1, min(due) - self._now().mono_s) if due and self.waiting else 60.0

    def _noted(self, alert: Alert, *, begun: tuple[str, ...]) -> Alert:
        with self._lock:
            noted = replace(alert, begun=tuple(dict.fromkeys(begun)))
            self._pending[noted.name] = noted
            self._write(self._folder, noted)
            return noted

    def _finish(self, alert: Alert) -> None:
        self._pending.pop(alert.name, None)
        self._write(self._done, alert)
        with contextlib.suppress(OSError):
            (self._folder / alert.file_name).unlink()
        with contextlib.suppress(OSError):
            old = sorted(self._done.glob("*.json"))
            for path in old[: max(0, len(old) - DONE_KEPT)]:
                path.unlink()

    def _write(self, folder: Path, alert: Alert) -> None:
        try:
            write_atomic(folder / alert.file_name, json.dumps(asdict(alert), ensure_ascii=False) + "\n", FILE_MODE)
        except OSError as error:
            self.faults.append(f"{folder / alert.file_name}: {error.strerror}: kept in memory")

    @property
    def waiting(self) -> int:
        """Alerts that some channel does not have yet."""
        return len(self._pending)

    @property
    def held(self) -> int:
        """Alerts held back by the hourly cap."""
        return len(self._held_back)

    def failing(self) -> dict[str, int]:
        """Channels whose last try failed, and how often in a row."""
        return {channel: tries for channel, (tries, _) in list(self._retry.items())}


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0
