"""Alert rules and dashboard: they ask for metrics that the watchdog has, and cover every class of incident."""

from __future__ import annotations

import json
import re

import jinja2
import pytest
import yaml
from prometheus_client import generate_latest

from laoka.agent.metrics import Metrics
from laoka.agent.signals import SEVERITY_OF_CLASS
from laoka.catalog.messages import LANGUAGES, Language
from roles.monitoring.dashboard import COLUMNS, PANELS, dashboard
from roles.monitoring.deploy import TEMPLATES
from roles.monitoring.rules import rules
from tests.unit.agent.test_agent_metrics import metrics

METRIC = re.compile(r"\blaoka_[a-z_]+\b")
state_with_everything = metrics


def rendered(lang: Language) -> str:
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined)
    return environment.get_template("laoka-rules.yml.j2").render(rules=rules(), lang=lang)


def exported(found: Metrics) -> set[str]:
    found.steps["reboot", "booted"] += 1
    lines = generate_latest(found.registry).decode().splitlines()
    return {re.split(r"[{ ]", line, maxsplit=1)[0] for line in lines if not line.startswith("#")}


def expressions() -> list[str]:
    return [rule.expr for rule in rules()] + [expr for panel in PANELS for expr, _ in panel.queries]


def test_rules_and_panels_ask_for_what_there_is(state_with_everything: Metrics) -> None:
    asked = {name for expr in expressions() for name in METRIC.findall(expr)}
    assert len(asked) > 15
    assert asked - exported(state_with_everything) == set()


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_rules_are_yaml_with_words_in_both_languages(lang: Language) -> None:
    (group,) = yaml.safe_load(rendered(lang))["groups"]
    assert [rule["alert"] for rule in group["rules"]] == [rule.name for rule in rules()]
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"].startswith("{{ $labels.instance }}")
        assert re.fullmatch(r"\d+[mh]", rule["for"])


def test_every_class_of_incident_has_a_rule() -> None:
    covered = [name for rule in rules() for names in re.findall(r'class=~"([^"]+)"', rule.expr) for name in names.split("|")]
    assert sorted(covered) == sorted(SEVERITY_OF_CLASS)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_dashboard_is_what_grafana_reads(lang: Language) -> None:
    model = json.loads(dashboard(lang))
    assert len({panel["id"] for panel in model["panels"]}) == len(PANELS)
    taken: set[tuple[int, int]] = set()
    for panel in model["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken
        taken |= cells
        assert all('instance=~"$instance"' in target["expr"] for target in panel["targets"])
    assert {variable["name"] for variable in model["templating"]["list"]} == {"datasource", "instance"}
