"""`laoka check` over real ssh, and a capture of the same host: the same verdict, the same findings, none of the host's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from laoka.cli.capture import bundle_of
from laoka.host import collect
from laoka.host.bundle import read_bundle
from laoka.host.sections import parse
from laoka.host.unread import Unread
from laoka.sandbox import hosts
from laoka.sandbox.lab import HostFolder
from tests.hosts import laoka

pytestmark = pytest.mark.ops
PLANTED = "sk-0123456789abcdefghijkl"


def judged(host: HostFolder, target: str) -> tuple[int, str, set[tuple[str, str, str]]]:
    """Exit status, verdict and findings of `laoka check TARGET --json` for that host."""
    done = laoka(host.lab, "check", target, "--json")
    answer: Any = json.loads(done.stdout)
    one = answer if isinstance(answer, dict) else answer[0]
    return done.returncode, one["verdict"], {(f["id"], f["area"], f["severity"]) for f in one["findings"]}


def test_live_and_capture_are_judged_alike_and_the_capture_names_nobody(ops_host: HostFolder, tmp_path: Path) -> None:
    plant = f"echo key={PLANTED} > /etc/default/laoka-test"
    names = "hostname; cat /etc/machine-id /sys/class/net/host0/address; nvidia-smi -L | sed 's/.*UUID: //; s/)//'"
    secrets = hosts.execute(ops_host, f"{plant}; {names}", check=True).stdout.split()
    secrets += [ops_host.address, PLANTED]
    live = judged(ops_host, "inventories/sandbox.py")
    data, replaced = bundle_of(parse(collect.text_over_ssh(hosts.ssh_target(ops_host))))
    file = tmp_path / "host.tar.gz"
    file.write_bytes(data)
    assert judged(ops_host, str(file)) == live
    assert live[0] in (0, 1) and len(live[2]) > 50
    text = read_bundle(data)
    assert [word for word in secrets if len(word) > 4 and word in text] == []
    assert sum(replaced.values()) > 0


def test_the_probe_reads_what_apt_would_install_and_writes_no_cache_of_apts(ops_host: HostFolder) -> None:
    def policy() -> str:
        section = parse(collect.text_over_ssh(hosts.ssh_target(ops_host))).section("apt-policy")
        assert not isinstance(section, Unread)
        return section.stdout

    caches = "find /var/cache/apt -name '*.bin'"
    hosts.execute(ops_host, f"{caches} -delete", check=True)
    told = policy()
    assert "linux-image-amd64:" in told and hosts.execute(ops_host, caches, check=True).stdout == ""
    hosts.execute(ops_host, "apt-cache policy", check=True)
    assert policy() == told
    # What is installed changed since: the half of the cache that is made of the lists alone serves, and nothing is written.
    hosts.execute(ops_host, "touch /var/lib/dpkg/status", check=True)
    before = hosts.execute(ops_host, f"{caches} -printf '%p %s %T@\\n'", check=True).stdout
    assert before.count("pkgcache.bin") == 2 and policy() == told
    assert hosts.execute(ops_host, f"{caches} -printf '%p %s %T@\\n'", check=True).stdout == before
