"""Prometheus' own tool finds no fault with alert rules, dashboard and metrics; and the rules say what they should.

promtool is taken out of the Debian or Ubuntu package prometheus (19 MB); nothing is installed.
"""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest
import yaml
from prometheus_client import generate_latest

from laoka.agent.metrics import Metrics
from laoka.catalog.messages import LANGUAGES, Language
from laoka.process import Completed, run
from roles.monitoring.dashboard import PANELS, dashboard
from roles.monitoring.deploy import TEMPLATES
from roles.monitoring.rules import rules
from tests.unit.agent.test_agent_metrics import metrics

RULES_TEST = Path(__file__).resolve().parents[1] / "data" / "monitoring" / "rules_test.yml"
of_a_host = metrics


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with promtool."""
    folder = tmp_path_factory.mktemp("promtool")
    folder.chmod(0o755)
    got = run(["apt-get", "-q", "-o", "Acquire::Retries=3", "download", "prometheus"], deadline_s=120, cwd=folder)
    packages = list(folder.glob("prometheus_*.deb"))
    if not packages:
        pytest.fail(f"the package prometheus can't be fetched: {got.last_line()}: apt-get update")
    run(["dpkg-deb", "-x", str(packages[0]), str(folder)], deadline_s=120, check=True)
    return folder


def promtool(place: Path, *words: str, stdin: str = "") -> Completed:
    return run([str(place / "usr/bin/promtool"), *words], deadline_s=60, cwd=place, stdin=stdin)


def write_rules(place: Path, lang: Language) -> None:
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined)
    text = environment.get_template("laoka-rules.yml.j2").render(rules=rules(), lang=lang)
    (place / "laoka-rules.yml").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_rules_are_sound(place: Path, lang: Language) -> None:
    write_rules(place, lang)
    done = promtool(place, "check", "rules", "laoka-rules.yml")
    assert done.ok and f"SUCCESS: {len(rules())} rules found" in done.stdout, done


def test_the_rules_say_what_they_should(place: Path) -> None:
    write_rules(place, "en")
    (place / RULES_TEST.name).write_text(RULES_TEST.read_text(encoding="utf-8"), encoding="utf-8")
    done = promtool(place, "test", "rules", RULES_TEST.name)
    assert done.ok and "SUCCESS" in done.stdout, done


def test_the_dashboards_questions_are_sound(place: Path) -> None:
    model = json.loads(dashboard("en"))
    asked = [target["expr"].replace("$instance", ".*") for panel in model["panels"] for target in panel["targets"]]
    assert len(asked) == sum(len(panel.queries) for panel in PANELS)
    records = [{"record": f"panel:x{number}", "expr": expr} for number, expr in enumerate(asked)]
    (place / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": records}]}))
    done = promtool(place, "check", "rules", "panels.yml")
    assert done.ok and f"SUCCESS: {len(asked)} rules found" in done.stdout, done


def test_the_metrics_are_as_prometheus_wants_them(place: Path, of_a_host: Metrics) -> None:
    of_a_host.steps["reboot", "booted"] += 1
    done = promtool(place, "check", "metrics", stdin=generate_latest(of_a_host.registry).decode())
    assert (done.status, done.stderr.strip()) == (0, ""), done
