"""The real daemon as a process: a sysfs tree, a kernel log file, a systemd socket and an alert endpoint that are all ours."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from laoka.cli.main import cli
from laoka.sandbox import card

BDF = "0000:03:00.0"
SECRET = "s3cr3t-token"
DETECTION_GOAL_S = 3.0


def until(condition: Callable[[], Any], deadline_s: float = 8.0) -> Any:
    """The first true value of the condition; what it is at the deadline otherwise."""
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        if found := condition():
            return found
        time.sleep(0.02)
    return condition()


class Endpoint:
    """Where alerts arrive; answers 500 while `broken`."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.asked = 0
        self.broken = False
        endpoint = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.asked += 1
                if not endpoint.broken:
                    endpoint.got.append(body | {"received_s": time.monotonic()})
                self.send_response(500 if endpoint.broken else 200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"json://127.0.0.1:{self.server.server_port}/{SECRET}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def titles(self) -> list[str]:
        return [alert["title"] for alert in self.got]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Host:
    """A host with a simulated card, and the daemon on it."""

    def __init__(self, folder: Path, endpoint: Endpoint) -> None:
        self.folder = folder
        self.endpoint = endpoint
        self.gpu = folder / "gpu"
        card.create(self.gpu, (card.v100_pcie_32gb(BDF),))
        self.port = free_port()
        (folder / "urls").write_text(f"# the phone\n{endpoint.url}\n")
        self.config = folder / "watchdog.toml"
        self.log = folder / "journal"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(folder / "notify"))
        self.socket.settimeout(8)
        self.child: subprocess.Popen[bytes] | None = None
        self.configure()

    def configure(self, **changes: str) -> None:
        values = {
            "host": '"box-7"',
            "simulated": "true",
            "sysfs_root": f'"{self.gpu}/sys"',
            "kernel_log": f'"{self.gpu}/kmsg"',
            "state_dir": f'"{self.folder}/state"',
            "state_file": f'"{self.folder}/run/watchdog.json"',
            "metrics_address": f'"127.0.0.1:{self.port}"',
            "alert_urls_file": f'"{self.folder}/urls"',
            "nvml": '"off"',
            "unit": '""',
            "recovered_after_s": "0.5",
            "pci_interval_s": "0.2",
        } | changes
        lines = [f"{key} = {value}" for key, value in values.items()]
        self.config.write_text("\n".join([*lines, "[[gpu]]", f'bdf = "{BDF}"', 'device_id = "10de:1db6"', 'slot = "top"', ""]))

    def start(self) -> None:
        environment = {**os.environ, "NOTIFY_SOCKET": str(self.folder / "notify"), "WATCHDOG_USEC": "900000"}
        environment.pop("CREDENTIALS_DIRECTORY", None)
        with self.log.open("ab") as log:
            argv = [sys.executable, "-m", "laoka.agent", "--config", str(self.config)]
            self.child = subprocess.Popen(argv, stderr=log, env=environment)
        while "READY=1" not in self.heard():
            pass

    def heard(self) -> list[str]:
        """The next message to systemd. Errors: TimeoutError with the daemon's log."""
        try:
            return self.socket.recv(4096).decode().split("\n")
        except TimeoutError:
            raise TimeoutError(self.log.read_text()) from None

    def kill(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.wait(5)
            self.child = None

    @property
    def state(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.folder / "run/watchdog.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    @property
    def incidents(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.folder / "state/incidents").glob("*.json"))]

    def append(self, text: str) -> None:
        with (self.gpu / "kmsg").open("a") as stream:
            stream.write(text)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    found = Endpoint()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture
def host(tmp_path: Path, endpoint: Endpoint) -> Iterator[Host]:
    found = Host(tmp_path, endpoint)
    yield found
    found.kill()
    found.socket.close()


def test_a_dropped_card_from_drop_to_recovery_with_kills_between(host: Host, endpoint: Endpoint) -> None:
    host.configure(pci_interval_s="1.0")  # as it is on a real host: the time to the alert is what people get
    host.start()
    dropped_s = time.monotonic()
    card.apply_fault(host.gpu, "card-gone", BDF)
    assert until(lambda: endpoint.got), host.log.read_text()
    assert endpoint.got[0]["received_s"] - dropped_s < DETECTION_GOAL_S
    title, body = endpoint.got[0]["title"], endpoint.got[0]["message"]
    assert title == f"[simulated card] box-7: card gone from the PCI bus (Xid 79): Tesla V100 PCIe 32GB {BDF}, slot top"
    assert "Next: " in body
    (incident,) = host.incidents
    assert (incident["class"], incident["state"], incident["root"]["xid"]) == ("card_gone", "open", 79)
    assert host.folder.joinpath("state/incidents").stat().st_mode & 0o777 == 0o700

    host.kill()
    host.configure()
    for _ in range(2):  # killed in the middle of it, twice: nothing is told or opened again
        host.start()
        restarted_s = time.monotonic()
        # Long enough for an alert to be made and sent: the first one took less.
        assert until(lambda since_s=restarted_s: host.state["written_mono_s"] > since_s + 1.0)
        assert (len(host.state["incidents"]["open"]), host.state["alerts"]["waiting"]) == (1, 0)
        assert len(endpoint.got) == 1
        host.kill()
    assert len(host.incidents) == 1
    host.start()
    metrics = urllib.request.urlopen(f"http://127.0.0.1:{host.port}/metrics", timeout=5).read().decode()
    for line in (
        "laoka_gpus_expected 1.0",
        "laoka_gpus_seen 0.0",
        f'laoka_gpu_present{{bdf="{BDF}"}} 0.0',
        "laoka_incident_open 1.0",
    ):
        assert line in metrics
    done = CliRunner().invoke(
        cli, ["--lang", "en", "watchdog", "status", "--state", str(host.folder / "run/watchdog.json")], standalone_mode=False
    )
    assert done.return_value == 1
    assert "GONE" in done.stdout
    assert "! " in done.stdout

    card.clear_fault(host.gpu, "card-gone", BDF)
    assert until(lambda: len(endpoint.got) == 2), host.log.read_text()
    assert endpoint.titles[1].startswith("[simulated card] box-7: over: card gone from the PCI bus")
    assert until(lambda: host.incidents[0]["state"] == "recovered")
    assert host.child is not None
    host.child.send_signal(signal.SIGTERM)
    assert host.child.wait(5) == 0
    assert SECRET not in host.log.read_text()
    for path in host.folder.rglob("*"):
        if path.is_file() and path.name != "urls":
            assert SECRET not in path.read_text(errors="replace"), path


def test_the_channel_is_down_then_the_host_restarts(host: Host, endpoint: Endpoint) -> None:
    endpoint.broken = True
    host.start()
    card.apply_fault(host.gpu, "off-bus", BDF)
    assert until(lambda: endpoint.asked)
    assert until(lambda: host.state.get("alerts", {}).get("waiting") == 1)
    assert until(lambda: host.state["alerts"]["failing"])
    host.kill()
    endpoint.broken = False
    host.start()
    assert until(lambda: endpoint.got), host.log.read_text()
    assert "card has fallen off the bus" in endpoint.titles[0]
    card.clear_fault(host.gpu, "off-bus", BDF)
    assert until(lambda: len(endpoint.got) == 2)
    assert "over: " in endpoint.titles[1]


def test_forged_records_are_ignored_and_count_as_a_drill_when_allowed(host: Host, endpoint: Endpoint) -> None:
    forged = "11,900,5,-;NVRM: Xid (PCI:0000:03:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
    host.start()
    host.append(forged)
    host.append("3,901,6,-;NVRM: Xid (PCI:0000:03:00): 31, pid=7, name=python3, Ch 00000008\n")
    assert until(lambda: endpoint.got), host.log.read_text()
    assert "(Xid 31)" in endpoint.titles[0]
    assert [incident["root"]["xid"] for incident in host.incidents] == [31]
    host.kill()
    host.configure(drill="true")
    host.start()
    host.append(forged.replace(",900,", ",902,"))
    assert until(lambda: len(endpoint.got) == 2), host.log.read_text()
    assert endpoint.titles[1].startswith("[simulated card] [DRILL] box-7: card has fallen off the bus (Xid 79)")


def test_it_pets_systemd_and_says_what_it_sees(host: Host) -> None:
    host.start()
    pets = [words for words in (host.heard() for _ in range(4)) if "WATCHDOG=1" in words]
    assert len(pets) >= 3
    assert pets[-1][1] == "STATUS=simulated card; 1 of 1 cards seen; 0 open incident(s); observing only"


def test_wrong_settings_are_one_line_and_status_2(host: Host) -> None:
    host.configure(hots='"x"')
    done = subprocess.run(
        [sys.executable, "-m", "laoka.agent", "--config", str(host.config)], capture_output=True, text=True, timeout=20
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{host.config}: unknown key hots: did you mean host?\n"


def test_a_place_to_write_that_is_none_does_not_stop_the_alert(host: Host, endpoint: Endpoint) -> None:
    blocked = host.folder / "file"
    blocked.write_text("")
    host.configure(state_dir=f'"{blocked}/state"', state_file=f'"{blocked}/watchdog.json"', kernel_log=f'"{host.folder}/none"')
    host.start()
    card.apply_fault(host.gpu, "card-gone", BDF)
    assert until(lambda: endpoint.got), host.log.read_text()
    assert "kept in memory" in host.log.read_text()
    assert "Traceback" not in host.log.read_text()


def test_test_alert(host: Host, endpoint: Endpoint) -> None:
    words = ["--lang", "en", "watchdog", "test-alert", "--config", str(host.config)]
    done = CliRunner().invoke(cli, words, standalone_mode=False)
    assert done.return_value == 0, done.output
    assert endpoint.titles == ["[simulated card] box-7: TEST of the alert channel"]
    assert done.stdout.endswith(": delivered\n")
    with (host.folder / "urls").open("a") as stream:
        stream.write(f"json://127.0.0.1:{free_port()}/{SECRET}\nno-such-scheme://{SECRET}\n")
    done = CliRunner().invoke(cli, words, standalone_mode=False)
    assert done.return_value == 1
    assert (done.stdout.count("delivered"), done.stdout.count("FAILED")) == (1, 2)
    assert SECRET not in done.output
    (host.folder / "urls").write_text("# none yet\n")
    done = CliRunner().invoke(cli, words, standalone_mode=False)
    assert done.return_value == 1
    assert "no alert channel is configured" in done.stderr


def test_drill_command(host: Host, endpoint: Endpoint) -> None:
    words = ["--lang", "en", "watchdog", "drill", "xid79", "--config", str(host.config)]
    refused = CliRunner().invoke(cli, words)
    assert refused.exit_code == 1
    assert "drills are off" in refused.output
    host.configure(drill="true")
    host.start()
    done = CliRunner().invoke(cli, words, standalone_mode=False)
    assert done.return_value == 0, done.output
    assert endpoint.titles == [
        f"[simulated card] [DRILL] box-7: card has fallen off the bus (Xid 79): Tesla V100 PCIe 32GB {BDF}, slot top"
    ]
    assert endpoint.got[0]["message"].startswith("This is a drill")
    assert "already" in CliRunner().invoke(cli, words).output
    assert len(host.incidents) == 1
