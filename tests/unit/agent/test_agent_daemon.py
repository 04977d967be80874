"""The real daemon as a process: a sysfs tree, a kernel log file, a systemd socket and an alert endpoint that are all ours."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from laoka.agent import drill, incidents
from laoka.agent.clock import Now
from laoka.agent.config import load_config
from laoka.agent.daemon import Daemon
from laoka.agent.signals import Reading, Signal
from laoka.cli.main import cli
from laoka.sandbox import card
from tests.agent_host import BDF, SECRET, Endpoint, Host, free_port, until


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
    # The bus is looked at when the kernel log says something, not before: which comes first would else be chance, and the title
    # names the Xid only when it is known by then.
    host.configure(pci_interval_s="60.0")
    host.start()
    card.apply_fault(host.gpu, "card-gone", BDF)
    assert until(lambda: endpoint.got), host.log.read_text()
    title, body = endpoint.got[0]["title"], endpoint.got[0]["message"]
    assert title == f"[simulated card] box-7: card gone from the PCI bus (Xid 79): Tesla V100 PCIe 32GB {BDF}, slot top"
    assert "Next: " in body
    (incident,) = host.incidents
    assert (incident["class"], incident["state"], incident["root"]["xid"]) == ("card_gone", "open", 79)
    assert host.folder.joinpath("state/incidents").stat().st_mode & 0o777 == 0o700

    # Killed between the channel's yes and the note of it, it would have to ask again: that is another test's.
    assert until(lambda: host.state["alerts"]["delivered"] == 1)
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
        'laoka_incidents_open{class="card_gone"} 1.0',
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
    assert until(lambda: host.state["alerts"]["delivered"] == 1)  # noted too: else it is told once more, as perhaps sent
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
    assert pets[-1][1] == "STATUS=simulated card; 1 of 1 cards seen; 0 open incident(s); recovery engine-only"


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
    noted = json.loads((host.folder / "state" / "alert-test.json").read_text())
    assert (noted["delivered"], noted["failed"]) == (1, 2) and noted["unix_s"] > 1.7e9
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


@pytest.mark.parametrize(
    ("fault", "title"),
    [
        ("hung", "NVML hangs: the host"),
        ("heat", f"card too hot: Tesla V100 PCIe 32GB {BDF}, slot top"),
        ("engine", "the model server is down: the host"),
    ],
)
def test_drills_of_what_the_kernel_log_does_not_tell(host: Host, endpoint: Endpoint, fault: str, title: str) -> None:
    host.configure(drill="true")
    host.start()
    words = ["--lang", "en", "watchdog", "drill", fault, "--config", str(host.config)]
    done = CliRunner().invoke(cli, words, standalone_mode=False)
    assert done.return_value == 0, done.output
    assert endpoint.titles == [f"[simulated card] [DRILL] box-7: {title}"]
    assert endpoint.got[0]["message"].startswith("This is a drill")
    (incident,) = host.incidents
    assert incident["drill"]


def test_such_records_count_for_nothing_where_drills_are_off(host: Host, endpoint: Endpoint) -> None:
    host.start()
    for fault in drill.FAULTS:
        drill.write_record(str(host.gpu / "kmsg"), drill.record_text(fault, load_config(host.config)))
    seen = until(
        lambda: next(item for item in host.state["sensors"] if item["name"] == "kernel_log")["facts"].get("records", 0) >= 4
    )
    assert seen, host.state
    assert (host.incidents, endpoint.got) == ([], [])


def test_an_alert_that_falls_due_while_silence_is_looked_for_does_not_wait(host: Host) -> None:
    """It once waited for the sender's own half minute: the call that queued it did not wake the sender."""
    daemon = Daemon(load_config(host.config))
    gone = Signal("card_gone", "pci", BDF, seen="gone")
    daemon.tracker = incidents.feed(daemon.tracker, Reading("pci", "bad", (gone,)), Now(time.time(), time.monotonic() - 60)).tracker
    assert not daemon.wake_sender.is_set()
    daemon._silent_sensors()
    assert daemon.outbox.waiting == 1
    assert daemon.wake_sender.is_set()
