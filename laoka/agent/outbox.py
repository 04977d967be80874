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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from laoka.files import write_atomic

FILE_MODE = 0o600
DONE_KEPT = 200
PENDING_MAX = 500
BACKOFF_S = (2.0, 5.0, 15.0, 60.0, 120.0, 300.0)
HOUR_S = 3600.0


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

    @property
    def file_name(self) -> str:
        return f"{self.sequence:08d}_{self.name}.json"


Send = Callable[[str, str, str, str], bool]
"""Sends (url, title, body, kind) and says whether the channel took it; must come back within its own time-out."""


def channel_name(url: str) -> str:
    """What a channel is called where its secrets must not be: its scheme and a fingerprint."""
    scheme = url.partition("://")[0]
    return f"{scheme if scheme.isalnum() else 'channel'}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def read_urls(config_path: str) -> tuple[tuple[str, ...], str]:
    """Alert addresses and where they came from. systemd's credential goes before the file. Errors: OSError when neither
    can be read; the addresses themselves are never part of a message.
    """
    credentials = os.environ.get("CREDENTIALS_DIRECTORY")
    paths = [Path(credentials) / "alert-urls"] if credentials else []
    path = next((path for path in paths if path.exists()), Path(config_path))
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#"))), str(path)


class Outbox:
    """The queue. `put` and `held_back` are called by the main loop, `deliver` by the sender's thread."""

    def __init__(self, folder: Path, *, per_hour: int) -> None:
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
        now_unix_s, now_s = time.time(), time.monotonic()
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

    def put(self, name: str, kind: str, title: str, body: str) -> bool:
        """Queue an alert; False when one of this name was queued before, delivered or not. A disk that is full does not
        stop it: it is then kept in memory until the disk takes it.
        """
        with self._lock:
            if name in self._known:
                return False
            self._known.add(name)
            self._sequence += 1
            alert = Alert(name, self._sequence, time.time(), kind, title, body)
            self._sent_at = [at for at in self._sent_at if time.monotonic() - at < HOUR_S]
            if len(self._sent_at) >= self._per_hour:
                self._held_back[name] = alert
                self._write(self._held, alert)
                return True
            self._queue(alert)
            return True

    def _queue(self, alert: Alert) -> None:
        self._sent_at.append(time.monotonic())
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
            self._sent_at = [at for at in self._sent_at if time.monotonic() - at < HOUR_S]
            if not self._held_back or len(self._sent_at) >= self._per_hour:
                return False
            held = sorted(self._held_back.values(), key=lambda item: item.sequence)
            title, body = summary([alert.title for alert in held])
            self._sequence += 1
            name = f"summary-{held[-1].sequence:08d}"
            self._known.add(name)
            self._queue(Alert(name, self._sequence, time.time(), "summary", title, body))
            for alert in held:
                del self._held_back[alert.name]
                self._write(self._done, alert)
                with contextlib.suppress(OSError):
                    (self._held / alert.file_name).unlink()
            return True

    def deliver(self, urls: Sequence[str], send: Send, again: str = "({title})") -> float:
        """Send what is due, each channel in order; a channel that fails waits, the others go on. Returns the seconds until
        the next try, or a minute when nothing waits. `again` makes the title of a message that may have arrived before a crash.
        """
        with self._lock:
            queue = sorted(self._pending.values(), key=lambda item: item.sequence)
        names = {channel_name(url): url for url in urls}
        stopped: set[str] = set()
        for alert in queue:
            current = alert
            for channel, url in names.items():
                if channel in current.delivered or channel in stopped:
                    continue
                tries, not_before_s = self._retry.get(channel, (0, 0.0))
                if time.monotonic() < not_before_s:
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
                    self._retry[channel] = (tries + 1, time.monotonic() + wait_s)
                    stopped.add(channel)
            if set(names) <= set(current.delivered):
                with self._lock:
                    self._finish(current)
        due = [at for _, at in self._retry.values()]
        return max(0.1, min(due) - time.monotonic()) if due and self.waiting else 60.0

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
