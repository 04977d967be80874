"""The audit of a fleet: every host read side by side and judged against what it should be; what came of it as plain data."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from laoka.catalog.messages import Language
from laoka.checks.finding import SEVERITIES, Finding, Severity, worst
from laoka.checks.policy import Accepted, apply
from laoka.checks.result import HostResult, finding_table
from laoka.fleet.across import Seen, compare, seen_of
from laoka.fleet.expected import Expected
from laoka.fleet.inventory import HOSTS_AT_ONCE
from laoka.fleet.judge import judge
from laoka.host.collect import CouldNotCollect
from laoka.host.deployed import DeployLine
from laoka.host.report import HostReport
from laoka.host.unread import Unread

FORMAT = 1
FLEET = "fleet"
"""The name under which a policy accepts what shows across hosts."""

# Columns of the table, each with what decides over its mark: areas and ids of findings.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "driver": ("driver",),
    "pins": (),
    "kernel": ("kernel",),
    "cards": ("cards", "firmware", "power", "xid"),
    "engine": ("engine", "leftovers"),
    "model": ("model",),
    "serve": ("serve",),
    "watchdog": ("watchdog",),
}
PINS = frozenset({
    "driver.held", "driver.pinned", "driver.unattended-upgrades", "driver.unattended-reboot", "driver.candidate",
    "driver.metapackages", "driver.repository", "driver.half-installed", "kernel.held", "audit.apt-tonight", "audit.locked",
})  # fmt: skip


@dataclass(frozen=True)
class AuditTarget:
    """One host: how its report is got (raises CouldNotCollect), and what it should be."""

    name: str
    read: Callable[[], HostReport]
    expected: Expected
    supply: str | None = None


@dataclass(frozen=True)
class AuditedHost(HostResult):
    """What came of one host; the report itself is not kept, so that a thousand hosts take little memory."""

    seen: Seen | None = None
    deploys: tuple[DeployLine, ...] = ()


@dataclass(frozen=True)
class Audit:
    """The audit of a fleet: its hosts in the inventory's order, and what shows only across them."""

    hosts: tuple[AuditedHost, ...]
    fleet: tuple[Finding, ...]

    @property
    def could_not_read(self) -> tuple[AuditedHost, ...]:
        """Hosts that gave no report."""
        return tuple(host for host in self.hosts if host.error)

    @property
    def verdict(self) -> Severity:
        """The worst of all hosts and of what shows across them."""
        across: tuple[Severity, ...] = tuple("ok" if finding.accepted else finding.severity for finding in self.fleet)
        return worst((*(host.verdict for host in self.hosts), *across))


def audit(
    targets: Sequence[AuditTarget],
    *,
    policy: tuple[Accepted, ...] = (),
    today: datetime.date | None = None,
    at_once: int = HOSTS_AT_ONCE,
    on_done: Callable[[AuditedHost], None] = lambda host: None,
) -> Audit:
    """Read and judge hosts side by side; one that can't be read costs its own deadline and has its `error` set.

    Arguments: `at_once` hosts that are read at the same time; `on_done` is called as each is finished (for progress).
    """
    day = today or datetime.date.today()

    def one(target: AuditTarget) -> AuditedHost:
        result = judged(target, policy, day)
        on_done(result)
        return result

    with ThreadPoolExecutor(max_workers=max(1, min(at_once, len(targets)))) as pool:
        hosts = tuple(pool.map(one, targets))
    return across_hosts(targets, hosts, policy, day)


def judged(target: AuditTarget, policy: tuple[Accepted, ...], day: datetime.date) -> AuditedHost:
    """Read one host and judge it."""
    try:
        report = target.read()
    except CouldNotCollect as error:
        return AuditedHost(target.name, None, (), str(error))
    findings = apply(policy, judge(report, target.expected), target.name, day)
    deploys = () if isinstance(report.deployed, Unread) else report.deployed.deploys
    return AuditedHost(target.name, None, findings, None, seen_of(report, target.supply), deploys)


def across_hosts(
    targets: Sequence[AuditTarget], hosts: Sequence[AuditedHost], policy: tuple[Accepted, ...], day: datetime.date
) -> Audit:
    """The audit of hosts that were judged each by itself."""
    seen = {host.host: host.seen for host in hosts if host.seen is not None}
    expected = {target.name: target.expected for target in targets}
    fleet = compare(seen, expected, {host.host: host.findings for host in hosts}, day)
    return Audit(tuple(hosts), apply(policy, fleet, FLEET, day))


def worst_first(hosts: Sequence[AuditedHost]) -> tuple[AuditedHost, ...]:
    """Hosts by how bad they are: those that gave no report, then by verdict and number of bad findings, then by name."""

    def badness(host: AuditedHost) -> tuple[bool, int, int, str]:
        count = sum(f.severity == host.verdict and not f.accepted for f in host.findings)
        return (host.error is None, -SEVERITIES.index(host.verdict), -count, host.host)

    return tuple(sorted(hosts, key=badness))


def bad(host: HostResult) -> tuple[Finding, ...]:
    """What has to be looked at, worst first."""
    found = [f for f in host.findings if not f.accepted and f.severity in ("fail", "unknown", "warn")]
    return tuple(sorted(found, key=lambda f: -SEVERITIES.index(f.severity)))


def column_of(finding: Finding) -> str | None:
    """The table's column that a finding belongs to; None for one that only the last column tells."""
    if finding.id in PINS:
        return "pins"
    return next((name for name, areas in COLUMNS.items() if finding.area in areas), None)


def marks(host: AuditedHost) -> dict[str, Severity | None]:
    """The worst severity in each column; None where nothing was judged."""
    found: dict[str, Severity | None] = dict.fromkeys(COLUMNS)
    for finding in host.findings:
        column = column_of(finding)
        if column is not None:
            severity: Severity = "ok" if finding.accepted else finding.severity
            found[column] = worst((severity, found[column] or "ok"))
    return found


# ------------------------------------------------------------------------------------------------ as data


def document(result: Audit, lang: Language, *, at_unix_s: float, inventory: str, lock: str | None) -> dict[str, Any]:
    """What `laoka audit --json` prints and `--save` keeps: everything, in plain JSON values."""
    return {
        "format": FORMAT,
        "at_unix_s": round(at_unix_s),
        "inventory": inventory,
        "lock": lock,
        "verdict": result.verdict,
        "hosts": [
            {
                "host": host.host,
                "verdict": host.verdict,
                "error": host.error,
                "seen": None if host.seen is None else dataclasses.asdict(host.seen),
                "findings": [finding_table(finding, lang) for finding in host.findings],
            }
            for host in result.hosts
        ],
        "fleet": [finding_table(finding, lang) for finding in result.fleet],
    }


class NotAnAudit(ValueError):
    """A file that is not what `laoka audit --save` writes; the message is one line."""


@dataclass(frozen=True)
class Change:
    """What differs between two audits. `kind` "new", "gone", "worse", "better", "lost" (no report any more), "back", "joined",
    "left" or "changed" (another version of something). `was` and `now` are the severity or the value before and after.
    """

    kind: str
    host: str
    id: str
    title: str
    was: str | None = None
    now: str | None = None
    next: str = ""

    @property
    def bad(self) -> bool:
        """Whether it asks for somebody."""
        return self.kind in ("new", "worse", "lost", "left")


FOLLOWED = ("driver", "kernel", "engine", "model", "laoka")


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Change, ...]:
    """What differs between two documents, bad things first. Errors: NotAnAudit when `old` is none."""
    if old.get("format") != FORMAT or not isinstance(old.get("hosts"), list):
        raise NotAnAudit(f"format {old.get('format')!r} is not known here (known: {FORMAT})")
    try:
        before = {host["host"]: host for host in old["hosts"]}
        after = {host["host"]: host for host in new["hosts"]}
        found = [Change("left", name, "", "") for name in before if name not in after]
        for name, host in after.items():
            found += _changes_of(name, before.get(name), host)
        found += _differences("", old.get("fleet", []), new["fleet"])
    except (KeyError, TypeError, AttributeError) as error:
        raise NotAnAudit(f"damaged ({type(error).__name__} {error})") from None
    return tuple(sorted(found, key=lambda change: (not change.bad, change.host)))


def _changes_of(name: str, was: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[Change]:
    if was is None:
        return [Change("joined", name, "", "", None, now["verdict"]), *_differences(name, [], now["findings"])]
    if now["error"]:
        return [] if was["error"] else [Change("lost", name, "", now["error"])]
    if was["error"]:
        return [Change("back", name, "", "", None, now["verdict"]), *_differences(name, [], now["findings"])]
    found = [
        Change("changed", name, what, "", was["seen"].get(what), now["seen"].get(what))
        for what in FOLLOWED
        if was["seen"].get(what) != now["seen"].get(what)
    ]
    return found + _differences(name, was["findings"], now["findings"])


def _differences(host: str, old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[Change]:
    before, after = _looked_at(old), _looked_at(new)
    found = []
    for key, item in after.items():
        was = before.get(key)
        if was is None:
            found.append(Change("new", host, item["id"], item["title"], None, item["severity"], item["next"]))
        elif was["severity"] != item["severity"]:
            worse = SEVERITIES.index(item["severity"]) > SEVERITIES.index(was["severity"])
            kind = "worse" if worse else "better"
            found.append(Change(kind, host, item["id"], item["title"], was["severity"], item["severity"], item["next"]))
    found += [Change("gone", host, item["id"], item["title"], item["severity"]) for key, item in before.items() if key not in after]
    return found


def _looked_at(findings: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str | None, str], Mapping[str, Any]]:
    return {
        (item["id"], item["subject"], item["case"]): item
        for item in findings
        if not item["accepted"] and item["severity"] in ("fail", "unknown", "warn")
    }
