"""A stored policy: findings that somebody accepted, for which hosts, why, and until when."""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

from laoka.catalog import toml
from laoka.checks.finding import Finding


class PolicyError(ValueError):
    """A policy file that is not right; the message is one line: file, row, what is wrong."""


@dataclass(frozen=True)
class Accepted:
    """One row: `id` of a check, `host` a name or pattern, `reason` in words, `until` the last day on which it holds."""

    id: str
    host: str
    reason: str
    until: datetime.date


def parse_policy(text: str, name: str, known_ids: Iterable[str]) -> tuple[Accepted, ...]:
    """Rows `[[accept]]` of a policy. Errors: PolicyError for what is not TOML, an unknown check, a missing reason or date."""
    try:
        rows = toml.loads(text, name).get("accept", [])
    except toml.TomlError as error:
        raise PolicyError(str(error)) from None
    known, found = frozenset(known_ids), []
    for number, row in enumerate(rows if isinstance(rows, list) else [{}], 1):
        where = f"{name}: [[accept]] {number}"
        if not isinstance(row, dict) or set(row) != {"id", "host", "reason", "until"}:
            raise PolicyError(f"{where}: must have exactly id, host, reason and until")
        if row["id"] not in known:
            raise PolicyError(f"{where}: there is no check {row['id']!r}")
        if not isinstance(row["reason"], str) or not row["reason"].strip() or not isinstance(row["host"], str):
            raise PolicyError(f"{where}: host and reason must be texts, and the reason not empty")
        if type(row["until"]) is not datetime.date:
            raise PolicyError(f"{where}: until must be a date like 2027-06-30")
        found.append(Accepted(row["id"], row["host"], row["reason"], row["until"]))
    return tuple(found)


def apply(policy: tuple[Accepted, ...], findings: Iterable[Finding], host: str, today: datetime.date) -> tuple[Finding, ...]:
    """Findings with those marked that a row accepts today; a row past its date accepts nothing."""
    return tuple(_applied(policy, finding, host, today) for finding in findings)


def _applied(policy: tuple[Accepted, ...], finding: Finding, host: str, today: datetime.date) -> Finding:
    for row in policy:
        if finding.severity != "ok" and row.id == finding.id and fnmatch.fnmatchcase(host, row.host) and today <= row.until:
            return dataclasses.replace(finding, accepted=f"{row.reason} ({row.until})")
    return finding
