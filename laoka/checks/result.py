"""One host's result as machines read it: JSON for scripts, JUnit for CI, HTML for people."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass

from laoka.catalog.messages import Language, text
from laoka.catalog.translations import error_text
from laoka.checks.finding import SEVERITIES, Finding, Severity, worst
from laoka.host.report import HostReport


@dataclass(frozen=True)
class HostResult:
    """What came of checking one host. `error` says in one line why there is no report, and then there are no findings."""

    host: str
    report: HostReport | None
    findings: tuple[Finding, ...]
    error: str | None = None

    @property
    def verdict(self) -> Severity:
        """The worst severity that no policy accepted; `unknown` when the host could not be read."""
        return worst(tuple("ok" if finding.accepted else finding.severity for finding in self.findings))


def finding_table(finding: Finding, lang: Language) -> dict[str, object]:
    """A finding as plain values, with its words."""
    return {
        "id": finding.id,
        "area": finding.area,
        "severity": finding.severity,
        "case": finding.case,
        "subject": finding.subject,
        "accepted": finding.accepted,
        "title": finding.title(lang),
        "evidence": list(finding.evidence),
        "why": finding.why(lang),
        "next": finding.next(lang),
    }


def as_json(result: HostResult, lang: Language) -> dict[str, object]:
    """The object that `laoka check --json` prints for a host."""
    if result.report is None:
        unread = [{"field": "host", "reason": result.error}]
    else:
        unread = [{"field": field, "reason": reason} for field, reason in result.report.unread()]
    return {
        "host": result.host,
        "verdict": result.verdict,
        "findings": [
            {
                "id": finding.id,
                "area": finding.area,
                "severity": finding.severity,
                "evidence": list(finding.evidence),
                "why": finding.why(lang) or finding.title(lang),
                "next": finding.next(lang),
            }
            for finding in result.findings
        ],
        "unread": unread,
    }


def as_junit(results: Iterable[HostResult], lang: Language, name: str = "laoka check") -> str:
    """A JUnit file: a suite per host, a case per finding; fail and warn are failures, unknown is an error."""
    root = ElementTree.Element("testsuites", name=name)
    for result in results:
        counted = [finding.severity for finding in result.findings if not finding.accepted]
        failures = sum(severity in ("fail", "warn") for severity in counted)
        errors = counted.count("unknown") + (result.error is not None)
        cases = len(result.findings) + (result.error is not None)
        suite = ElementTree.SubElement(
            root, "testsuite", name=result.host, tests=str(cases), failures=str(failures), errors=str(errors)
        )
        if result.error is not None:
            case = ElementTree.SubElement(suite, "testcase", classname=result.host, name="reach the host")
            ElementTree.SubElement(case, "error", message=error_text(result.error, lang))
        for finding in result.findings:
            label = f"{finding.id} {finding.subject}" if finding.subject else finding.id
            case = ElementTree.SubElement(suite, "testcase", classname=f"{result.host}.{finding.area}", name=label)
            kind = {"fail": "failure", "warn": "failure", "unknown": "error"}.get(finding.severity)
            if finding.accepted:
                ElementTree.SubElement(case, "skipped", message=finding.accepted)
            elif kind:
                node = ElementTree.SubElement(case, kind, message=finding.title(lang), type=finding.severity)
                node.text = "\n".join((*finding.evidence, finding.why(lang), finding.next(lang)))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


@dataclass(frozen=True)
class Overview:
    """A table above the hosts of a page: headings, and for each row its cells as (text, severity or "")."""

    headings: tuple[str, ...]
    rows: tuple[tuple[tuple[str, str], ...], ...]


_PAGE = """<!doctype html>
<html lang="{{ lang }}"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222; background: #fff }
h2 { border-bottom: 1px solid #ccc; overflow-wrap: anywhere } .f { margin: .8em 0; padding-left: .8em; border-left: 4px solid #bbb }
.f.fail { border-color: #c22 } .f.unknown { border-color: #a3a } .f.warn { border-color: #d90 } .f.info { border-color: #38c }
.f.ok { border-color: #3a3 }
small { color: #666 } div, code { overflow-wrap: anywhere }
code { background: #f3f3f3; display: block; white-space: pre-wrap; padding: 0 .4em }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 14px } td, th { padding: .2em .5em; text-align: left }
th, td { white-space: nowrap } td { border-top: 1px solid #ddd } td:last-child { white-space: normal; min-width: 14em }
tr.under { display: none } tr.under td { border-top: 0; padding-left: 1em; overflow-wrap: anywhere }
td.fail { color: #c22 } td.unknown { color: #a3a } td.warn { color: #a60 } td.info { color: #27a } td.ok { color: #373 }
summary { cursor: pointer; color: #666 }
@media (max-width: 40em) { body { margin: .5em auto; padding: 0 .6em } h1 { font-size: 1.4em } h2 { font-size: 1.15em }
table { width: 100% } th { font-size: 9px } td, th { padding: .2em .1em } th:last-child, tr.host td:last-child { display: none }
tr.under { display: table-row } }
</style></head><body><h1>{{ title }}</h1>
{% if overview %}<div class="wide"><table><tr>{% for heading in overview.headings %}<th>{{ heading }}</th>{% endfor %}</tr>
{% for row in overview.rows %}<tr class="host">{% for cell, severity in row %}<td class="{{ severity }}">
{%- if loop.first %}<a href="#{{ cell }}">{{ cell }}</a>{% else %}{{ cell }}{% endif %}</td>{% endfor %}</tr>
{% if row[0][1] not in ("ok", "info") %}<tr class="under"><td class="{{ row[0][1] }}" colspan="{{ row | length - 1 }}">
{{- row[-1][0] }}</td></tr>
{% endif %}{% endfor %}</table></div>{% endif %}
{% macro one(f) %}<div class="f {{ f.severity }}"><b>{{ f.title }}</b> <small>{{ f.severity }} {{ f.id }}</small>
{% for line in f.evidence %}<code>{{ line }}</code>{% endfor %}
{% if f.accepted %}<div><small>{{ f.accepted }}</small></div>{% endif %}
{% if f.why %}<div>{{ f.why }}</div>{% endif %}{% if f.next %}<div><b>{{ f.next }}</b></div>{% endif %}</div>
{% endmacro %}
{% for host in hosts %}<h2 id="{{ host.name }}">{{ host.name }}: {{ host.verdict }}</h2>
{% if host.error %}<p>{{ host.error }}</p>{% endif %}
{% for area, items in host.areas %}<h3>{{ area }}</h3>
{% for f in items %}{{ one(f) }}{% endfor %}{% endfor %}
{% if host.fine %}<details><summary>{{ host.fine_label }}</summary>
{% for f in host.fine %}{{ one(f) }}{% endfor %}</details>{% endif %}{% endfor %}</body></html>
"""


def as_html(results: Iterable[HostResult], lang: Language, title: str = "laoka check", overview: Overview | None = None) -> str:
    """One page for all hosts, without anything from elsewhere, readable on a phone; what is fine is folded away.

    Errors: ModuleNotFoundError without jinja2.
    """
    import jinja2

    hosts = []
    for result in results:
        fine = [finding for finding in result.findings if finding.severity == "ok"]
        rest = [finding for finding in result.findings if finding.severity != "ok"]
        hosts.append({
            "name": result.host,
            "verdict": result.verdict,
            "error": error_text(result.error, lang) if result.error else None,
            "areas": [
                (text(f"checks.area.{area}", lang), [finding_table(finding, lang) for finding in findings])
                for area, findings in by_area(rest)
            ],
            "fine": [finding_table(finding, lang) for finding in fine],
            "fine_label": f"{len(fine)} ok",
        })  # fmt: skip
    template = jinja2.Environment(autoescape=True).from_string(_PAGE)
    return template.render(hosts=hosts, lang="zh-CN" if lang == "zh" else "en", title=title, overview=overview)


def by_area(findings: Iterable[Finding]) -> tuple[tuple[str, tuple[Finding, ...]], ...]:
    """Findings by area, the area with the worst finding first, and the worst first within each."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.area, []).append(finding)
    ranked = [(area, sorted(items, key=_badness, reverse=True)) for area, items in groups.items()]
    ranked.sort(key=lambda group: _badness(group[1][0]), reverse=True)
    return tuple((area, tuple(items)) for area, items in ranked)


def _badness(finding: Finding) -> int:
    return -1 if finding.accepted else SEVERITIES.index(finding.severity)
