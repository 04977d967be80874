"""Alert rules for Prometheus about the watchdog's metrics. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from laoka.agent.signals import SEVERITY_OF_CLASS
from laoka.catalog.messages import Language, text

INSTANCE, SENSOR, CLASS, VALUE = "{{ $labels.instance }}", "{{ $labels.sensor }}", "{{ $labels.class }}", "{{ $value }}"
BDF = "{{ $labels.bdf }}"


@dataclass(frozen=True)
class Rule:
    """One alert rule. `key` is that of its words (monitoring.rule.*), `hold` how long the expression must be true."""

    name: str
    key: str
    expr: str
    hold: str
    severity: str

    def words(self, lang: Language) -> str:
        """What the alert says; Prometheus fills in the labels."""
        return text(f"monitoring.rule.{self.key}", lang, host=INSTANCE, sensor=SENSOR, incident=CLASS, bdf=BDF, value=VALUE)


def _classes(severity: str) -> str:
    return "|".join(name for name, found in SEVERITY_OF_CLASS.items() if found == severity)


def rules() -> tuple[Rule, ...]:
    """All rules, worst first. They hold for scraped metrics and for those by way of node-exporter's textfile collector."""
    return (
        Rule("LaokaGpuMissing", "missing", "laoka_gpu_present == 0 unless laoka_gpu_given_up == 1", "1m", "critical"),
        Rule("LaokaGpuGivenUp", "given_up", "laoka_gpu_given_up == 1", "0m", "critical"),
        # Two shapes of a watchdog that is gone: its file is read on and on, or nothing comes at all any more.
        Rule("LaokaWatchdogDown", "stale", "time() - laoka_watchdog_updated_timestamp_seconds > 120", "1m", "critical"),
        Rule("LaokaHostSilent", "silent", "max_over_time(laoka_gpus_expected[1d]) unless laoka_gpus_expected", "5m", "critical"),
        Rule("LaokaIncident", "incident", f'laoka_incidents_open{{class=~"{_classes("critical")}"}} > 0', "1m", "critical"),
        Rule("LaokaRecoveryLoop", "loop", "sum by (instance) (increase(laoka_recovery_steps_total[6h])) > 12", "0m", "critical"),
        Rule("LaokaNoAlertChannel", "no_channel", "laoka_alert_channels == 0", "15m", "warning"),
        Rule("LaokaAlertsNotDelivered", "not_delivered", "laoka_alerts_waiting > 0", "15m", "warning"),
        Rule("LaokaSensorBlind", "blind", "laoka_sensor_ok == 0", "15m", "warning"),
        Rule("LaokaSensorStuck", "stuck", "laoka_sensor_age_seconds > 300", "1m", "warning"),
        Rule("LaokaMinorIncident", "incident", f'laoka_incidents_open{{class=~"{_classes("warning")}"}} > 0', "10m", "warning"),
        Rule(
            "LaokaGpuNearlyTooHot",
            "hot",
            "laoka_gpu_temperature_celsius > laoka_gpu_temperature_limit_celsius - 3",
            "5m",
            "warning",
        ),
        Rule(
            "LaokaPowerCapLost",
            "cap",
            "abs(laoka_gpu_power_limit_watts - laoka_gpu_power_limit_expected_watts) > 1",
            "5m",
            "warning",
        ),
        Rule("LaokaPcieErrors", "pcie", 'rate(laoka_pcie_errors_total{kind="corrected"}[10m]) > 1', "10m", "warning"),
        Rule("LaokaEngineDoesNotAnswer", "engine", "laoka_engine_answers == 0", "5m", "warning"),
    )
