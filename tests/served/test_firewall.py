"""The gateway's port beside whatever filters a host: nothing, nftables that drops, ufw. nft, ufw, sshd and systemd are real.

In each of them SSH has to stay: a connection that is open goes on, and new ones come in.
"""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator

import pytest

from laoka.sandbox import hosts
from laoka.sandbox.lab import HostFolder
from tests.hosts import INVENTORY, PYTHON, Deployed, pyinfra, until
from tests.served.client import PORT, Gateway

pytestmark = pytest.mark.sandbox
DEPLOY = "tests/served/deploy_firewall.py"
ENGINE_PORT = 8000
CLOSED = """\
#!/usr/sbin/nft -f
flush ruleset
table inet filter {
  chain input {
    type filter hook input priority filter; policy drop;
    iifname "lo" accept
    ct state established,related accept
    tcp dport 22 accept
  }
}
table inet theirs {
  chain mine {
    counter comment "theirs"
  }
}
"""


class OpenSession:
    """An SSH connection that stays open and answers line by line."""

    def __init__(self, host: HostFolder) -> None:
        argv = [*hosts.ssh_argv(host), "while read -r word; do echo got $word; done"]
        self._child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def says(self, word: str) -> str:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(f"{word}\n")
        self._child.stdin.flush()
        return self._child.stdout.readline().strip()

    def close(self) -> None:
        self._child.kill()
        self._child.wait(10)


@pytest.fixture(scope="module")
def session(served: HostFolder) -> Iterator[OpenSession]:
    """Open all the while."""
    opened = OpenSession(served)
    assert opened.says("first") == "got first"
    yield opened
    assert opened.says("last") == "got last"
    opened.close()


def reachable(host: HostFolder, port: int, deadline_s: float = 5) -> bool:
    try:
        socket.create_connection((host.address, port), deadline_s).close()
    except (TimeoutError, OSError):
        return False
    return True


def answers(host: HostFolder) -> bool:
    """Whether the gateway is reached from outside; a busy machine's guard may miss its engine for a moment, and say 503."""
    until(lambda: Gateway(host).get("/health").status == 200, 60, "the gateway answers")
    return True


def ssh_stays(host: HostFolder, session: OpenSession) -> None:
    assert session.says("on") == "got on", "the open connection stands still"
    assert hosts.execute(host, "echo in", deadline_s=30).stdout == "in\n", "no new connection comes in"


def run(host: HostFolder, *flags: str) -> Deployed:
    done = pyinfra(host.lab, *flags, "--limit", host.name, INVENTORY, DEPLOY)
    assert done.status == 0, done.stderr
    return done


def test_where_nothing_filters_only_the_engines_port_is_closed(served: HostFolder, session: OpenSession) -> None:
    assert answers(served)
    script = f"systemd-run --collect --unit other python3 -m http.server --bind {served.address} {ENGINE_PORT}"
    hosts.execute(served, script, check=True)
    try:
        until(lambda: f"{served.address}:{ENGINE_PORT}" in hosts.execute(served, "ss -ltnH").stdout, 60, "somebody listens there")
        assert not reachable(served, ENGINE_PORT, 2), "a server on the engine's port is reached from outside"
        assert hosts.execute(served, f"curl -sf -m 5 -o /dev/null {served.address}:{ENGINE_PORT}").ok, "the host itself reaches it"
    finally:
        hosts.execute(served, "systemctl stop other")
    ssh_stays(served, session)


def test_beside_nftables_that_drops(served: HostFolder, session: OpenSession) -> None:
    hosts.execute(served, "cp /etc/nftables.conf /root/nftables.conf && cat > /etc/nftables.conf", stdin=CLOSED, check=True)
    try:
        hosts.execute(served, "nft -f /etc/nftables.conf", check=True)
        assert not reachable(served, PORT, 2), "the set-up of this test does not close the port"
        planned = run(served, "--dry").planned(served.name)
        changed = run(served, "-y").changed(served.name)
        assert planned == changed == ["Firewall | The gateway's port is open as far as it should be, and SSH is as it was"]
        assert answers(served) and not reachable(served, ENGINE_PORT, 2)
        assert run(served, "-y").changed(served.name) == []
        ssh_stays(served, session)
        rules = hosts.execute(served, "nft list ruleset", check=True).stdout
        assert "policy drop" in rules and "theirs" in rules, "what was there is gone"
        # The host's own unit loads its rules anew and flushes ours.
        for how in ("start", "reload", "restart"):
            hosts.execute(served, f"systemctl {how} nftables", deadline_s=60, check=True)
            until(lambda: reachable(served, PORT, 2), 30, f"the port is open again after systemctl {how} nftables")
            ssh_stays(served, session)
        hosts.execute(served, "systemctl restart laoka-firewall", deadline_s=60, check=True)
        rules = hosts.execute(served, "nft list ruleset", check=True).stdout
        assert rules.count(f'"laoka {PORT}"') == 1 and "theirs" in rules
    finally:
        hosts.execute(served, "systemctl disable --now nftables; cp /root/nftables.conf /etc/nftables.conf; nft flush ruleset")
        hosts.execute(served, "systemctl restart laoka-firewall", deadline_s=60, check=True)
    ssh_stays(served, session)


def test_beside_ufw(served: HostFolder, session: OpenSession) -> None:
    install = "DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends install ufw >/dev/null"
    hosts.execute(served, f"{install} && ufw allow 22/tcp && ufw --force enable", deadline_s=180, check=True)
    try:
        assert "Status: active" in hosts.execute(served, "ufw status").stdout
        assert not reachable(served, PORT, 2), "ufw does not close the port"
        planned = run(served, "--dry").planned(served.name)
        changed = run(served, "-y").changed(served.name)
        assert planned == changed == ["Firewall | The gateway's port is open as far as it should be, and SSH is as it was"]
        assert answers(served)
        added = hosts.execute(served, "ufw show added", check=True).stdout
        assert f"ufw allow {PORT}/tcp comment 'laoka {PORT}'" in added and "ufw allow 22/tcp" in added
        ssh_stays(served, session)
        assert run(served, "-y").changed(served.name) == []
        hosts.execute(served, "ufw reload", deadline_s=60, check=True)
        assert answers(served)
        ssh_stays(served, session)
    finally:
        purge = "DEBIAN_FRONTEND=noninteractive apt-get -q -y purge ufw >/dev/null"
        hosts.execute(served, f"ufw --force disable; {purge}; nft flush ruleset", deadline_s=180)
        hosts.execute(served, "systemctl restart laoka-firewall", deadline_s=60, check=True)
    assert answers(served)
    ssh_stays(served, session)


@pytest.mark.parametrize("where", ["listens", "talks"])
def test_a_port_that_is_sshds_is_never_closed(served: HostFolder, session: OpenSession, where: str) -> None:
    """Also one that only its running process knows: sshd on another port than its settings name, and a connection through it."""
    port = 22 if where == "talks" else 2222
    settings = json.dumps({"port": None, "sources": [], "inner_ports": [port]})
    before = hosts.execute(served, "nft list ruleset", check=True).stdout
    if where == "listens":
        hosts.execute(served, "systemd-run --collect --unit second-sshd /usr/sbin/sshd -D -p 2222", check=True)
        until(lambda: reachable(served, 2222, 2), 120, "the second sshd listens")
    try:
        script = f"cat > /root/firewall.json && {PYTHON} -m laoka.serving.firewall apply --settings /root/firewall.json"
        done = hosts.execute(served, script, stdin=settings)
        assert done.status == 1 and f"port {port} is sshd's: nothing was changed" in done.stderr
        assert hosts.execute(served, "nft list ruleset", check=True).stdout == before
    finally:
        hosts.execute(served, "systemctl stop second-sshd")
    ssh_stays(served, session)
