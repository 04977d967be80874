"""Two operators at once, a run that is killed, a host that somebody reboots: the deploy lock and its ledger on a real host."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from laoka.cli.capture import bundle_of
from laoka.host import collect
from laoka.host.redact import redact
from laoka.host.sections import parse
from laoka.sandbox import hosts
from laoka.sandbox.lab import HostFolder
from tests.hosts import INVENTORY, ROOT, Deployed, environment, laoka, pyinfra, pyinfra_argv, until
from tests.ops.drivers import boot_id

pytestmark = pytest.mark.ops
HOLD = "tests/ops/deploy_hold.py"
BOOT_ANEW = ("--data", "boot_anew=1")
LOCK = "/var/lib/laoka/deploys/lock"
LEFT = "the last deploy here did not end"


@pytest.fixture(scope="module", autouse=True)
def known(ops_host: HostFolder) -> None:
    """The host's key is known, as after a first deploy."""
    hosts.execute(ops_host, "true", check=True)


def audit(host: HostFolder, *words: str) -> str:
    done = laoka(host.lab, "audit", INVENTORY, *words)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def findings(host: HostFolder, *words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(audit(host, "--json", *words))["hosts"][0]["findings"]
    return found


def last_deploy(host: HostFolder) -> list[str]:
    return [f["case"] for f in findings(host) if f["id"] == "audit.deploy"]


def now_booted(host: HostFolder) -> str:
    """The host's boot; empty while it does not answer."""
    return hosts.execute(host, "cat /proc/sys/kernel/random/boot_id", deadline_s=10).stdout.strip()


def listens(host: HostFolder) -> bool:
    """Whether its sshd takes connections: told at once, where a whole login would take until the host is back."""
    try:
        socket.create_connection((host.address, 22), timeout=0.5).close()
    except OSError:
        return False
    return True


def go_on(host: HostFolder) -> None:
    hosts.execute(host, "touch /tmp/go", check=True)


def run(host: HostFolder) -> Deployed:
    return pyinfra(host.lab, "-y", INVENTORY, HOLD, deadline_s=180)


@contextmanager
def under_way(host: HostFolder, who: str, *words: str, log: Path = Path(os.devnull)) -> Iterator[subprocess.Popen[bytes]]:
    """A deploy that holds the host; its stderr goes to `log`."""
    hosts.execute(host, "rm -f /tmp/go /tmp/holding", check=True)
    env = {**environment(host.lab), **({"LOGNAME": who} if who else {})}
    with log.open("w") as stream:
        child = subprocess.Popen(
            pyinfra_argv("-y", *words, INVENTORY, HOLD), cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=stream
        )
    try:
        until(lambda: hosts.execute(host, "test -e /tmp/holding").ok, 180, "the first deploy holds the host")
        yield child
    finally:
        child.kill()
        child.wait()


def test_a_second_operator_is_told_who_the_first_is_and_waits_when_asked_to(ops_host: HostFolder, tmp_path: Path) -> None:
    with under_way(ops_host, "ann") as first:
        refused = run(ops_host)
        assert refused.status == 1
        assert "v100-1 refused, nothing was changed: ann@" in refused.stderr and f"deploying {HOLD} here" in refused.stderr
        until(lambda: last_deploy(ops_host) == ["running"], 180, "the audit sees that a deploy is under way")
        log = tmp_path / "second.log"
        with log.open("w") as stream:
            argv = pyinfra_argv("-y", "--data", "deploy_wait_s=90", INVENTORY, HOLD)
            second = subprocess.Popen(argv, cwd=ROOT, env=environment(ops_host.lab), stdout=subprocess.DEVNULL, stderr=stream)
        until(lambda: "waiting at most 90 s" in log.read_text(), 90, "the second one waits")
        assert second.poll() is None
        go_on(ops_host)
        assert (first.wait(60), second.wait(120)) == (0, 0)
    told = [line for line in audit(ops_host, "--history", "v100-1").splitlines() if line[0] != " "]
    assert all(f"  {HOLD}  done" in line for line in told[:2])
    assert ["ann@" in line for line in told[:2]] == [False, True]


def test_after_a_killed_run_its_operator_goes_on_at_once_and_any_other_too(ops_host: HostFolder) -> None:
    for who in ("", "ann"):
        with under_way(ops_host, who) as first:
            os.kill(first.pid, signal.SIGKILL)
            first.wait()
            go_on(ops_host)
            done = run(ops_host)
        assert done.status == 0 and LEFT in done.stderr and ("ann@" in done.stderr) == bool(who), done.stderr[-2000:]
        assert done.changed("v100-1") == ["Hold"]
    told = audit(ops_host, "--history", "v100-1")
    assert "done" in told.splitlines()[0] and "did not end" in told and "holds the lock" not in told


def test_a_host_that_somebody_reboots_is_free_from_its_first_second(ops_host: HostFolder) -> None:
    before = boot_id(ops_host)
    with under_way(ops_host, "ann") as first:
        hosts.execute(ops_host, "( sleep 1; systemctl reboot ) </dev/null >/dev/null 2>&1 &", check=True)
        until(lambda: now_booted(ops_host) not in ("", before), 180, "the host is back")
        # Its operator still looks at it; the audit and the next deploy know better.
        assert last_deploy(ops_host) == ["interrupted"]
        go_on(ops_host)
        done = run(ops_host)
        first.kill()
    assert done.status == 0 and LEFT in done.stderr, done.stderr[-2000:]
    assert "ann@" in done.stderr and "the host has booted since, which that run did not announce" in done.stderr


def test_a_host_that_its_own_run_reboots_stays_that_runs(ops_host: HostFolder) -> None:
    before = boot_id(ops_host)
    with under_way(ops_host, "ann", *BOOT_ANEW) as first:
        go_on(ops_host)
        until(lambda: not listens(ops_host), 180, "the host goes down")
        os.kill(first.pid, signal.SIGSTOP)  # its connection is slow to come back
        until(lambda: now_booted(ops_host) not in ("", before), 180, "the host is back")
        assert " reboot " in hosts.execute(ops_host, f"cat {LOCK}", check=True).stdout.replace("\n", " ")
        refused = run(ops_host)
        assert refused.status == 1 and "v100-1 refused, nothing was changed: ann@" in refused.stderr, refused.stderr[-2000:]
        os.kill(first.pid, signal.SIGCONT)
        assert first.wait(180) == 0
    last = audit(ops_host, "--history", "v100-1").splitlines()[0]
    assert "ann@" in last and f"  {HOLD}  done" in last
    assert not hosts.execute(ops_host, f"test -e {LOCK}").ok


def test_a_reboot_that_can_not_be_announced_is_not_made(ops_host: HostFolder, tmp_path: Path) -> None:
    before, log = boot_id(ops_host), tmp_path / "run.log"
    with under_way(ops_host, "ann", *BOOT_ANEW, log=log) as first:
        hosts.execute(ops_host, f"rm {LOCK}", check=True)  # somebody takes the host
        go_on(ops_host)
        assert first.wait(180) == 1
    said = log.read_text()
    assert "v100-1: no reboot was made, as it could not be announced: somebody has removed" in said, said[-2000:]
    assert now_booted(ops_host) == before


def test_a_dry_run_takes_no_lock(ops_host: HostFolder) -> None:
    before = hosts.execute(ops_host, "ls -lR --time-style=full-iso /var/lib/laoka/deploys").stdout
    assert pyinfra(ops_host.lab, "--dry", INVENTORY, HOLD, deadline_s=180).status == 0
    assert hosts.execute(ops_host, "ls -lR --time-style=full-iso /var/lib/laoka/deploys").stdout == before


def test_a_capture_of_the_host_is_audited_like_the_host(ops_host: HostFolder, tmp_path: Path) -> None:
    text = collect.text_over_ssh(hosts.ssh_target(ops_host))
    (tmp_path / "v100-1.tar.gz").write_bytes(bundle_of(parse(text))[0])
    live = {(f["id"], f["case"], f["severity"]) for f in findings(ops_host)}
    assert {(f["id"], f["case"], f["severity"]) for f in findings(ops_host, "--captures", str(tmp_path))} == live
    assert "ann@" in text and "ann@" not in redact(parse(text))[0].by_name["laoka"].stdout
