"""The gate at the head of every deploy: a host that can't work is refused before anything on it changed."""

from __future__ import annotations

from collections.abc import Generator, Iterable

from pyinfra.api.operation import operation
from pyinfra.context import host

from laoka import checks
from laoka.catalog.messages import Language, language
from laoka.checks.finding import Finding
from laoka.facts.report import Report
from laoka.operations.refusal import refusal


def refusal_lines(name: str, findings: Iterable[Finding], lang: Language) -> list[str]:
    """What a refused host is told: each finding with its evidence, why it matters and what to do."""
    lines = []
    for finding in findings:
        lines.append(f"{name} refused, nothing was changed: [{finding.id}] {finding.title(lang)}")
        lines += [f"  seen: {line}" for line in finding.evidence]
        lines += [f"  {text}" for text in (finding.why(lang), finding.next(lang)) if text]
    return lines


@operation()
def firmware_gate(expected_gpus: int, lang: str) -> Generator[str, None, None]:
    """Refuse a host whose firmware or cards can't serve; yields nothing on one that can.

    + expected_gpus: how many cards the host must show
    + lang: language of the message, en or zh
    """
    findings = checks.gate(host.get_fact(Report), expected_gpus)
    if findings:
        yield refusal(refusal_lines(host.name, findings, language(lang)))
    else:
        host.noop("the firmware and the cards are as they must be")
