"""The Grafana dashboard of the watchdog's metrics, as Grafana's JSON model. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from laoka.catalog.messages import Language, text

UID = "laoka-watchdog"
COLUMNS = 24
SCHEMA_VERSION = 38
"""Of Grafana 10: later versions take it over by themselves."""
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
CHOSEN = 'instance=~"$instance"'


@dataclass(frozen=True)
class Panel:
    """One panel: key of its title, expressions with their legends, Grafana's names of unit and kind, size in grid units."""

    key: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "none"
    kind: str = "timeseries"
    width: int = 12
    height: int = 8
    red_above: float | None = None
    red_below: float | None = None


PANELS = (
    Panel(
        "seen", ((f"laoka_gpus_seen{{{CHOSEN}}} - laoka_gpus_expected{{{CHOSEN}}}", "{{instance}}"),), "none", "stat", 6, 5, None, 0
    ),
    Panel("open", ((f"sum by (instance) (laoka_incidents_open{{{CHOSEN}}})", "{{instance}}"),), "none", "stat", 6, 5, 1),
    Panel("alive", ((f"time() - laoka_watchdog_updated_timestamp_seconds{{{CHOSEN}}}", "{{instance}}"),), "s", "stat", 6, 5, 120),
    Panel("engine", ((f"laoka_engine_answers{{{CHOSEN}}}", "{{instance}}"),), "bool_yes_no", "stat", 6, 5, None, 1),
    Panel("present", ((f"laoka_gpu_present{{{CHOSEN}}}", "{{instance}} {{bdf}}"),), "bool_yes_no"),
    Panel("incidents", ((f"increase(laoka_incidents_total{{{CHOSEN}}}[1h]) > 0", "{{instance}} {{class}}"),), "none"),
    Panel(
        "temperature",
        (
            (f"laoka_gpu_temperature_celsius{{{CHOSEN}}}", "{{instance}} {{bdf}} {{part}}"),
            (f"laoka_gpu_temperature_limit_celsius{{{CHOSEN}}}", "{{instance}} {{bdf}} {{part}} max"),
        ),
        "celsius",
    ),
    Panel(
        "power",
        (
            (f"laoka_gpu_power_watts{{{CHOSEN}}}", "{{instance}} {{bdf}}"),
            (f"laoka_gpu_power_limit_watts{{{CHOSEN}}}", "{{instance}} {{bdf}} cap"),
        ),
        "watt",
    ),
    Panel("pcie", ((f"rate(laoka_pcie_errors_total{{{CHOSEN}}}[5m])", "{{instance}} {{device}} {{kind}}"),), "cps"),
    Panel("log", ((f"rate(laoka_kernel_log_records_total{{{CHOSEN}}}[5m])", "{{instance}}"),), "cps"),
    Panel("completion", ((f"laoka_completion_seconds{{{CHOSEN}}}", "{{instance}}"),), "s"),
    Panel("steps", ((f"increase(laoka_recovery_steps_total{{{CHOSEN}}}[1h]) > 0", "{{instance}} {{step}}: {{outcome}}"),)),
    Panel("sensors", ((f"laoka_sensor_age_seconds{{{CHOSEN}}}", "{{instance}} {{sensor}}"),), "s"),
    Panel("alerts", ((f"laoka_alerts_waiting{{{CHOSEN}}}", "{{instance}}"),)),
)


def dashboard(lang: Language) -> str:
    """The dashboard as JSON text, as Grafana's provisioning and its import take it."""
    panels = []
    x = y = row = 0
    for number, panel in enumerate(PANELS, 1):
        if x + panel.width > COLUMNS:
            x, y, row = 0, y + row, 0
        place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
        panels.append(_panel(number, panel, place, lang))
        x, row = x + panel.width, max(row, panel.height)
    model = {
        "uid": UID,
        "title": text("monitoring.dashboard", lang),
        "tags": ["laoka"],
        "schemaVersion": SCHEMA_VERSION,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }
    return json.dumps(model, ensure_ascii=False, indent=2) + "\n"


def _variables() -> list[dict[str, Any]]:
    query = "label_values(laoka_gpus_expected, instance)"
    instance = {"name": "instance", "type": "query", "datasource": DATASOURCE, "query": query, "definition": query}
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus"},
        {**instance, "refresh": 2, "multi": True, "includeAll": True, "current": {"text": "All", "value": "$__all"}},
    ]


def _panel(number: int, panel: Panel, place: dict[str, int], lang: Language) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.red_above is not None:
        steps.append({"color": "red", "value": panel.red_above})
    if panel.red_below is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.red_below}]
    return {
        "id": number,
        "type": panel.kind,
        "title": text(f"monitoring.panel.{panel.key}", lang),
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend}
            for index, (expr, legend) in enumerate(panel.queries)
        ],
    }
