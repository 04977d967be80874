"""From what logs and the host show to one root cause: symptom, input, environment, parameters, tool. Rules over evidence; pure.

Root is the earliest cause of the last stretch that has one: what came before a good start was healed by it. A signature in a line
of INFO or WARNING is only a hint, a symptom counts when no cause is there, and what merely follows (an engine that died) comes
last. A card that left the bus stands above what the engine said about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from laoka.catalog import xids
from laoka.catalog.failures import STEPS, Role, Step, failures
from laoka.catalog.messages import LANGUAGES, Language, text
from laoka.checks.finding import Finding
from laoka.diagnose.scan import FirstError, Hit, Scan

# Checks whose failure alone explains that no engine can work: what of a host is looked at beside its logs.
HARDWARE_AREAS = ("firmware", "cards", "pcie", "driver", "kernel", "ecc", "xid", "power", "thermal")
_RANK: Mapping[Role, int] = {"cause": 0, "symptom": 2, "consequence": 4}
LOST_CARD = frozenset({"fell-off-bus", "xid-79", "check:xid.fell-off"})


@dataclass(frozen=True)
class Found:
    """One thing that was found, worded in both languages. `line_number` None: it is of the host's state, not of a log."""

    id: str
    step: Step
    role: Role
    source: str
    line_number: int | None
    evidence: str
    words: Mapping[Language, tuple[str, str, str]]
    """Title, cause and fix."""
    level: str = ""
    process: str = ""
    stretch: int = 0
    order: int = 0
    length: int = 0
    count: int = 1
    benign: bool = False

    @property
    def rank(self) -> int:
        """How far from a root cause: 0 is one."""
        hint = self.level in ("DEBUG", "INFO", "WARNING") and self.role == "cause"
        return -1 if self.id in LOST_CARD else _RANK[self.role] + hint

    def table(self, lang: Language) -> dict[str, Any]:
        """As plain values, for JSON."""
        title, cause, fix = self.words[lang]
        return {
            "id": self.id, "title": title, "line_number": self.line_number, "evidence": self.evidence, "cause": cause, "fix": fix,
            "step": self.step, "source": self.source, "process": self.process, "role": self.role, "count": self.count,
            "benign": self.benign,
        }  # fmt: skip


@dataclass(frozen=True)
class Walked:
    """One step of the chain: what of it was found, or what was looked at and is ruled out."""

    step: str
    found: tuple[str, ...]
    ruled_out: tuple[str, ...]
    """Keys of catalog/messages/diagnose.toml."""


@dataclass(frozen=True)
class Diagnosis:
    """The outcome. `root` None with a `first_error`: something is wrong that no signature knows."""

    root: Found | None
    also: tuple[Found, ...]
    first_error: FirstError | None
    first_error_source: str
    walked: tuple[Walked, ...]
    scans: tuple[Scan, ...] = field(default=())

    @property
    def anything(self) -> bool:
        """Whether something is wrong."""
        return self.root is not None or self.first_error is not None

    def table(self, lang: Language) -> dict[str, Any]:
        """As plain values, for JSON."""
        error = self.first_error
        return {
            "root_cause": self.root.table(lang) if self.root else None,
            "also": [found.table(lang) for found in self.also],
            "first_error_line": (
                None if error is None else {"line_number": error.line_number, "text": error.text, "source": self.first_error_source}
            ),
            "steps": [
                {"step": one.step, "found": list(one.found), "ruled_out": [text(f"diagnose.{key}", lang) for key in one.ruled_out]}
                for one in self.walked
            ],
            "read": [
                {"source": scan.name, "lines": scan.lines, "size_bytes": scan.size_bytes, "starts": scan.starts,
                 "engine_version": scan.version or None, "arguments": scan.arguments or None}
                for scan in self.scans
            ],
        }  # fmt: skip


def found_of(hit: Hit, source: str) -> Found:
    """A hit with the words of its row. Errors: KeyError for a key that neither catalogue has."""
    same = {
        "source": source, "line_number": hit.line_number, "evidence": hit.evidence, "level": hit.level, "process": hit.process,
        "stretch": hit.stretch, "order": hit.order, "length": hit.length, "count": hit.count,
    }  # fmt: skip
    if hit.xid is not None:
        row = xids.by_number(hit.xid.code)
        words: dict[Language, tuple[str, str, str]] = {}
        values = {"bdf": hit.xid.address, "unit": "qwen-serve"}
        for lang in LANGUAGES:
            name = text("diagnose.xid_unknown", lang) if row is None else row.name if lang == "en" else row.name_zh
            title = text("diagnose.xid_title", lang, code=hit.xid.code, name=name, card=hit.xid.address)
            cause = text(f"watchdog.why.{row.incident_class if row else 'xid_other'}", lang, **values)
            fix = text(f"watchdog.action.{row.action}", lang, **values) if row else text("diagnose.xid_unknown_fix", lang)
            words[lang] = (title, cause, fix)
        role: Role = "cause"
        if row is not None and row.action == "follow_previous":
            role = "consequence"
        elif row is not None and row.incident_class == "xid_application":
            role = "symptom"  # a program's own fault shows up in the driver; the program's log says more
        return Found(hit.key, "environment", role, words=words, **same)  # type: ignore[arg-type]
    failure = {item.id: item for item in failures()}[hit.key]
    both: dict[Language, tuple[str, str, str]] = {
        "en": (failure.title, failure.cause, failure.fix),
        "zh": (failure.title_zh, failure.cause_zh, failure.fix_zh),
    }
    return Found(hit.key, failure.step, failure.role, words=both, benign=failure.benign, **same)  # type: ignore[arg-type]


def found_of_check(finding: Finding, source: str) -> Found:
    """A check of the host that failed, as something found."""
    words: dict[Language, tuple[str, str, str]] = {
        lang: (finding.title(lang), finding.why(lang), finding.next(lang)) for lang in LANGUAGES
    }
    return Found(f"check:{finding.id}", "environment", "cause", source, None, "; ".join(finding.evidence)[:500], words)


def diagnose(scans: Sequence[Scan], checks: Sequence[Finding] = (), host: str = "") -> Diagnosis:
    """Walk the chain over logs, in the order given, and over the checks of a host."""
    everything = [found_of(hit, scan.name) for scan in scans for hit in scan.hits]
    failed = [
        found_of_check(finding, host)
        for finding in checks
        if finding.severity == "fail" and finding.area in HARDWARE_AREAS and not finding.accepted
    ]
    candidates = [found for found in everything if not found.benign]
    root = _root(candidates, scans)
    # A log that names no cause of its own: what is wrong with the host is one. A lost card is one whatever the log says.
    if failed and (root is None or root.rank > 1 or any(found.id in LOST_CARD for found in failed)):
        root = root if root is not None and root.id in LOST_CARD else min(failed, key=lambda found: found.id not in LOST_CARD)
    order = {scan.name: index for index, scan in enumerate(scans)}
    rest = [found for found in (*candidates, *failed) if found is not root]
    rest.sort(key=lambda found: (found.rank, order.get(found.source, len(order)), found.line_number or 0))
    benign = [found for found in everything if found.benign]
    first = next(((scan.first_error, scan.name) for scan in scans if scan.first_error is not None), (None, ""))
    also = (*_without_echoes(root, rest), *benign)
    return Diagnosis(root, also, first[0], first[1], _walk(root, also, scans, checks), tuple(scans))


def _root(candidates: Sequence[Found], scans: Sequence[Scan]) -> Found | None:
    if not candidates:
        return None
    order = {scan.name: index for index, scan in enumerate(scans)}
    best = min(found.rank for found in candidates)
    of_rank = [found for found in candidates if found.rank == best]
    # Each log by itself: the last stretch that has such a thing, and in it the first.
    last = {name: max(found.stretch for found in of_rank if found.source == name) for name in {found.source for found in of_rank}}
    recent = [found for found in of_rank if found.stretch == last[found.source]]
    return min(recent, key=lambda found: (order[found.source], found.line_number or 0, -found.length, found.order))


def _without_echoes(root: Found | None, rest: Sequence[Found]) -> list[Found]:
    """Without what only says the root again: a wider signature in the very same line, the same row in another stretch."""
    seen = {(root.source, root.line_number)} if root else set()
    ids = {root.id} if root else set()
    kept = []
    for found in rest:
        if found.id in ids or (found.line_number is not None and (found.source, found.line_number) in seen):
            continue
        ids.add(found.id)
        kept.append(found)
    return kept


def _walk(root: Found | None, also: Sequence[Found], scans: Sequence[Scan], checks: Sequence[Finding]) -> tuple[Walked, ...]:
    """The chain, step by step. Ruled out is only what was looked at."""
    everything = [*([root] if root else []), *(found for found in also if not found.benign)]
    ids = {found.id for found in everything}
    steps = [Walked("symptom", tuple(found.id for found in everything if found.role != "cause"), _symptoms(scans))]
    for step in STEPS:
        found = tuple(item.id for item in everything if item.step == step and item.role == "cause")
        out: list[str] = []
        if not found and scans:
            out.append(f"none_{step}")
        if step == "environment":
            if scans and not any(name.startswith("xid-") for name in ids) and "fell-off-bus" not in ids:
                out.append("no_xid")
            if checks and not any(name.startswith("check:") for name in ids):
                out.append("host_fine")
            elif not checks:
                out.append("host_not_read")
        if step == "parameters" and scans and not ids & {"oom", "oom-text", "no-kv-blocks", "qpn-prepack-oom"}:
            out.append("no_oom")
        steps.append(Walked(step, found, tuple(out)))
    return tuple(steps)


def _symptoms(scans: Sequence[Scan]) -> tuple[str, ...]:
    if not scans or any(scan.first_error is not None for scan in scans):
        return ()
    return ("no_error_line",) if any(scan.size_bytes for scan in scans) else ("empty_log",)
