"""Monitoring: the journal is kept but bounded; metrics for node-exporter, alert rules for Prometheus, a dashboard for Grafana."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from pyinfra.api.deploy import deploy
from pyinfra.context import host
from pyinfra.operations import files

from laoka.catalog.messages import language
from laoka.operations.steps import STAMPS, until_stamped
from roles.base.deploy import BaseSettings
from roles.monitoring.dashboard import dashboard
from roles.monitoring.rules import rules
from roles.settings import RoleSettings

TEMPLATES = Path(__file__).resolve().parents[2] / "templates" / "monitoring"
FOLDER = "/etc/laoka/monitoring"
METRICS_FILE = "/run/laoka/metrics.prom"


class MonitoringSettings(RoleSettings):
    """Settings of monitoring."""

    journal_max_use_mb: int = 1024
    """What the journal may take on disk."""
    node_exporter_textfile_dir: str | None = None
    """Folder that node-exporter on the host reads *.prom files from; the watchdog's are linked into it. None: they are not."""


@deploy("Monitoring")
def monitoring() -> None:
    """Keep and bound the journal; lay out alert rules and dashboard; link the watchdog's metrics to node-exporter."""
    settings, lang = MonitoringSettings.of(host), language(BaseSettings.of(host).lang)
    max_use_mb = settings.journal_max_use_mb
    files.template(
        name="The journal is kept, and bounded", src=str(TEMPLATES / "journald.conf.j2"),
        dest="/etc/systemd/journald.conf.d/laoka.conf", mode="644", max_use_mb=max_use_mb,
    )  # fmt: skip
    until_stamped(
        name="journald knows it",
        stamp=f"{STAMPS}/journald",
        text=f"persistent {max_use_mb}",
        commands=["systemctl restart systemd-journald"],
    )
    files.template(
        name="Alert rules for Prometheus", src=str(TEMPLATES / "laoka-rules.yml.j2"),
        dest=f"{FOLDER}/laoka-rules.yml", mode="644", create_remote_dir=True, rules=rules(), lang=lang,
    )  # fmt: skip
    files.put(
        name="Dashboard for Grafana",
        src=StringIO(dashboard(lang)),
        dest=f"{FOLDER}/laoka-dashboard.json",
        mode="644",
    )
    if settings.node_exporter_textfile_dir:
        folder = settings.node_exporter_textfile_dir.rstrip("/")
        files.directory(name="Folder of node-exporter's text files", path=folder)
        files.link(name="node-exporter reads the watchdog's metrics", path=f"{folder}/laoka.prom", target=METRICS_FILE)
