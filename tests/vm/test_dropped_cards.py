"""The watchdog on a real kernel: cards that fall off the bus, records of the kernel's own in /dev/kmsg, the ladder's real writes.

The guest runs the watchdog as a host does: its unit with all its restrictions, recovery policy full. Its kernel, systemd, sysfs and
kernel log are real; the cards are laoka/sandbox/fakepci, so there is no NVIDIA driver and NVML is off but for one test. Alerts go
to an endpoint of the test, by way of the ssh connection.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest

from laoka.operations import wheel
from laoka.process import run
from laoka.sandbox import vm
from laoka.sandbox.lab import open_lab
from tests.agent_host import Endpoint
from tests.hosts import ROOT, until

pytestmark = pytest.mark.vm
FIRST, SECOND = "0000:81:00.0", "0000:82:00.0"
PORT = 18080
HOME = "/opt/laoka/agent"
PYTHON_VERSION = "3.11"  # Debian 12's
LOADER = """[Unit]
Description=Simulated cards are there from the start, as on a board
DefaultDependencies=no
Before=sysinit.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/sbin/insmod /root/fakepci.ko cards=2
[Install]
WantedBy=sysinit.target
"""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    found = Endpoint()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[vm.Vm]:
    """A guest with two cards and a watchdog that runs; the snapshot `watched` is that moment."""
    image = vm.image(open_lab("tests").state, print)
    packed = site(tmp_path_factory.mktemp("site"))
    with vm.running(image, "drops") as started:
        vm.load_fakepci(started, cards=2)
        vm.copy_in(started, packed, "/root/site.tar")
        unpack = f"tar -xf /root/site.tar -C {HOME}/lib/python{PYTHON_VERSION}/site-packages"
        vm.execute(started, f"mkdir -p /etc/laoka && python3 -m venv --without-pip {HOME} && {unpack}", check=True)
        put(started, "/etc/systemd/system/fakepci.service", LOADER)
        put(started, "/etc/systemd/system/qwen-watchdog.service", unit())
        put(started, "/etc/laoka/alert-urls", f"json://127.0.0.1:{PORT}/x\n")
        configure(started)
        vm.execute(started, "systemctl -q enable fakepci qwen-watchdog", check=True)
        vm.execute(started, "systemctl restart qwen-watchdog || { journalctl -u qwen-watchdog -o cat; exit 1; }", check=True)
        until(lambda: state(started)["gpus"]["seen"] == 2, 60, "the watchdog sees both cards")
        # Without the way to the endpoint: a restored sshd would go on holding its port.
        vm.save(started, "watched")
        yield started


@pytest.fixture
def watched(guest: vm.Vm, endpoint: Endpoint) -> vm.Vm:
    """Two cards that are well, a watchdog, nothing told yet."""
    vm.restore(guest, "watched")
    forward(guest, endpoint)
    endpoint.got.clear()
    return guest


def site(folder: Path) -> Path:
    """laoka and what it needs on a GPU host, for the guest's Python, as one archive."""
    argv = [sys.executable, "-m", "pip", "install", "-q", "--no-warn-conflicts", "--target", str(folder / "site")]
    argv += ["--python-version", PYTHON_VERSION, "--only-binary", ":all:", "-c", str(ROOT / "constraints.txt")]
    run([*argv, str(wheel.build())], deadline_s=300, check=True)
    with tarfile.open(folder / "site.tar", "w") as tar:
        tar.add(folder / "site", ".")
    return folder / "site.tar"


def unit() -> str:
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    source = (ROOT / "templates/watchdog/qwen-watchdog.service.j2").read_text()
    text = environment.from_string(source).render(
        python=f"{HOME}/bin/python", config_path="/etc/laoka/watchdog.toml", alert_urls_path="/etc/laoka/alert-urls", full=True
    )
    # In software everything takes ten times as long.
    return text.replace("WatchdogSec=30s", "WatchdogSec=120s")


def configure(guest: vm.Vm, **changes: str) -> None:
    values = {
        "host": '"vm-1"', "simulated": "true", "nvml": '"off"', "unit": '""', "power_unit": '""', "recovery": '"full"',
        "reboot": "true", "act_after_s": "12.0", "recovered_after_s": "3.0", "burst_quiet_s": "20.0",
    } | changes  # fmt: skip
    lines = [f"{key} = {value}" for key, value in values.items()]
    for bdf in (FIRST, SECOND):
        lines += ["[[gpu]]", f'bdf = "{bdf}"', 'device_id = "10de:1db6"', f'slot = "slot {bdf[5:7]}"']
    put(guest, "/etc/laoka/watchdog.toml", "\n".join([*lines, ""]))


def put(guest: vm.Vm, path: str, text: str) -> None:
    vm.execute(guest, f"cat >{path}", stdin=text, check=True)


def forward(guest: vm.Vm, endpoint: Endpoint) -> None:
    """Have the guest's loopback port lead to the endpoint."""
    where = f"127.0.0.1:{PORT}:127.0.0.1:{endpoint.server.server_port}"
    argv = ["ssh", "-S", str(guest.control), "-O", "forward", "-R", where, "-p", str(guest.port), "root@127.0.0.1"]
    subprocess.run(argv, check=True, timeout=60, capture_output=True)


def state(guest: vm.Vm) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(vm.execute(guest, "cat /run/laoka/watchdog.json", check=True).stdout)
    return found


def incidents(guest: vm.Vm) -> list[dict[str, Any]]:
    done = vm.execute(guest, "cd /var/lib/laoka/watchdog/incidents && for f in *.json; do cat $f; echo ---; done")
    return [json.loads(part) for part in done.stdout.split("---\n") if part.strip().startswith("{")]


def steps(guest: vm.Vm) -> list[tuple[str, str]]:
    """What the ladder tried, and how it ended."""
    code = (
        "import json, sqlite3; base = sqlite3.connect('/var/lib/laoka/watchdog/recovery.sqlite'); "
        "print(json.dumps(base.execute('SELECT step, outcome FROM attempts ORDER BY number').fetchall()))"
    )
    return [(step, outcome) for step, outcome in json.loads(vm.execute(guest, f'python3 -c "{code}"', check=True).stdout)]


def xid79(bdf: str) -> str:
    return f"NVRM: Xid (PCI:{bdf[:-2]}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def test_a_card_that_comes_back_by_itself_is_told_twice_and_nothing_is_done(watched: vm.Vm, endpoint: Endpoint) -> None:
    vm.log_kernel(watched, xid79(FIRST))
    vm.set_fakepci(watched, lost=1)
    until(lambda: endpoint.titles and "config_dead" in json.dumps(incidents(watched)), 60, "an alert, and a dead card")
    vm.set_fakepci(watched, lost=0)
    until(lambda: len(endpoint.titles) >= 2, 60, "the recovery is told")
    first, second = endpoint.titles
    assert first == f"[simulated card] vm-1: card has fallen off the bus (Xid 79): Tesla V100 PCIe 32GB {FIRST}, slot slot 81"
    assert second.startswith("[simulated card] vm-1: over: card has fallen off the bus (Xid 79)")
    assert "The watchdog did not repair anything" in endpoint.got[1]["message"]
    (incident,) = incidents(watched)
    assert (incident["class"], incident["state"], incident["cards"]) == ("off_bus", "recovered", [FIRST])
    # A record of the kernel's own, read from the real /dev/kmsg: no drill, with its boot and number.
    (xid,) = (signal for signal in incident["signals"] if signal["kind"] == "xid")
    assert not xid["drill"] and xid["origin"].partition(":")[0]
    assert steps(watched) == []


def test_two_cards_at_once_are_one_incident_and_come_back_by_a_bus_reset(watched: vm.Vm, endpoint: Endpoint) -> None:
    """Both cards are dead until the port above each is reset: the kernel's own remove and rescan find nothing."""
    vm.set_fakepci(watched, heals=3)
    vm.log_kernel(watched, xid79(FIRST))
    vm.log_kernel(watched, xid79(SECOND))
    vm.set_fakepci(watched, lost=3)
    until(lambda: any(": over: " in title for title in endpoint.titles), 300, "the recovery is told")
    (incident,) = incidents(watched)
    # What the watchdog itself took off the bus is no card that is gone.
    assert (incident["class"], incident["state"], set(incident["cards"])) == ("off_bus", "recovered", {FIRST, SECOND})
    assert "and 1 more" in endpoint.titles[0] or any("also: " in title and SECOND in title for title in endpoint.titles)
    assert steps(watched) == [("remove_rescan", "failed"), ("bus_reset", "recovered")]
    assert state(watched)["gpus"]["seen"] == 2
    assert vm.execute(watched, f"setpci -s {FIRST} 0.l; setpci -s {SECOND} 0.l").stdout.split() == ["1db610de"] * 2
    kept = vm.execute(watched, f"tar -tzf /var/lib/laoka/watchdog/evidence/{incident['id']}.tar.gz", check=True).stdout
    assert f"pci/{FIRST}.txt" in kept and "kernel-log.txt" in kept


def test_a_forged_record_and_a_flood_hide_nothing(watched: vm.Vm, endpoint: Endpoint) -> None:
    flood = f"""import os
log = os.open("/dev/kmsg", os.O_WRONLY)
os.write(log, b"<3>{xid79(FIRST)}")
for number in range(6000):
    os.write(log, b"<3>pcieport 0000:80:01.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)")
"""
    vm.execute(watched, "echo on >/proc/sys/kernel/printk_devkmsg; dmesg -n 1", check=True)
    vm.execute(watched, "python3 -", stdin=flood, check=True)
    vm.log_kernel(watched, xid79(SECOND))
    until(lambda: any("Xid 79" in title for title in endpoint.titles), 60, "the real record is told")
    assert [title for title in endpoint.titles if FIRST in title] == []
    found = state(watched)
    (kernel_log,) = (sensor for sensor in found["sensors"] if sensor["name"] == "kernel_log")
    assert kernel_log["verdict"] == "ok" and kernel_log["facts"]["records"] > 1000
    assert SECOND in json.dumps(found["incidents"]["open"])


@pytest.mark.long
def test_a_loop_of_reboots_ends_after_the_first(watched: vm.Vm, endpoint: Endpoint) -> None:
    """A fault that no reboot cures (there is no driver): the count survives the boot, and a person is called instead."""
    configure(watched, nvml='"required"', nvml_deadline_s="60.0", act_after_s="2.0")
    before = vm.execute(watched, "cat /proc/sys/kernel/random/boot_id; systemctl restart --no-block qwen-watchdog").stdout.split()[
        0
    ]
    until(lambda: any("reboot" in title for title in endpoint.titles), 120, "the reboot is told before it happens")
    vm.wait_for_boot(watched, before)
    forward(watched, endpoint)
    until(lambda: any("a person is needed" in title for title in endpoint.titles), 240, "a person is called")
    (reload, reboot) = steps(watched)
    assert reload == ("module_reload", "failed")
    # "booted" where the host went down before the step could say that the reboot is under way.
    assert reboot in (("reboot", "done"), ("reboot", "booted"))
    told = state(watched)["incidents"]["open"][0]
    assert told["class"] == "driver_missing" and told["mode"] == "gave_up"
