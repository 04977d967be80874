"""On a real NVIDIA host, within two minutes: the real sensors, and a marked drill from the real kernel log to an HTTP request.

    sudo python -m pytest --noconftest -v -m hardware tests/hardware/test_nvidia.py

Needs root (the kernel log), the NVIDIA driver and at least one card; changes nothing on a card, installs nothing. What it leaves is
one line in the kernel log that says that it is a drill. It needs none of the operator's packages: the base install and pytest do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from laoka.agent import nvml, pci
from laoka.agent.config import Config, ExpectedGpu
from laoka.host.pci_address import normal
from tests.agent_host import Endpoint, Host, until

pytestmark = pytest.mark.hardware

NVML_DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    """What the real NVML says, asked as the watchdog asks."""
    return nvml.ask_once(NVML_DEADLINE_S)


@pytest.fixture(scope="module")
def expected(answer: dict[str, Any]) -> tuple[ExpectedGpu, ...]:
    """The host's cards as an inventory would name them, ids read from sysfs."""
    found = []
    for number, one in enumerate(answer["cards"]):
        bdf = normal(one["bdf"])
        assert bdf is not None, one
        folder = Path("/sys/bus/pci/devices") / bdf
        ids = [(folder / name).read_text().strip()[2:] for name in ("vendor", "device")]
        found.append(
            ExpectedGpu(bdf=bdf, device_id=":".join(ids), uuid=one["uuid"] or "", serial=one["serial"] or "", slot=f"slot {number}")
        )
    return tuple(found)


def test_nvml_answers_every_question_that_the_card_knows(answer: dict[str, Any]) -> None:
    print(json.dumps(answer, indent=1))
    assert answer.get("error") == 0, answer
    assert answer["driver"] and answer["cards"]
    for one in answer["cards"]:
        assert one["faults"] == {} and not one["lost"], one
        assert one["uuid"].startswith("GPU-")
        assert 0 < one["core_c"] < 100
        assert one["power_w"] > 0 and one["power_limit_w"] > 0
        assert isinstance(one["throttle_reasons"], int)


def test_the_reading_of_it_is_ok(answer: dict[str, Any], expected: tuple[ExpectedGpu, ...]) -> None:
    reading = nvml.judge(Config(host="h", gpu=expected), answer)
    print(reading.detail)
    assert (reading.verdict, reading.signals) == ("ok", ())


def test_every_card_is_alive_on_the_bus(expected: tuple[ExpectedGpu, ...]) -> None:
    devices, fault = pci.read_devices("/sys", expected, {})
    assert fault == ""
    for gpu in expected:
        device = devices[gpu.bdf]
        print(device)
        assert device.driver == "nvidia" and not device.dead and device.link_width
    assert pci.judge(expected, devices).verdict == "ok"


def test_one_look_costs_little(expected: tuple[ExpectedGpu, ...]) -> None:
    """Prints what an NVML child and a look at the bus take on this host; fails only when a child needs more than its deadline."""
    prober = nvml.Prober(NVML_DEADLINE_S)
    prober.ask()
    started = os.times()
    began_s = time.monotonic()
    for _ in range(10):
        assert "hung" not in prober.ask()
    took_s = time.monotonic() - began_s
    prober.close()
    ended = os.times()
    cpu_s = ended.children_user + ended.children_system - started.children_user - started.children_system
    print(f"NVML asked: {took_s / 10:.3f} s of wall time; {cpu_s:.3f} s of CPU for eleven times and the start")
    kinds: dict[str, bool] = {}
    pci.read_devices("/sys", expected, kinds)
    began_s = time.process_time()
    for _ in range(100):
        pci.read_devices("/sys", expected, kinds)
    print(f"look at the bus: {(time.process_time() - began_s) * 10:.3f} ms of CPU")


# ---- the whole watchdog -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, expected: tuple[ExpectedGpu, ...]) -> Iterator[Host]:
    """The real daemon on this host's own sysfs, NVML and kernel log; only its alerts go to an endpoint of the test."""
    if os.geteuid() != 0:
        pytest.fail("the kernel log needs root: sudo python -m pytest -v -m hardware tests/hardware/test_nvidia.py")
    endpoint = Endpoint()
    found = Host(tmp_path_factory.mktemp("watchdog"), endpoint)
    found.gpus = tuple((gpu.bdf, gpu.device_id, gpu.slot) for gpu in expected)
    found.configure(
        simulated="false",
        sysfs_root='"/sys"',
        kernel_log='"/dev/kmsg"',
        nvml='"required"',
        nvml_interval_s="2.0",
        nvml_deadline_s=f"{NVML_DEADLINE_S}",
        drill="true",
        pci_interval_s="1.0",
    )
    found.start()
    yield found
    found.kill()
    found.socket.close()
    endpoint.server.shutdown()
    endpoint.server.server_close()


def test_its_sensors_are_all_ok(host: Host) -> None:
    def verdicts() -> dict[str, str]:
        return {sensor["name"]: sensor["verdict"] for sensor in host.state.get("sensors", ())}

    wanted = {"pci": "ok", "kernel_log": "ok", "nvml": "ok", "disk": "ok"}
    until(lambda: wanted.items() <= verdicts().items(), 2 * NVML_DEADLINE_S)
    print(json.dumps(host.state["gpus"], indent=1))
    assert wanted.items() <= verdicts().items(), host.state["sensors"]
    assert host.endpoint.got == []


def test_a_drill_goes_from_the_kernel_log_to_an_alert(host: Host) -> None:
    bdf = host.gpus[0][0]
    words = ["--lang", "en", "watchdog", "drill", "xid79", "--config", str(host.config)]
    done = subprocess.run([sys.executable, "-m", "laoka.cli", *words], capture_output=True, text=True, timeout=60)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    title = host.endpoint.titles[0]
    print(title)
    assert title.startswith("[DRILL] box-7: ") and bdf in title and "(Xid 79)" in title
    (incident,) = host.incidents
    assert incident["drill"] and incident["root"]["xid"] == 79
    assert incident["cards"][0] == bdf


def test_the_card_is_as_it_was(host: Host, answer: dict[str, Any]) -> None:
    again = nvml.ask_once(NVML_DEADLINE_S)
    for before, after in zip(answer["cards"], again["cards"], strict=True):
        for key in ("uuid", "power_limit_w", "lost", "pages_pending"):
            assert before[key] == after[key], key
    assert "Traceback" not in host.log.read_text()
