"""`laoka audit` on real hosts: one that is dead, what the deploys' gate, the pyinfra facts and the audit say of the same hosts."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from laoka.checks import CHECKS
from laoka.sandbox import faults, hosts
from laoka.sandbox.lab import HostFolder
from tests.hosts import INVENTORY, ROOT, environment, laoka, pyinfra, pyinfra_argv

pytestmark = pytest.mark.ops
GATES = {known.id for known in CHECKS.values() if known.gate}
Pair = tuple[HostFolder, HostFolder]


@pytest.fixture(scope="module", autouse=True)
def known(driver_hosts: Pair) -> None:
    """The hosts' keys are known, as after a first deploy."""
    for host in driver_hosts:
        hosts.execute(host, "true", check=True)


@pytest.fixture(scope="module")
def unlike(driver_hosts: Pair) -> Iterator[Pair]:
    """Two hosts, of which the second one's firmware can't address the card."""
    faults.apply(driver_hosts[1], "above-4g-off", clear=False)
    yield driver_hosts
    faults.apply(driver_hosts[1], "above-4g-off", clear=True)


def audit(host: HostFolder, *words: str, inventory: str = INVENTORY) -> subprocess.CompletedProcess[str]:
    return laoka(host.lab, "audit", inventory, *words)


def judged(host: HostFolder) -> dict[str, dict[str, Any]]:
    """What the audit says of each host of its lab."""
    return {item["host"]: item for item in json.loads(audit(host, "--json").stdout)["hosts"]}


def test_a_dead_host_costs_one_line_and_not_the_run(driver_hosts: Pair, tmp_path: Path) -> None:
    file = tmp_path / "three.py"
    file.write_text(
        f"from pathlib import Path\nexec(Path({str(ROOT / INVENTORY)!r}).read_text())\n"
        "sandbox = ([*sandbox[0], ('dead', {'ssh_hostname': '192.0.2.1'})], sandbox[1])\n"
    )
    started = time.monotonic()
    done = audit(driver_hosts[0], "--json", "--deadline", "8", inventory=str(file))
    assert done.returncode == 2 and time.monotonic() - started < 40
    told = {item["host"]: item for item in json.loads(done.stdout)["hosts"]}
    assert told["dead"]["error"] and all(told[host.name]["findings"] for host in driver_hosts)
    assert sum(line.startswith("laoka audit: dead: ") for line in done.stderr.splitlines()) == 1


def test_the_deploys_gate_and_the_audit_agree_on_every_host(unlike: Pair) -> None:
    checked = pyinfra(unlike[0].lab, "-y", INVENTORY, "deploys/check.py", deadline_s=120)
    found = judged(unlike[0])
    stopped = {
        name: {f["id"] for f in item["findings"] if f["severity"] in ("fail", "unknown")} & GATES for name, item in found.items()
    }
    refused = {
        name: {gate for gate in GATES if f"{name} refused, nothing was changed: [{gate}]" in checked.stderr} for name in found
    }
    assert refused == stopped == {"v100-1": set(), "v100-2": {"firmware.above-4g"}}
    assert checked.status == 1 and [bool(checked.failed(name)) for name in sorted(found)] == [False, True]


def test_the_facts_are_pyinfra_facts_and_say_what_the_audit_says_of_every_host(unlike: Pair) -> None:
    argv = pyinfra_argv("--json", INVENTORY, "fact", "laoka.NvidiaDriver", "laoka.NvidiaCards", "laoka.NextBoot")
    done = subprocess.run(argv, cwd=ROOT, env=environment(unlike[0].lab), capture_output=True, text=True, timeout=120)
    told = {name.rsplit(".", 1)[1].split(" ")[0]: values for name, values in json.loads(done.stdout).items()}
    found = judged(unlike[0])
    assert sorted(found) == ["v100-1", "v100-2"]
    for name, item in found.items():
        seen, version, cards = item["seen"], told["NvidiaDriver"][name]["version"], told["NvidiaCards"][name]
        assert (version if isinstance(version, str) else None) == seen["driver"]
        assert list(cards) == [card["bdf"] for card in seen["cards"]] == ["0000:03:00.0"]
        assert cards["0000:03:00.0"]["id"] == "10de:1db6"
        assert told["NextBoot"][name]["running"] == seen["kernel"]
