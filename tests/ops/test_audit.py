"""`laoka audit` on a real host: a host that is dead, what a deploy's gate and an audit say of it, and two operators at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from laoka.checks import CHECKS
from laoka.host.redact import redact
from laoka.host.report import build
from laoka.host.sections import parse
from laoka.sandbox import faults, hosts
from laoka.sandbox.lab import HostFolder
from tests.hosts import INVENTORY, ROOT, environment, pyinfra, pyinfra_argv, until

pytestmark = pytest.mark.ops
LAOKA = [sys.executable, "-m", "laoka.cli", "--lang", "en", "audit"]
HOLD = "tests/ops/deploy_hold.py"
GATES = {known.id for known in CHECKS.values() if known.gate}


def audit(host: HostFolder, *words: str, inventory: str = INVENTORY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAOKA, inventory, *words], cwd=ROOT, env=environment(host.lab), capture_output=True, text=True, timeout=120
    )


def findings(done: subprocess.CompletedProcess[str], host: str = "v100-1") -> list[dict[str, Any]]:
    document = json.loads(done.stdout)
    return [f for item in document["hosts"] if item["host"] == host for f in item["findings"]]


def test_a_dead_host_costs_one_line_and_not_the_run(ops_host: HostFolder, tmp_path: Path) -> None:
    file = tmp_path / "two.py"
    file.write_text(
        f"from pathlib import Path\nexec(Path({str(ROOT / INVENTORY)!r}).read_text())\n"
        "sandbox = ([*sandbox[0], ('dead', {'ssh_hostname': '10.77.2.99'})], sandbox[1])\n"
    )
    started = time.monotonic()
    done = audit(ops_host, "--json", "--deadline", "8", inventory=str(file))
    assert done.returncode == 2 and time.monotonic() - started < 40
    told = {item["host"]: item for item in json.loads(done.stdout)["hosts"]}
    assert told["dead"]["error"] and told["v100-1"]["error"] is None and told["v100-1"]["findings"]
    lines = [line for line in done.stderr.splitlines() if "dead" in line]
    assert len(lines) == 1 and lines[0].startswith("laoka audit: dead: ")


@pytest.mark.parametrize("fault", [None, "above-4g-off"])
def test_the_deploys_gate_and_the_audit_agree(ops_host: HostFolder, fault: str | None) -> None:
    if fault:
        faults.apply(ops_host, fault, clear=False)
    try:
        checked = pyinfra(ops_host.lab, "-y", INVENTORY, "deploys/check.py", deadline_s=120)
        stopped = {
            f["id"] for f in findings(audit(ops_host, "--json")) if f["id"] in GATES and f["severity"] in ("fail", "unknown")
        }
    finally:
        if fault:
            faults.apply(ops_host, fault, clear=True)
    refused = {gate for gate in GATES if f"[{gate}]" in checked.stderr}
    assert refused == GATES.intersection(bad) == ({"firmware.above-4g"} if fault else set())
    assert checked.status == (1 if fault else 0)


def test_the_facts_are_pyinfra_facts_and_say_what_the_audit_says(ops_host: HostFolder) -> None:
    argv = pyinfra_argv("--json", INVENTORY, "fact", "laoka.NvidiaDriver", "laoka.NvidiaCards", "laoka.NextBoot")
    done = subprocess.run(argv, cwd=ROOT, env=environment(ops_host.lab), capture_output=True, text=True, timeout=120)
    told = {name.rsplit(".", 1)[1].split(" ")[0]: values["v100-1"] for name, values in json.loads(done.stdout).items()}
    seen = next(item["seen"] for item in json.loads(audit(ops_host, "--json").stdout)["hosts"] if item["host"] == "v100-1")
    version = told["NvidiaDriver"]["version"]
    assert (version if isinstance(version, str) else None) == seen["driver"]
    assert list(told["NvidiaCards"]) == [card["bdf"] for card in seen["cards"]] == ["0000:03:00.0"]
    assert told["NvidiaCards"]["0000:03:00.0"]["id"] == "10de:1db6"
    assert told["NextBoot"]["running"] == seen["kernel"]


@pytest.fixture
def first(ops_host: HostFolder) -> Iterator[subprocess.Popen[bytes]]:
    """A deploy that holds the host."""
    hosts.execute(ops_host, "rm -f /tmp/go /tmp/holding")
    argv = pyinfra_argv("-y", INVENTORY, HOLD)
    env = {**environment(ops_host.lab), "LOGNAME": "ann", "USER": "ann"}
    child = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: hosts.execute(ops_host, "test -e /tmp/holding").ok, 60, "the first deploy holds the host")
        yield child
    finally:
        hosts.execute(ops_host, "touch /tmp/go")
        child.kill()
        child.wait()


def test_a_second_operator_is_told_who_the_first_is_and_waits_when_asked_to(
    ops_host: HostFolder, first: subprocess.Popen[bytes]
) -> None:
    refused = pyinfra(ops_host.lab, "-y", INVENTORY, HOLD, deadline_s=60)
    assert refused.status == 1
    assert "v100-1 refused, nothing was changed: ann@" in refused.stderr and f"deploying {HOLD} here" in refused.stderr
    under_way = [f for f in findings(audit(ops_host, "--json")) if f["id"] == "audit.deploy"]
    assert [(f["case"], f["severity"]) for f in under_way] == [("running", "info")]
    argv = pyinfra_argv("-y", "--data", "deploy_wait_s=60", INVENTORY, HOLD)
    second = subprocess.Popen(argv, cwd=ROOT, env=environment(ops_host.lab), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    time.sleep(4)
    assert second.poll() is None
    hosts.execute(ops_host, "touch /tmp/go")
    _, said = second.communicate(timeout=60)
    assert (first.wait(30), second.returncode) == (0, 0)
    assert b"waiting at most 60 s" in said
    told = audit(ops_host, "--history", "v100-1").stdout.splitlines()
    assert [f"  {HOLD}  done" in line for line in told if not line.startswith("    ")][:2] == [True, True]
    assert "ann@" in told[-3] and "ann@" not in told[0]


def test_a_killed_run_leaves_a_lock_that_the_next_one_takes_over(ops_host: HostFolder, first: subprocess.Popen[bytes]) -> None:
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    until(
        lambda: "interrupted" in [f["case"] for f in findings(audit(ops_host, "--json")) if f["id"] == "audit.deploy"],
        30,
        "the audit sees that nobody holds the lock any more",
    )
    hosts.execute(ops_host, "touch /tmp/go")
    third = pyinfra(ops_host.lab, "-y", INVENTORY, HOLD, deadline_s=60)
    assert third.status == 0 and "the last deploy here did not end" in third.stderr and "ann@" in third.stderr
    told = audit(ops_host, "--history", "v100-1").stdout
    assert "done" in told.splitlines()[0] and "did not end" in told and "holds the lock" not in told


def test_a_dry_run_takes_no_lock(ops_host: HostFolder) -> None:
    before = hosts.execute(ops_host, "ls -lR --time-style=full-iso /var/lib/laoka/deploys").stdout
    assert pyinfra(ops_host.lab, "--dry", INVENTORY, HOLD, deadline_s=60).status == 0
    assert hosts.execute(ops_host, "ls -lR --time-style=full-iso /var/lib/laoka/deploys").stdout == before


def test_a_capture_of_the_host_is_audited_like_the_host(ops_host: HostFolder, tmp_path: Path) -> None:
    from laoka.cli.capture import bundle_of
    from laoka.host import collect

    text = collect.text_over_ssh(hosts.ssh_target(ops_host))
    (tmp_path / "v100-1.tar.gz").write_bytes(bundle_of(parse(text))[0])
    live = {(f["id"], f["case"], f["severity"]) for f in findings(audit(ops_host, "--json"))}
    replayed = {(f["id"], f["case"], f["severity"]) for f in findings(audit(ops_host, "--json", "--captures", str(tmp_path)))}
    assert replayed == live
    assert "ann@" not in redact(parse(text))[0].by_name["laoka"].stdout
    assert build(parse(text)).deployed is not None
