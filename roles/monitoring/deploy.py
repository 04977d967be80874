"""Monitoring: the journal is kept but bounded; the metrics are the watchdog's."""

from __future__ import annotations

from pathlib import Path

from pyinfra.api.deploy import deploy
from pyinfra.context import host
from pyinfra.operations import files

from laoka.operations.steps import STAMPS, until_stamped
from roles.settings import RoleSettings

TEMPLATES = Path(__file__).resolve().parents[2] / "templates" / "monitoring"


class MonitoringSettings(RoleSettings):
    """Settings of monitoring."""

    journal_max_use_mb: int = 1024
    """What the journal may take on disk."""


@deploy("Monitoring")
def monitoring() -> None:
    """Keep and bound the journal. Dashboards and alert rules are not rendered yet; the watchdog has the metrics."""
    max_use_mb = MonitoringSettings.of(host).journal_max_use_mb
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
