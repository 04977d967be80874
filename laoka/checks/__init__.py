"""Pure rules from a HostReport to findings, one module per area, and their registry."""

from __future__ import annotations

from collections.abc import Iterable

# Importing an area's module registers its checks.
from laoka.checks import cards, driver, ecc, firmware, kernel, leftovers, pcie, platform, power, system, thermal, xid
from laoka.checks.finding import SEVERITIES, Finding, Severity, worst
from laoka.checks.registry import CHECKS, Wanted, run_one
from laoka.host.report import HostReport

__all__ = ["AREAS", "CHECKS", "Finding", "gate", "run", "verdict"]

_MODULES = (platform, firmware, cards, pcie, power, thermal, ecc, xid, driver, kernel, system, leftovers)
AREAS = tuple(module.__name__.rsplit(".", 1)[-1] for module in _MODULES)


def run(report: HostReport, *, expected_gpus: int | None = None, only: Iterable[str] = ()) -> tuple[Finding, ...]:
    """Every finding about a host, worst first within each area, areas in a fixed order.

    Arguments: `expected_gpus` how many cards the host should have (None: not said); `only` areas or check ids.
    """
    wanted, chosen = Wanted(expected_gpus), set(only)
    findings = [
        finding
        for registered in CHECKS.values()
        if not chosen or registered.id in chosen or registered.area in chosen
        for finding in run_one(registered, report, wanted)
    ]
    return tuple(sorted(findings, key=lambda f: (AREAS.index(f.area), -SEVERITIES.index(f.severity))))


def gate(report: HostReport, expected_gpus: int | None = None) -> tuple[Finding, ...]:
    """The findings that must stop a provisioning run before it changes anything; empty: go on.

    Only facts that a bare host without a driver shows decide here. What could not be read stops too, and says why.
    """
    wanted = Wanted(expected_gpus)
    return tuple(
        finding
        for registered in CHECKS.values()
        if registered.gate
        for finding in run_one(registered, report, wanted)
        if finding.severity in ("fail", "unknown")
    )


def verdict(findings: Iterable[Finding]) -> Severity:
    """The worst severity that no policy accepted; `unknown` when nothing was checked at all."""
    return worst(tuple("ok" if finding.accepted else finding.severity for finding in findings))
