"""The nightly audit: the host judges itself by its lock and inventory, and tells what has changed since the last time."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

from pydantic import Field
from pyinfra.api.deploy import deploy
from pyinfra.api.host import Host
from pyinfra.context import host
from pyinfra.operations import files

from laoka.fleet.expected import DATA_KEYS
from laoka.operations.steps import run_unit
from roles.agent.deploy import PYTHON
from roles.base.deploy import BaseSettings
from roles.plan import lock_path, locked_stack
from roles.settings import RoleSettings, data_of
from roles.watchdog.deploy import ALERT_URLS

TEMPLATES = Path(__file__).resolve().parents[2] / "templates" / "audit"
CONFIG = "/etc/laoka/audit.json"
TIMER, SERVICE = "laoka-audit.timer", "laoka-audit.service"


class AuditSettings(RoleSettings):
    """Settings of the nightly audit."""

    audit_at: str = Field("06:30", pattern=r"^([01]\d|2[0-3]):[0-5]\d$")
    """The host's local time at which it audits itself; what is new goes to the alert channels, and nothing when nothing is."""


def wishes(on: Host) -> dict[str, Any]:
    """What a host is to judge itself by: the part of inventory and lock that an audit asks for. Errors: InventoryError."""
    base, data = BaseSettings.of(on), data_of(on)
    return {
        "host": on.name, "lang": base.lang, "simulated": base.simulated, "alert_urls_file": ALERT_URLS,
        "data": {key: data[key] for key in DATA_KEYS if key in data},
        "stack": dict(locked_stack(on)) or None, "has_lock": lock_path(on) is not None,
    }  # fmt: skip


@deploy("Audit")
def audit() -> None:
    """What it is judged by, the unit that judges, the timer that starts it."""
    text = json.dumps(wishes(host), ensure_ascii=False, indent=1, sort_keys=True, default=str) + "\n"
    files.put(name="What the host is judged by", src=StringIO(text), dest=CONFIG, mode="600")
    files.template(
        name="Unit", src=str(TEMPLATES / f"{SERVICE}.j2"), dest=f"/etc/systemd/system/{SERVICE}", mode="644",
        python=PYTHON, config=CONFIG, alert_urls=ALERT_URLS,
    )  # fmt: skip
    files.template(
        name="Timer", src=str(TEMPLATES / f"{TIMER}.j2"), dest=f"/etc/systemd/system/{TIMER}", mode="644",
        at=AuditSettings.of(host).audit_at,
    )  # fmt: skip
    config = [f"/etc/systemd/system/{name}" for name in (TIMER, SERVICE)]
    run_unit(name="It is started every night", unit=TIMER, config=config, _timeout=120)
