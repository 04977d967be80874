"""The audit for people: the rows of its table, findings grouped over hosts, Markdown, and the pages that checks have too. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from laoka.catalog.messages import Language, text
from laoka.catalog.translations import error_text
from laoka.checks.finding import SEVERITIES, Finding, Severity
from laoka.checks.result import HostResult, Overview
from laoka.fleet.audit import COLUMNS, FLEET, Audit, AuditedHost, Change, bad, marks, worst_first
from laoka.host.deployed import DeployLine

SIGNS = {"ok": "✓", "info": "i", "warn": "!", "unknown": "?", "fail": "✗", None: "·"}


@dataclass(frozen=True)
class Row:
    """A host's line: a cell with its severity for each column, and the worst thing in words."""

    host: str
    verdict: Severity
    cells: tuple[tuple[str, Severity | None], ...]
    worst: str


@dataclass(frozen=True)
class Group:
    """One finding and all hosts that have it in these very words."""

    finding: Finding
    hosts: tuple[str, ...]


def rows(result: Audit, lang: Language) -> tuple[Row, ...]:
    """The table, the worst host first."""
    return tuple(_row(host, lang) for host in worst_first(result.hosts))


def headings(lang: Language) -> tuple[str, ...]:
    """The table's headings: host, one a column, the worst finding."""
    return tuple(text(f"audit.heading.{name}", lang) for name in ("host", *COLUMNS, "worst"))


def _row(host: AuditedHost, lang: Language) -> Row:
    if host.error is not None:
        return Row(host.host, "unknown", tuple(("", None) for _ in COLUMNS), error_text(host.error, lang))
    found = marks(host)
    shown = {name: SIGNS[severity] for name, severity in found.items()}
    seen = host.seen
    if seen is not None:
        shown["driver"] = f"{shown['driver']} {seen.driver or '-'}"
        shown["cards"] = f"{shown['cards']} {len(seen.cards)}"
    items = bad(host)
    more = f" (+{len(items) - 1})" if len(items) > 1 else ""
    words = items[0].title(lang) + more if items else text("audit.fine", lang)
    return Row(host.host, host.verdict, tuple((shown[name], found[name]) for name in COLUMNS), words)


def grouped(result: Audit, lang: Language) -> tuple[Group, ...]:
    """What has to be looked at, each once with its hosts: across hosts first, then the worst and the most frequent first."""
    found: dict[tuple[str, str, str], tuple[Finding, list[str]]] = {}
    for host in result.hosts:
        for finding in bad(host):
            key = (finding.id, finding.case, finding.title(lang))
            found.setdefault(key, (finding, []))[1].append(host.host)
    groups = [Group(finding, tuple(dict.fromkeys(hosts))) for finding, hosts in found.values()]
    groups.sort(key=lambda group: (-SEVERITIES.index(group.finding.severity), -len(group.hosts)))
    across = [Group(finding, ()) for finding in result.fleet if not finding.accepted and finding.severity != "ok"]
    return (*across, *groups)


def summary(result: Audit, lang: Language) -> str:
    """One line: how many hosts, how many of each verdict, how many could not be read."""
    gone = len(result.could_not_read)
    judged = [host for host in result.hosts if not host.error]
    counts = [f"{sum(host.verdict == s for host in judged)} {s}" for s in reversed(SEVERITIES)]
    told = ", ".join(part for part in counts if not part.startswith("0 "))
    return text("audit.summary", lang, hosts=len(result.hosts), counts=told or "-", gone=gone)


def as_results(result: Audit) -> tuple[HostResult, ...]:
    """For the renderers that checks have too: what shows across hosts as one more host at the head."""
    across = (HostResult(FLEET, None, result.fleet),) if result.fleet else ()
    return (*across, *worst_first(result.hosts))


def overview(result: Audit, lang: Language) -> Overview:
    """The table at the head of the page."""
    return Overview(
        headings(lang),
        tuple(
            ((row.host, row.verdict), *((cell, severity or "") for cell, severity in row.cells), (row.worst, ""))
            for row in rows(result, lang)
        ),
    )


def markdown(result: Audit, lang: Language) -> str:
    """A table and the findings below it, for an issue or a chat."""
    heads = headings(lang)
    lines = [f"**{summary(result, lang)}**", "", _cells(heads), _cells("---" for _ in heads)]
    for row in rows(result, lang):
        lines.append(_cells((f"`{row.host}`", *(cell for cell, _ in row.cells), row.worst)))
    for group in grouped(result, lang):
        where = f" ({', '.join(group.hosts)})" if group.hosts else ""
        lines += [
            "",
            f"- {SIGNS[group.finding.severity]} **{_plain(group.finding.title(lang))}**{_plain(where)} `{group.finding.id}`",
        ]
        lines += [f"  - `{line.replace('`', chr(39))}`" for line in group.finding.evidence[:5]]
        if group.finding.next(lang):
            lines.append(f"  - {_plain(group.finding.next(lang))}")
    return "\n".join(lines) + "\n"


def _cells(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |"


def _plain(words: str) -> str:
    return words.replace("|", "\\|").replace("\n", " ")


def change_lines(found: Sequence[Change], lang: Language) -> tuple[str, ...]:
    """Changes since an earlier audit as people read them; empty when nothing changed."""
    lines = []
    for change in found:
        host = change.host or text("audit.across", lang)
        words = text(
            f"audit.change.{change.kind}",
            lang,
            host=host,
            id=change.id,
            title=change.title,
            was=change.was or "-",
            now=change.now or "-",
        )
        lines.append(f"{'!' if change.bad else ' '} {words}")
        if change.bad and change.next:
            lines.append(f"    → {change.next}")
    return tuple(lines)


def history_lines(deploys: Sequence[DeployLine], lang: Language) -> tuple[str, ...]:
    """Deploys of a host, newest first, as people read them."""
    lines = []
    for deploy in reversed(deploys):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(deploy.began_unix_s))
        took = "" if deploy.ended_unix_s is None else f" ({deploy.ended_unix_s - deploy.began_unix_s:.0f} s)"
        outcome = text(f"audit.outcome.{deploy.outcome}", lang)
        lines.append(f"{when}  {deploy.who}  {deploy.what}  {outcome}{took}")
        lines.append("    " + text("audit.from", lang, inventory=deploy.inventory, lock=deploy.lock, laoka=deploy.laoka))
        if deploy.changed:
            names = "; ".join(deploy.changed[:12])
            more = f" (+{len(deploy.changed) - 12})" if len(deploy.changed) > 12 else ""
            lines.append("    " + text("audit.changed", lang, count=len(deploy.changed), names=names + more))
    return tuple(lines)
