"""Two hosts as one: requests over both, a host drained without a cut stream, a change rolled through, a bad one rolled back.

Somebody asks through the first host's gateway all the time, and must never notice.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from laoka.sandbox import hosts
from laoka.sandbox.lab import HostFolder
from tests.hosts import INVENTORY, PYTHON, ROOT, Deployed, pyinfra, until
from tests.served.client import Gateway, Got, chat
from tests.served.serving import record, show

pytestmark = pytest.mark.sandbox
SERVE = "deploys/serve.py"
ROLL = "Serve | qwen-serve is changed, one host at a time: drain, restart, completion, undrain"


def inventory(folder: Path, change: str) -> str:
    """The sandbox's inventory with one statement that changes its data."""
    path = folder / "inventory.py"
    path.write_text(
        '"""The sandbox\'s hosts as a group."""\n'
        "import runpy as _runpy\n"
        f"_hosts, _data = _runpy.run_path({str(ROOT / INVENTORY)!r})['sandbox']\n"
        "_data = {**_data, 'gateway_group': 'lab'}\n"
        f"{change}\n"
        "sandbox = (_hosts, _data)\n"
    )
    return str(path)


def names(done: Deployed, host: HostFolder) -> list[str]:
    return [name for name in done.changed(host.name) if not name.startswith("Agent")]


class Client(threading.Thread):
    """Asks for a short stream all the time, and keeps what was not as it should be."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(daemon=True)
        self.gateway, self.over = gateway, threading.Event()
        self.answers: list[Got] = []
        self.wrong: list[object] = []

    def run(self) -> None:
        while not self.over.is_set():
            try:
                got = self.gateway.stream(chat(max_tokens=20))
            except OSError as error:
                self.wrong.append(error)
                continue
            self.answers.append(got)
            if got.status != 200 or got.events[-1][1] != "data: [DONE]":
                self.wrong.append(got)
            self.over.wait(0.1)


@pytest.fixture(scope="module")
def group(
    served_pair: tuple[HostFolder, HostFolder], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[HostFolder, HostFolder]]:
    """The two hosts as a group; afterwards each for itself again."""
    before = [record(host) for host in served_pair]
    lab = served_pair[0].lab
    done = pyinfra(lab, "-y", inventory(tmp_path_factory.mktemp("group"), ""), SERVE)
    assert done.status == 0, done.stderr
    for host, was in zip(served_pair, before, strict=True):
        assert record(host) == was, "joining a group restarted the engine"
        assert {name.split(" | ")[0] for name in names(done, host)} == {"Gateway"}
    yield served_pair
    done = pyinfra(lab, "-y", INVENTORY, SERVE)
    assert done.status == 0, done.stderr


@pytest.fixture(scope="module")
def client(group: tuple[HostFolder, HostFolder]) -> Iterator[Client]:
    gateway = Gateway(group[0])
    until(lambda: gateway.get("/health").status == 200, 60, "the group has a server")
    somebody = Client(gateway)
    somebody.start()
    yield somebody
    somebody.over.set()
    somebody.join(60)
    assert not somebody.wrong, somebody.wrong[:3]
    print(f"\nthe client got {len(somebody.answers)} whole answers")


def served_by(host: HostFolder, since_unix_s: float) -> int:
    """How many requests the host's own guard finished since a time."""
    script = f'journalctl -t qwen-guard -o cat --no-pager --since @{since_unix_s:.0f} | grep -c \'"outcome": "done"\''
    return int(hosts.execute(host, script).stdout or 0)


def test_requests_are_spread_over_both_hosts(group: tuple[HostFolder, HostFolder], client: Client) -> None:
    since = time.time()
    until(lambda: all(served_by(host, since) >= 3 for host in group), 30, "both hosts serve")
    assert Gateway(group[1]).post(chat(max_tokens=2)).status == 200


def test_a_host_is_drained_without_cutting_a_stream(group: tuple[HostFolder, HostFolder], client: Client) -> None:
    first, second = group
    until(lambda: Gateway(second).get("/health").status == 200, 30, "it is well")
    got: list[Got] = []
    # The hop says: this very host, as another gateway would ask.
    gateway = Gateway(second)
    gateway.hop = True
    thread = threading.Thread(target=lambda: got.append(gateway.stream(chat(max_tokens=3000))))
    thread.start()
    state = f"{PYTHON} -m laoka.serving.drain"
    until(lambda: " 0 request" not in hosts.execute(second, f"{state} status").stdout, 20, "the stream runs")
    hosts.execute(second, f"{state} on --deadline-s 120", deadline_s=150, check=True)
    thread.join(60)
    assert got[0].status == 200 and got[0].events[-1][1] == "data: [DONE]"
    since = time.time() + 1
    until(lambda: served_by(first, since) >= 10, 30, "the first host serves alone")
    assert served_by(second, since) == 0
    assert Gateway(second).post(chat(max_tokens=2)).status == 200  # by the other host
    hosts.execute(second, f"{state} off", deadline_s=120, check=True)
    since = time.time()
    until(lambda: served_by(second, since) >= 2, 30, "the second host serves again")


def test_a_change_that_fails_is_undone_and_stops_the_rollout(
    group: tuple[HostFolder, HostFolder], client: Client, tmp_path: Path
) -> None:
    before = {host.name: record(host) for host in group}
    change = "_data['serve_flags'] = {**_data['serve_flags'], 'no-such-flag': 1}"
    done = pyinfra(group[0].lab, "-y", inventory(tmp_path, change), SERVE)
    assert done.status == 1  # no host is left, so pyinfra has no results to tell, only its messages
    assert "bad_flag" in done.stderr and "unrecognized arguments: --no-such-flag" in done.stderr
    assert "qwen-serve.service is back on what ran before, and answers" in done.stderr
    assert "Traceback" not in done.stderr
    # pyinfra takes the hosts in any order.
    undone = next(host for host in group if f"the rollout stopped when {host.name} failed" in done.stderr)
    untouched = next(host for host in group if host is not undone)
    assert record(undone).state == "ready" and record(undone) != before[undone.name]
    assert record(untouched) == before[untouched.name]
    for host in group:  # neither where it was undone nor where it never came to be
        flags = hosts.execute(host, "cat /etc/qwen-serve/vllm.yaml", check=True).stdout
        assert "no-such-flag" not in flags and "max-num-seqs" in flags
    assert Gateway(undone).get("/health").status == 200


def test_a_change_goes_through_host_by_host_and_the_second_run_changes_nothing(
    group: tuple[HostFolder, HostFolder], client: Client, tmp_path: Path
) -> None:
    # As if both had been started with other flags than the inventory has.
    for host in group:
        hosts.execute(host, "echo other > /var/lib/laoka/stamps/qwen-serve.service.config", check=True)
    began, guards = time.time(), [show(host, "ActiveEnterTimestampMonotonic", unit="qwen-guard") for host in group]
    as_group = inventory(tmp_path, "")
    done = pyinfra(group[0].lab, "-y", as_group, SERVE)
    assert done.status == 0, done.stderr
    ready = [record(host) for host in group]
    assert all(item.state == "ready" and item.since_unix_s > began and item.start_s for item in ready)
    first, second = sorted(ready, key=lambda item: item.since_unix_s)
    assert second.since_unix_s - (second.start_s or 0) > first.since_unix_s, "both were down at once"
    for host in group:
        assert ROLL in names(done, host) and {name.split(" | ")[0] for name in names(done, host)} <= {"Serve"}
    assert [show(host, "ActiveEnterTimestampMonotonic", unit="qwen-guard") for host in group] == guards
    again = pyinfra(group[0].lab, "-y", as_group, SERVE)
    assert again.status == 0 and [names(again, host) for host in group] == [[], []]
    assert [record(host) for host in group] == ready
    counted = Counter(got.status for got in client.answers)
    assert set(counted) == {200} and counted[200] > 50
