"""One host's result as machines read it: JSON for scripts, JUnit for CI, HTML for people."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass

from laoka.catalog.messages import Language, text
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


def as_junit(results: Iterable[HostResult], lang: Language) -> str:
    """A JUnit file: a suite per host, a case per finding; fail and warn are failures, unknown is an error."""
    root = ElementTree.Element("testsuites", name="laoka check")
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
            ElementTree.SubElement(case, "error", message=result.error)
        for finding in result.findings:
            name = f"{finding.id} {finding.subject}" if finding.subject else finding.id
            case = ElementTree.SubElement(suite, "testcase", classname=f"{result.host}.{finding.area}", name=name)
            kind = {"fail": "failure", "warn": "failure", "unknown": "error"}.get(finding.severity)
            if finding.accepted:
                ElementTree.SubElement(case, "skipped", message=finding.accepted)
            elif kind:
                node = ElementTree.SubElement(case, kind, message=finding.title(lang), type=finding.severity)
                node.text = "\n".join((*finding.evidence, finding.why(lang), finding.next(lang)))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


_PAGE = """<!doctype html>
<html lang="{{ lang }}"><head><meta charset="utf-8"><title>laoka check</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
h2 { border-bottom: 1px solid #ccc } .f { margin: .8em 0; padding-left: .8em; border-left: 4px solid #bbb }
.fail { border-color: #c22 } .unknown { border-color: #a3a } .warn { border-color: #d90 } .info { border-color: #38c }
.ok { border-color: #3a3 } code { background: #f3f3f3; display: block; white-space: pre-wrap; padding: 0 .4em }
small { color: #666 }
</style></head><body><h1>laoka check</h1>
{% for host in hosts %}<h2>{{ host.name }}: {{ host.verdict }}</h2>
{% if host.error %}<p>{{ host.error }}</p>{% endif %}
{% for area, items in host.areas %}<h3>{{ area }}</h3>
{% for f in items %}<div class="f {{ f.severity }}"><b>{{ f.title }}</b> <small>{{ f.severity }} {{ f.id }}</small>
{% for line in f.evidence %}<code>{{ line }}</code>{% endfor %}
{% if f.accepted %}<div><small>{{ f.accepted }}</small></div>{% endif %}
{% if f.why %}<div>{{ f.why }}</div>{% endif %}{% if f.next %}<div><b>{{ f.next }}</b></div>{% endif %}</div>
{% endfor %}{% endfor %}{% endfor %}</body></html>
"""


def as_html(results: Iterable[HostResult], lang: Language) -> str:
    """One page for all hosts, without anything from elsewhere. Errors: ModuleNotFoundError without jinja2."""
    import jinja2

    hosts = [
        {
            "name": result.host,
            "verdict": result.verdict,
            "error": result.error,
            "areas": [
                (
                    text(f"checks.area.{area}", lang),
                    [
                        {
                            "severity": finding.severity,
                            "id": finding.id,
                            "title": finding.title(lang),
                            "evidence": finding.evidence,
                            "accepted": finding.accepted,
                            "why": finding.why(lang),
                            "next": finding.next(lang),
                        }
                        for finding in findings
                    ],
                )
                for area, findings in by_area(result.findings)
            ],
        }
        for result in results
    ]
    template = jinja2.Environment(autoescape=True).from_string(_PAGE)
    return template.render(hosts=hosts, lang="zh-CN" if lang == "zh" else "en")


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
