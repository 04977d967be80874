"""The steps themselves: on a sysfs tree that acts as the kernel's does, with stand-ins for systemctl, nvidia-smi and modprobe."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from laoka.agent import act
from laoka.agent.act import Result, Task, perform
from laoka.agent.config import Config, ExpectedGpu
from laoka.sandbox import card
from tests.agent_host import Kernel

BDF, OTHER = "0000:03:00.0", "0000:02:00.0"
PORT = "0000:00:03.0"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    card.create(tmp_path / "gpu", (card.v100_pcie_32gb(OTHER, 1), card.v100_pcie_32gb(BDF, 2)))
    for name, value in (("GONE_S", 1.0), ("BACK_S", 1.0), ("LINK_SETTLE_S", 0.01), ("RESET_HOLD_S", 0.01)):
        monkeypatch.setattr(act, name, value)
    found = Kernel(tmp_path / "gpu")
    yield found
    found.stop()


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for the programs; each call is a line of the file. A file `fail-NAME` makes one fail."""
    folder, log = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    log.write_text("")
    script = (
        f'#!/bin/sh\necho "$(basename $0) $*" >> {log}\n[ ! -e {tmp_path}/fail-$(basename $0) ] || exit 1\n'
        f'case "$*" in *LoadState*) echo LoadState=loaded; cat {tmp_path}/active 2>/dev/null;; esac\n'
    )
    for name in ("systemctl", "nvidia-smi", "modprobe", "cuda-test"):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return log


def config(root: Path, **more: object) -> Config:
    gpus = tuple(ExpectedGpu(bdf=bdf, device_id="10de:1db6", uuid=f"GPU-{bdf[5:7]}") for bdf in (OTHER, BDF))
    values: dict[str, object] = {"host": "h", "gpu": gpus, "nvml": "off", "sysfs_root": str(root / "gpu/sys")}
    values |= {"state_dir": str(root / "state"), **more}
    return Config(**values)  # type: ignore[arg-type]


def test_remove_and_rescan_brings_a_card_back_with_caps_and_engine(kernel: Kernel, calls: Path, tmp_path: Path) -> None:
    card.apply_fault(tmp_path / "gpu", "off-bus", BDF)
    done = perform(Task("remove_rescan", (BDF,)), config(tmp_path, smoke_test=("cuda-test", "-x")))
    assert done.outcome == "recovered", done
    assert kernel.log == [f"remove {BDF}", "rescan"]
    lines = calls.read_text().splitlines()
    assert lines[0] == "systemctl stop qwen-serve.service"
    order = ["systemctl restart laoka-power.service", "cuda-test -x", "systemctl start qwen-serve.service"]
    assert [line for line in lines if line in order] == order
    for words in ("2 of 2 card(s) on the bus", "laoka-power.service applied", "links at full width", "the CUDA test passed"):
        assert words in done.detail


def test_what_does_not_hold_afterwards_is_no_recovery(kernel: Kernel, calls: Path, tmp_path: Path) -> None:
    card.apply_fault(tmp_path / "gpu", "off-bus", BDF)
    kernel.returns = False
    done = perform(Task("remove_rescan", (BDF,)), config(tmp_path))
    assert done == Result("failed", f"after a rescan not there or dead: {BDF}")
    kernel.returns = True
    (tmp_path / "fail-cuda-test").touch()
    done = perform(Task("remove_rescan", (BDF,)), config(tmp_path, smoke_test=("cuda-test",)))
    assert (done.outcome, "cuda-test" in done.detail) == ("failed", True)
    assert "start qwen-serve" not in calls.read_text()


def test_an_engine_that_was_not_running_is_not_started(kernel: Kernel, calls: Path, tmp_path: Path) -> None:
    assert perform(Task("module_reload", (BDF,), engine_wanted=False), config(tmp_path)).outcome == "recovered"
    assert "modprobe nvidia\n" in calls.read_text()
    assert "start qwen-serve" not in calls.read_text()


def test_a_bus_is_reset_only_for_the_card_alone(kernel: Kernel, calls: Path, tmp_path: Path) -> None:
    settings = config(tmp_path)
    assert act.port_of(settings.sysfs_root, BDF) == PORT
    port = tmp_path / "gpu/sys/bus/pci/devices" / PORT
    writes: list[bytes] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            writes.append((port / "config").read_bytes()[0x3E:0x40])
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    done = perform(Task("bus_reset", (BDF,), ((BDF, PORT),)), settings)
    stop.set()
    watcher.join()
    assert done.outcome == "recovered", done
    assert {value[0] & 0x40 for value in writes} == {0, 0x40}
    assert writes[-1][0] & 0x40 == 0
    (port.resolve() / "0000:03:01.0").mkdir()
    assert "other devices behind it (0000:03:01.0)" in perform(Task("bus_reset", (BDF,), ((BDF, PORT),)), settings).detail
    assert "is not known" in perform(Task("bus_reset", (BDF,)), settings).detail


def test_a_reset_of_a_dead_card_is_not_tried(kernel: Kernel, calls: Path, tmp_path: Path) -> None:
    assert perform(Task("gpu_reset", (BDF,)), config(tmp_path)).outcome == "recovered"
    assert f"nvidia-smi -r -i {BDF}" in calls.read_text()
    calls.write_text("")
    card.apply_fault(tmp_path / "gpu", "off-bus", BDF)
    assert perform(Task("gpu_reset", (BDF,)), config(tmp_path)) == Result("skipped", f"does not answer: {BDF}")
    assert calls.read_text() == ""


def test_a_fence_serves_on_with_the_rest_where_enough_are_left(kernel: Kernel, calls: Path, tmp_path: Path) -> None:
    done = perform(Task("fence", (BDF,)), config(tmp_path))
    assert (done.outcome, done.detail) == ("fenced", "serving on with 1 card(s): qwen-serve.service started")
    assert kernel.log == [f"remove {BDF}"]
    assert (tmp_path / "state/fence.env").read_text().splitlines()[1:] == [
        "CUDA_DEVICE_ORDER=PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES=GPU-02",
    ]
    shutil.rmtree(tmp_path / "state")
    calls.write_text("")
    done = perform(Task("fence", (BDF,)), config(tmp_path, tensor_parallel=2))
    assert (done.outcome, done.detail) == ("fenced", "1 card(s) left, the model needs 2: not served")
    assert not (tmp_path / "state/fence.env").exists() and calls.read_text() == ""


@pytest.mark.parametrize(("active", "verb"), [("active", "restart"), ("failed", "restart"), ("activating", "start")])
def test_an_engine_that_systemd_is_starting_is_waited_for(calls: Path, tmp_path: Path, active: str, verb: str) -> None:
    (tmp_path / "active").write_text(f"ActiveState={active}\n")
    assert perform(Task("restart_engine", ()), config(tmp_path)).outcome == "recovered"
    done = [line for line in calls.read_text().splitlines() if " show " not in line]
    reset = [] if active == "activating" else ["systemctl reset-failed qwen-serve.service"]
    assert done == [*reset, f"systemctl {verb} qwen-serve.service"]


def test_reboot_and_power_cut_are_the_given_commands(kernel: Kernel, calls: Path, tmp_path: Path) -> None:
    assert perform(Task("reboot", ()), config(tmp_path)).outcome == "done"
    assert perform(Task("cold_cycle", ()), config(tmp_path, power_cycle_command=("cuda-test", "off"))).outcome == "done"
    assert calls.read_text().splitlines() == ["systemctl reboot", "cuda-test off"]
    (tmp_path / "fail-systemctl").touch()
    assert perform(Task("reboot", ()), config(tmp_path)).outcome == "failed"


def test_who_holds_a_card_is_found_by_its_open_files(tmp_path: Path) -> None:
    for pid, target in ((41, "/dev/nvidia0"), (42, "/dev/null"), (43, "/dev/nvidia-uvm")):
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "fd/3").symlink_to(target)
    assert sorted(act.users(str(tmp_path))) == [41, 43]
