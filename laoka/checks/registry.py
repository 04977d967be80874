"""The registry of checks: a decorator puts a function in, the runner turns what it yields (or raises) into findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from laoka.checks.finding import Finding, Outcome, Severity
from laoka.host.report import HostReport
from laoka.host.unread import Unread


@dataclass(frozen=True)
class Wanted:
    """What the operator says about a host. `expected_gpus`: how many cards it should have; None: not said."""

    expected_gpus: int | None = None


CheckFunction = Callable[[HostReport, Wanted], Iterable[Outcome]]


@dataclass(frozen=True)
class Check:
    """A registered check. `gate`: its fail or unknown stops a provisioning run. `source`: where its facts come from."""

    id: str
    area: str
    function: CheckFunction
    gate: bool
    source: str


CHECKS: dict[str, Check] = {}


def check(check_id: str, *, gate: bool = False, source: str = "") -> Callable[[CheckFunction], CheckFunction]:
    """Register a check under `area.name`. Arguments: see Check. Errors: ValueError for an id taken already."""

    def register(function: CheckFunction) -> CheckFunction:
        if check_id in CHECKS:
            raise ValueError(f"two checks are called {check_id}")
        CHECKS[check_id] = Check(check_id, check_id.split(".")[0], function, gate, source)
        return function

    return register


def run_one(registered: Check, report: HostReport, wanted: Wanted) -> Iterator[Finding]:
    """The findings of one check. A fault in it is an `unknown` of its own: a crash must not look like health."""
    try:
        outcomes = tuple(registered.function(report, wanted))
    except Exception as error:  # noqa: BLE001 - whatever it was, the operator must see that this was not checked
        outcomes = (unread(Unread(f"the check itself failed: {type(error).__name__}: {error}")),)
    for item in outcomes:
        yield Finding(registered.id, registered.area, item.severity, item.case, item.evidence, item.subject, item.values)


def outcome(severity: Severity, case: str, *evidence: str, subject: str | None = None, **values: object) -> Outcome:
    """An outcome with its evidence lines and the values of its wording."""
    return Outcome(severity, case, evidence, subject, tuple((name, str(value)) for name, value in values.items()))


def ok(*evidence: str, subject: str | None = None, **values: object) -> Outcome:
    """As it should be."""
    return outcome("ok", "ok", *evidence, subject=subject, **values)


def info(case: str, *evidence: str, subject: str | None = None, **values: object) -> Outcome:
    """Worth knowing, nothing to do."""
    return outcome("info", case, *evidence, subject=subject, **values)


def warn(case: str, *evidence: str, subject: str | None = None, **values: object) -> Outcome:
    """Works today, and will cost something."""
    return outcome("warn", case, *evidence, subject=subject, **values)


def fail(case: str, *evidence: str, subject: str | None = None, **values: object) -> Outcome:
    """Does not work, or will not."""
    return outcome("fail", case, *evidence, subject=subject, **values)


def unread(reason: Unread, *evidence: str, subject: str | None = None) -> Outcome:
    """Could not be read, which is never `ok`."""
    return outcome("unknown", "unread", *evidence, subject=subject, reason=reason.reason)
