"""What a host's firewall has to let in, out of the inventory."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import jinja2
import pytest

from laoka.serving.firewall import Wanted
from roles.firewall.deploy import AGAIN, TEMPLATES, UNIT, FirewallSettings, wanted_on
from roles.gateway.deploy import Peer
from roles.settings import faults


def test_a_gateway_on_loopback_opens_nothing() -> None:
    assert wanted_on("127.0.0.1:8080", [8000], ["10.0.0.0/8"], []) == Wanted(None, (), (8000,))


def test_the_groups_hosts_are_let_in_beside_the_networks_named() -> None:
    peers = [Peer("b", "192.168.7.22", 8080)]
    assert wanted_on("0.0.0.0:8080", [8000], [], peers) == Wanted(8080, (), (8000,))
    assert wanted_on("0.0.0.0:8080", [8000], ["10.0.0.0/8"], peers).sources == ("10.0.0.0/8", "192.168.7.22/32")
    with pytest.raises(ValueError, match="set its gateway_address"):
        wanted_on("0.0.0.0:8080", [8000], ["10.0.0.0/8"], [Peer("b", "b.lan", 8080)])


def test_a_network_that_is_none_is_told_in_one_line() -> None:
    told = faults("h", {"firewall_allow_from": ["192.168.7.300/24"]}, [FirewallSettings], [])
    assert len(told) == 1 and "192.168.7.300/24" in told[0]
    assert faults("h", {"firewall": "closed"}, [FirewallSettings], []) != []


def test_systemd_finds_no_fault_with_the_units(tmp_path: Path) -> None:
    assert shutil.which("systemd-analyze"), "systemd-analyze is missing: apt-get install systemd"
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined)
    for unit in (UNIT, AGAIN):
        text = environment.get_template(f"{unit}.j2").render(python="/usr/bin/python3", settings="/etc/laoka/firewall.json")
        (tmp_path / unit).write_text(text)
    argv = ["systemd-analyze", "--no-pager", "verify", "--recursive-errors=no", UNIT, AGAIN]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
