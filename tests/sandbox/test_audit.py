"""The audit of a host that was deployed whole: nothing to look at, then what somebody changed by hand, live and at night.

It comes before the faults of test_story.py: of a card that fell off the bus an audit tells until the host boots.
"""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

import pytest

from laoka.sandbox import endpoint, hosts
from laoka.sandbox.lab import HostFolder
from tests.hosts import FULL, INVENTORY, laoka

pytestmark = pytest.mark.sandbox
UNIT = "/etc/systemd/system/qwen-watchdog.service"


def audit(host: HostFolder, *words: str) -> subprocess.CompletedProcess[str]:
    return laoka(host.lab, "audit", INVENTORY, "--limit", host.name, *words)


def bad(host: HostFolder) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(audit(host, "--json").stdout)["hosts"][0]["findings"]
    return [f for f in found if f["severity"] in ("warn", "unknown", "fail")]


def left(host: HostFolder, deadline_s: float = 120) -> list[dict[str, Any]]:
    """What the audit finds: at once when that is nothing, else after the deadline, as a start may still be under way."""
    end = time.monotonic() + deadline_s
    while (found := bad(host)) and time.monotonic() < end:
        time.sleep(1)
    return found


def titles(host: HostFolder) -> list[str]:
    alerts: list[Any] = list(endpoint.read_alerts(host.lab.alerts))
    return [alert["content"]["title"] for alert in alerts]


def test_a_deployed_host_is_as_it_should_be(served: HostFolder) -> None:
    hosts.execute(served, "laoka watchdog test-alert", check=True)
    assert left(served) == []
    done = audit(served)
    assert done.returncode == 0 and "as it should be" in done.stdout, done.stdout
    assert f"  {FULL}  done" in audit(served, "--history", served.name).stdout


def test_what_was_changed_by_hand_is_told_and_the_night_tells_it_once(served: HostFolder) -> None:
    night = "systemctl start laoka-audit.service"
    assert hosts.execute(served, "systemctl is-active laoka-audit.timer && systemctl is-enabled laoka-audit.timer").ok
    hosts.execute(served, night, check=True, deadline_s=120)
    known = len(titles(served))
    hosts.execute(served, f"cp -p {UNIT} /root/unit && echo '# by hand' >> {UNIT}", check=True)
    try:
        assert [(f["id"], f["case"], f["subject"]) for f in bad(served)] == [("audit.units", "changed", "qwen-watchdog")]
        hosts.execute(served, f"{night} && {night}", check=True, deadline_s=240)
        assert [title.split("] ")[-1] for title in titles(served)[known:]] == [f"{served.name}: audit: 1 new"]
    finally:
        hosts.execute(served, f"cp -p /root/unit {UNIT}; rm /root/unit", check=True)
    hosts.execute(served, night, check=True, deadline_s=120)
    assert titles(served)[-1].endswith("audit: back in order")
    assert bad(served) == []
