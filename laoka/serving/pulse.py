"""The pulse of a running engine: signs of life from what passes by, from its counters, and, when it is idle, from a completion.

A busy engine may let a completion wait for minutes (a long prefill, every seat taken), an idle one may be frozen while /health says
200. So silence is measured from the last sign of life of any kind, and only an engine that is silent is asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from laoka.serving.completion import Server, Verdict, ask, health_status, metrics_text
from laoka.serving.progress import Progress, parse_progress

METRICS_DEADLINE_S = 5.0


@dataclass(frozen=True)
class Beat:
    """How long the engine has been silent, and what the last completion asked for said when it was not healthy."""

    silent_s: float
    verdict: Verdict | None
    progress: Progress | None

    def words(self) -> str:
        """One line of evidence."""
        busy = self.progress is not None and self.progress.running + self.progress.waiting > 0
        if busy and self.progress is not None:
            load = f"{self.progress.running} requests running and {self.progress.waiting} waiting, but no token"
        else:
            load = "no sign of life"
        asked = f"; {self.verdict.detail}" if self.verdict and not self.verdict.healthy else ""
        return f"{load} for {self.silent_s:.0f} s{asked}"


class Pulse:
    """Watches one engine. `note()` may be called by any thread that saw it work; `look()` by one thread, again and again."""

    def __init__(self, server: Server, *, ask_after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`ask_after_s`: silence after which it is asked for a one-token completion; each ask waits twice as long."""
        self._server = server
        self._ask_after_s = ask_after_s
        self._clock = clock
        self._last_s = clock()
        self.seen = False
        """Whether there was any sign of life yet."""
        self.down = ""
        """Why it is known to be down: its port is closed, or it says itself that its engine is dead; empty when it is not."""
        self._progress: Progress | None = None
        self._verdict: Verdict | None = None
        self._asking: threading.Thread | None = None

    def note(self) -> None:
        """The engine did something just now."""
        self._last_s = self._clock()
        self.seen = True

    def silent_s(self) -> float:
        """How long there was no sign of life."""
        return self._clock() - self._last_s

    def look(self) -> Beat:
        """Read the counters, and ask when it is silent; takes as long as /health and /metrics do, a few seconds at most."""
        health, said = health_status(self._server)
        self.down = f"/health says {said}" if health == 503 or (health is None and "refused" in said) else ""
        if self.down:
            return Beat(self.silent_s(), self._verdict, None)
        progress = parse_progress(metrics_text(self._server, METRICS_DEADLINE_S))
        if progress is not None and self._progress is not None and progress.moved != self._progress.moved:
            self.note()
        if progress is not None:
            self._progress = progress
        asking = self._asking is not None and self._asking.is_alive()
        if not asking and (not self.seen or self.silent_s() >= self._ask_after_s):
            self._asking = threading.Thread(target=self._ask, name="pulse", daemon=True)
            self._asking.start()
        return Beat(self.silent_s(), self._verdict, progress)

    def _ask(self) -> None:
        verdict = ask(self._server, max_tokens=1, deadline_s=2 * self._ask_after_s)
        if verdict.healthy:
            self.note()
        self._verdict = verdict
