"""Two hosts as one: requests over both, a host drained without a cut stream, a bad change undone, a good one rolled through.

Somebody asks through the first host's gateway all the while, and must never notice. HAProxy, systemd and vLLM (on CPU) are real.
"""

from __future__ import annotations

import http.client
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from laoka.sandbox import hosts
from laoka.sandbox.lab import HostFolder
from laoka.serving.guard import DRAIN_FILE
from tests.hosts import INVENTORY, PYTHON, ROOT, pyinfra, until
from tests.served.client import Gateway, Got, chat
from tests.served.serving import UNIT, record, show

pytestmark = pytest.mark.sandbox
SERVE = "deploys/serve.py"
ROLL = f"Serve | {UNIT} is changed, one host at a time: drain, restart, completion, undrain"
DRAIN = f"{PYTHON} -m laoka.serving.drain"
GROUP = "_data = {**_data, 'gateway_group': 'lab'}"
Pair = tuple[HostFolder, HostFolder]


def inventory(folder: Path, change: str) -> str:
    """The sandbox's inventory with a statement that changes its hosts (`_hosts`) or their data (`_data`)."""
    path = folder / "inventory.py"
    path.write_text(
        '"""The sandbox\'s hosts as a group."""\n'
        "import runpy as _runpy\n"
        f"_hosts, _data = _runpy.run_path({str(ROOT / INVENTORY)!r})['sandbox']\n"
        f"{change}\n"
        "sandbox = (_hosts, _data)\n"
    )
    return str(path)


class Client(threading.Thread):
    """Asks for a short stream all the time, and keeps what was not as it should be."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(daemon=True)
        self.gateway, self.over = gateway, threading.Event()
        self.answers, self.longest_s = 0, 0.0
        self.wrong: list[object] = []

    def run(self) -> None:
        while not self.over.is_set():
            try:
                got = self.gateway.stream(chat(max_tokens=20))
            except OSError as error:
                self.wrong.append((time.strftime("%T"), error))
                continue
            self.answers, self.longest_s = self.answers + 1, max(self.longest_s, got.seconds)
            if got.status != 200 or got.events[-1][1] != "data: [DONE]":
                self.wrong.append((time.strftime("%T"), got))
            self.over.wait(0.1)


class Stream(threading.Thread):
    """A long stream that one host itself serves, asked for as another host's gateway would."""

    def __init__(self, host: HostFolder) -> None:
        super().__init__(daemon=True)
        self.gateway, self.begun = Gateway(host), threading.Event()
        self.gateway.hop = True
        self.got: Got | None = None
        self.ended_unix_s = 0.0

    def run(self) -> None:
        self.got = self.gateway.stream(chat(max_tokens=3000), begun=self.begun)
        self.ended_unix_s = time.time()

    @classmethod
    def of(cls, host: HostFolder) -> Stream | None:
        """One that has begun; None where the host's own gateway finds its engine late just now and says 503 (a busy machine)."""
        stream = cls(host)
        stream.start()
        while not stream.begun.wait(0.05) and stream.is_alive():
            pass
        if stream.got is not None and stream.got.status == 503:
            return None
        assert stream.begun.is_set(), f"no stream: {stream.got}"
        return stream


@contextmanager
def asking(gateway: Gateway) -> Iterator[Client]:
    """Somebody who asks meanwhile, and got each answer whole."""
    until(lambda: gateway.get("/health").status == 200, 60, "the group has a server")
    somebody = Client(gateway)
    somebody.start()
    try:
        yield somebody
    finally:
        somebody.over.set()
        somebody.join(60)
    assert not somebody.wrong, somebody.wrong[:3]
    print(f"\nthe client got {somebody.answers} whole answers, the slowest in {somebody.longest_s:.1f} s")


def since(pair: Pair) -> list[tuple[str, ...]]:
    """When each host's units were started last."""
    units = ("haproxy", "qwen-guard", "qwen-watchdog", "laoka-firewall")
    return [show(host, "ActiveEnterTimestampMonotonic", unit=unit) for host in pair for unit in units]


@pytest.fixture(scope="module")
def group(served_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The two hosts as a group, which restarts nothing; afterwards each for itself again."""
    lab, before = served_pair[0].lab, ([record(host) for host in served_pair], since(served_pair))
    done = pyinfra(lab, "-y", inventory(tmp_path_factory.mktemp("group"), GROUP), SERVE)
    assert done.status == 0, done.stderr
    for host in served_pair:
        assert {name.split(" | ")[0] for name in done.changed(host.name)} == {"Gateway"}
    assert ([record(host) for host in served_pair], since(served_pair)) == before, "joining a group restarted something"
    yield served_pair
    done = pyinfra(lab, "-y", INVENTORY, SERVE)
    assert done.status == 0, done.stderr


@pytest.fixture(autouse=True)
def left_in_service(group: Pair) -> Iterator[None]:
    """What one test leaves is no other's trouble; a failed one shows what the gateways and guards said."""
    yield
    for host in group:
        said = hosts.execute(host, "journalctl -t haproxy -t qwen-guard -o short-precise --no-pager -n 60").stdout
        print(f"{host.name}:\n{said}")
        if hosts.execute(host, f"test -e {DRAIN_FILE}").ok:
            hosts.execute(host, f"{DRAIN} off", deadline_s=120, check=True)


def served_by(host: HostFolder, since_unix_s: float) -> int:
    """How many requests the host's own guard finished since a time."""
    script = f'journalctl -t qwen-guard -o cat --no-pager --since @{since_unix_s:.0f} | grep -c \'"outcome": "done"\''
    return int(hosts.execute(host, script).stdout or 0)


def test_a_host_is_drained_without_cutting_a_stream_and_comes_back(group: Pair) -> None:
    first, second = group
    with asking(Gateway(first)):
        began = time.time()
        until(lambda: all(served_by(host, began) >= 3 for host in group), 120, "both hosts serve")
        stream = until(lambda: Stream.of(second), 60, "a long stream runs on the second host")
        hosts.execute(second, f"{DRAIN} on --deadline-s 120", deadline_s=150, check=True)
        stream.join(60)
        marked = float(hosts.execute(second, f"stat -c %.Y {DRAIN_FILE}", check=True).stdout)
        assert stream.got is not None and stream.got.events[-1][1] == "data: [DONE]"
        assert stream.ended_unix_s > marked, "the stream was over before the host was taken out of service"
        alone = time.time() + 1
        assert Gateway(second).post(chat(max_tokens=2)).status == 200  # by the other host
        until(lambda: served_by(first, alone) >= 5, 120, "the first host serves alone")
        assert served_by(second, alone) == 0
        hosts.execute(second, f"{DRAIN} off", deadline_s=120, check=True)
        back = time.time()
        until(lambda: served_by(second, back) >= 2, 120, "the second host serves again")


def test_a_change_that_fails_is_undone_and_stops_the_rollout(group: Pair, tmp_path: Path) -> None:
    before = {host.name: record(host) for host in group}
    change = f"{GROUP}; _data['serve_flags'] = {{**_data['serve_flags'], 'no-such-flag': 1}}"
    with asking(Gateway(group[0])):
        done = pyinfra(group[0].lab, "-y", inventory(tmp_path, change), SERVE)
    assert done.status == 1  # no host is left, so pyinfra has no results to tell, only its messages
    assert "bad_flag" in done.stderr and "unrecognized arguments: --no-such-flag" in done.stderr
    assert "qwen-serve.service is back on what ran before, and answers" in done.stderr
    assert "Traceback" not in done.stderr and done.stopped_at == ROLL
    # pyinfra takes the hosts in any order.
    undone = next(host for host in group if f"the rollout stopped when {host.name} failed" in done.stderr)
    untouched = next(host for host in group if host is not undone)
    assert record(undone).state == "ready" and record(undone) != before[undone.name]
    assert record(untouched) == before[untouched.name]
    for host in group:  # neither where it was undone nor where it never came to be
        flags = hosts.execute(host, "cat /etc/qwen-serve/vllm.yaml", check=True).stdout
        assert "no-such-flag" not in flags and "max-num-seqs" in flags
        gateway = Gateway(host)
        gateway.hop = True
        assert gateway.get("/health").status == 200, f"{host.name} was left out of service"


@pytest.mark.long
def test_one_flag_goes_through_host_by_host_and_the_second_run_changes_nothing(group: Pair, tmp_path: Path) -> None:
    # As if both had been deployed with a seat less.
    for host in group:
        hosts.execute(host, "sed -i 's/^max-num-seqs: 4$/max-num-seqs: 3/' /etc/qwen-serve/vllm.yaml", check=True)
    began, others, as_group = time.time(), since(group), inventory(tmp_path, GROUP)
    with asking(Gateway(group[0])):
        done = pyinfra(group[0].lab, "-y", as_group, SERVE)
        again = pyinfra(group[0].lab, "-y", as_group, SERVE)
    assert (done.status, again.status) == (0, 0), done.stderr + again.stderr
    ready = [record(host) for host in group]
    assert all(item.state == "ready" and item.since_unix_s > began and item.start_s for item in ready)
    earlier, later = sorted(ready, key=lambda item: item.since_unix_s)
    assert later.since_unix_s - (later.start_s or 0) > earlier.since_unix_s, "both were down at once"
    starts = " and ".join(f"{item.start_s:.1f} s" for item in (earlier, later))
    print(f"\nstarts of {starts}, ready {later.since_unix_s - earlier.since_unix_s:.0f} s after one another")
    assert since(group) == others, "the gateway, its guard, the firewall or the watchdog was restarted too"
    for host in group:
        hosts.execute(host, "grep -qx 'max-num-seqs: 4' /etc/qwen-serve/vllm.yaml", check=True)
        assert ROLL in done.changed(host.name) and {name.split(" | ")[0] for name in done.changed(host.name)} == {"Serve"}
        assert again.changed(host.name) == []


def certificate(folder: Path, pair: Pair) -> tuple[Path, Path]:
    """A certificate for both hosts that signed itself, made as docs/serving.md says: for clients, and with its key for gateways."""
    folder.mkdir()
    names = "subjectAltName=" + ",".join(f"IP:{host.address}" for host in pair)
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "825",
            "-subj", "/CN=laoka", "-addext", names, "-keyout", "key.pem", "-out", "ca.pem",
        ],
        cwd=folder, check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    (folder / "tls.pem").write_text((folder / "ca.pem").read_text() + (folder / "key.pem").read_text())
    return folder / "ca.pem", folder / "tls.pem"


@pytest.mark.long
def test_with_tls_the_gateways_serve_each_other_and_trust_no_other_certificate(group: Pair, tmp_path: Path) -> None:
    first, second = group
    ca, pem = certificate(tmp_path / "tls", group)
    before = ([record(host) for host in group], since(group))
    tls = {"gateway_group": "lab", "gateway_tls_pem_file": str(pem), "gateway_tls_ca_file": str(ca)}
    done = pyinfra(first.lab, "-y", inventory(tmp_path, f"_data = {{**_data, **{tls!r}}}"), SERVE)
    assert done.status == 0, done.stderr
    assert ([record(host) for host in group], since(group)) == before, "TLS restarted something"
    with asking(Gateway(first, tls_ca=ca)):
        began = time.time()
        until(lambda: all(served_by(host, began) >= 3 for host in group), 120, "both hosts serve")
        assert Gateway(second, tls_ca=ca).post(chat(max_tokens=2)).status == 200
        with pytest.raises((http.client.HTTPException, OSError)):
            Gateway(first).get("/health")
        nobody = http.client.HTTPSConnection(first.address, 8080, timeout=20, context=ssl.create_default_context())
        with pytest.raises(ssl.SSLCertVerificationError):
            nobody.request("GET", "/health")
        # One that calls itself the second host, with a certificate that nobody signed for it: the first does without.
        hosts.execute(second, f"{DRAIN} on --deadline-s 30", deadline_s=60, check=True)
        _, other = certificate(tmp_path / "other", group)
        script = "cat > /etc/haproxy/laoka/tls.pem && systemctl reload haproxy"
        hosts.execute(second, script, stdin=other.read_text(), check=True)
        hosts.execute(second, f"{DRAIN} off", deadline_s=120, check=True)
        alone = time.time()
        until(lambda: served_by(first, alone) >= 10, 120, "the first host serves alone")
        assert served_by(second, alone) == 0
