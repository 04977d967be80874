"""The watchdog's metrics on a host as node-exporter reads them, and its status over SSH."""

from __future__ import annotations

import json

import pytest

from laoka.sandbox import hosts
from laoka.sandbox.lab import HostFolder
from tests.hosts import INVENTORY, laoka

pytestmark = pytest.mark.sandbox


def test_the_file_for_node_exporter_is_what_the_metrics_say(served: HostFolder) -> None:
    file = hosts.execute(served, "cat /run/laoka/metrics.prom; stat -c %a /run/laoka/metrics.prom", check=True).stdout
    asked = hosts.execute(served, "curl -sf http://127.0.0.1:9835/metrics", check=True).stdout
    for text in (file, asked):
        assert "\nlaoka_gpus_expected 1.0\n" in text and "\nlaoka_gpus_seen 1.0\n" in text
    assert file.rstrip().endswith("644")
    assert [line for line in file.splitlines() if line.startswith("# TYPE")] == [
        line for line in asked.splitlines() if line.startswith("# TYPE")
    ]
    rules = hosts.execute(served, "cat /etc/laoka/monitoring/laoka-rules.yml", check=True).stdout
    assert "alert: LaokaGpuMissing" in rules
    assert json.loads(hosts.execute(served, "cat /etc/laoka/monitoring/laoka-dashboard.json", check=True).stdout)["panels"]


def test_the_status_of_an_inventory_over_ssh(served: HostFolder) -> None:
    told = laoka(served.lab, "watchdog", "status", INVENTORY).stdout
    assert f"{served.name}: 1 of 1 card(s) seen" in told
    assert "recovery: engine-only; reboots: never" in told
    found = json.loads(laoka(served.lab, "watchdog", "status", "--json", INVENTORY).stdout)
    mine = next(item for item in (found if isinstance(found, list) else [found]) if item["target"] == served.name)
    assert mine["host"] == served.name and not mine["stale"]
    assert {sensor["name"] for sensor in mine["sensors"]} >= {"pci", "kernel_log", "nvml", "engine", "boot"}
