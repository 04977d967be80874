"""What the ladder tried, in SQLite: begun before it is done, ended after it, so that a kill or a reboot loses no count.

Also here: the watchdog's running time, the last boot and whether it ended in order, and the cards that were given up.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laoka.agent.ladder import DAY_S, Attempt

_TABLES = """
CREATE TABLE IF NOT EXISTS attempts (
  number INTEGER PRIMARY KEY, incident TEXT NOT NULL, class TEXT NOT NULL, step TEXT NOT NULL, cards TEXT NOT NULL,
  drill INTEGER NOT NULL, boot_id TEXT NOT NULL, begun_unix_s REAL NOT NULL, begun_run_s REAL NOT NULL,
  outcome TEXT NOT NULL DEFAULT '', detail TEXT NOT NULL DEFAULT ''
);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS fences (card TEXT PRIMARY KEY, incident TEXT NOT NULL, since_unix_s REAL NOT NULL);
"""
KEPT = 2000
REBOOTED = "booted"


@dataclass(frozen=True)
class Row:
    """An attempt with what people want to know of it."""

    attempt: Attempt
    incident_class: str
    cards: tuple[str, ...]
    begun_unix_s: float


class History:
    """The database. Errors: sqlite3.Error from every method where the disk does not take it; nothing is then counted as done."""

    def __init__(self, path: Path, boot_id: str) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._boot_id = boot_id
        self._base = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
        path.chmod(0o600)
        # Every count is on the disk before the step that it counts: a power cut during a reset must not lose it.
        self._base.execute("PRAGMA synchronous=FULL")
        self._base.executescript(_TABLES)

    def close(self) -> None:
        self._base.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._base.execute("BEGIN IMMEDIATE")
        try:
            yield self._base
        except BaseException:
            self._base.execute("ROLLBACK")
            raise
        self._base.execute("COMMIT")

    # ---- attempts ----

    def begin(
        self, incident: str, incident_class: str, step: str, cards: tuple[str, ...], *, drill: bool, unix_s: float, run_s: float
    ) -> int:
        """Note that a step is about to be taken; returns its number."""
        values = (incident, incident_class, step, " ".join(cards), int(drill), self._boot_id, unix_s, run_s)
        with self._transaction() as base:
            done = base.execute(
                "INSERT INTO attempts (incident, class, step, cards, drill, boot_id, begun_unix_s, begun_run_s) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                values,
            )
            base.execute("DELETE FROM attempts WHERE number <= ?", ((done.lastrowid or 0) - KEPT,))
            return int(done.lastrowid or 0)

    def end(self, number: int, outcome: str, detail: str) -> None:
        """Note how a step ended."""
        self._base.execute("UPDATE attempts SET outcome = ?, detail = ? WHERE number = ?", (outcome, detail[:2000], number))

    def end_interrupted(self) -> tuple[tuple[str, str], ...]:
        """Steps that an earlier run of the watchdog left open: a reboot that came true, or interrupted. Returns step and outcome of
        each, drills left out.
        """
        with self._transaction() as base:
            # By hand, not RETURNING: that needs SQLite 3.35, and Debian 11 has 3.34.
            left = base.execute("SELECT number, step, boot_id, drill FROM attempts WHERE outcome = '' ORDER BY number").fetchall()
            ended = [
                (number, step, REBOOTED if boot_id != self._boot_id and step in ("reboot", "cold_cycle") else "interrupted", drill)
                for number, step, boot_id, drill in left
            ]
            base.executemany("UPDATE attempts SET outcome = ? WHERE number = ?", [(how, number) for number, _, how, _ in ended])
        return tuple((step, how) for _, step, how, drill in ended if not drill)

    def attempts(self, incidents: tuple[str, ...], run_s: float) -> tuple[Attempt, ...]:
        """Attempts of the last day and those of `incidents`, oldest first."""
        found = self._base.execute(
            "SELECT number, incident, step, begun_run_s, outcome, detail, drill FROM attempts "
            "WHERE begun_run_s > ? OR incident IN (SELECT value FROM json_each(?)) ORDER BY number",
            (run_s - DAY_S, json.dumps(incidents)),
        )
        return tuple(_attempt(row) for row in found)

    def rows(self, incident: str) -> tuple[Row, ...]:
        """What was tried for one incident, oldest first."""
        found = self._base.execute(
            "SELECT number, incident, step, begun_run_s, outcome, detail, drill, class, cards, begun_unix_s FROM attempts "
            "WHERE incident = ? ORDER BY number",
            (incident,),
        )
        return tuple(Row(_attempt(row), row[7], tuple(row[8].split()), row[9]) for row in found)

    def cut_power_in(self, boot_id: str) -> bool:
        """Whether the last thing that the ladder did in a boot was to cut the power."""
        found = self._base.execute(
            "SELECT step FROM attempts WHERE boot_id = ? AND drill = 0 ORDER BY number DESC LIMIT 1", (boot_id,)
        ).fetchone()
        return found is not None and found[0] == "cold_cycle"

    # ---- facts ----

    def fact(self, name: str) -> str:
        """A fact that was kept; "" when there is none."""
        found = self._base.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return str(found[0]) if found else ""

    def keep(self, name: str, value: str) -> None:
        """Keep a fact."""
        self._base.execute("INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value", (name, value))

    # ---- fences ----

    def fences(self) -> tuple[str, ...]:
        """Cards that were given up, by address."""
        return tuple(row[0] for row in self._base.execute("SELECT card FROM fences ORDER BY card"))

    def fence(self, card: str, incident: str, unix_s: float) -> None:
        """Give a card up."""
        self._base.execute("INSERT OR IGNORE INTO fences VALUES (?, ?, ?)", (card, incident, unix_s))

    def unfence(self, card: str) -> None:
        """A card that was given up is there again."""
        self._base.execute("DELETE FROM fences WHERE card = ?", (card,))


def _attempt(row: tuple[Any, ...]) -> Attempt:
    number, incident, step, at_run_s, outcome, detail, drill = row[:7]
    return Attempt(number, incident, step, at_run_s, outcome, detail, bool(drill))
