"""What qwen-serve's unit keeps from its host, on a real kernel: memory above its limit, and devices that are not its own.

The unit is the one that laoka renders, with laoka's supervisor in it; the engine is tests/unit/serving/fake_engine.py with a worker
beside it that takes memory when it is told to. The sandbox's other hosts enforce neither: they have no such control groups.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from laoka.sandbox import vm
from laoka.sandbox.lab import open_lab
from roles.serve.deploy import ServeSettings, unit_values
from roles.serve.unit import NVIDIA_GROUPS
from tests.hosts import ROOT, until
from tests.unit.roles.test_serve_unit import one, template
from tests.vm.test_dropped_cards import HOME, PYTHON_VERSION, put, site

pytestmark = [pytest.mark.vm, pytest.mark.long]
ENGINE, STATE = "/opt/laoka/engines/current/bin/vllm", "/var/lib/qwen-serve"
GROUP = "/sys/fs/cgroup/system.slice/qwen-serve.service"
OTHER_GROUP = "char-misc"
"""Stands for the NVIDIA driver's groups, which only a host with the driver has."""
VLLM = f"""#!/bin/sh
{HOME}/bin/python {STATE}/worker.py &
exec {HOME}/bin/python {STATE}/fake_engine.py 8000 {STATE}/control
"""
WORKER = f"""
import os, time
while not os.path.exists("{STATE}/eat"):
    time.sleep(0.2)
os.unlink("{STATE}/eat")
held = [b"x" * (16 << 20) for _ in range(64)]
"""


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[vm.Vm]:
    """A guest whose qwen-serve is ready."""
    image = vm.image(open_lab("tests").state, print)
    packed = site(tmp_path_factory.mktemp("site"))
    with vm.running(image, "limits") as started:
        vm.copy_in(started, packed, "/root/site.tar")
        unpack = f"tar -xf /root/site.tar -C {HOME}/lib/python{PYTHON_VERSION}/site-packages"
        vm.execute(started, f"python3 -m venv --without-pip {HOME} && {unpack}", check=True)
        made = f"useradd --system --no-create-home qwen && install -d -o qwen -g qwen {STATE} && "
        made += f"mkdir -p {ENGINE.rpartition('/')[0]} /etc/qwen-serve && touch /etc/qwen-serve/env && echo ok >{STATE}/control"
        vm.execute(started, made, check=True)
        put(started, f"{STATE}/fake_engine.py", (ROOT / "tests/unit/serving/fake_engine.py").read_text())
        put(started, f"{STATE}/worker.py", WORKER)
        put(started, ENGINE, VLLM)
        vm.execute(started, f"chmod +x {ENGINE}", check=True)
        serve(started, "160M")
        yield started


def serve(guest: vm.Vm, memory_max: str) -> None:
    settings, served = one(serve_memory_max=memory_max)
    put(guest, "/etc/systemd/system/qwen-serve.service", rendered(settings, served))
    done = vm.execute(guest, "systemctl daemon-reload && systemctl restart qwen-serve", deadline_s=300)
    assert done.ok, vm.execute(guest, "journalctl -u qwen-serve -o cat -n 50 --no-pager").stdout
    assert record(guest)["state"] == "ready"


def rendered(settings: ServeSettings, served: Any) -> str:
    values = unit_values(settings, served, 252, gpus=False)  # Debian 12's
    values |= {"python": f"{HOME}/bin/python", "device_groups": (*NVIDIA_GROUPS, OTHER_GROUP)}
    return template("qwen-serve.service.j2").render(**values)


def record(guest: vm.Vm) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(vm.execute(guest, "cat /run/qwen-serve/state.json", check=True).stdout)
    return found


def processes(guest: vm.Vm) -> set[str]:
    return set(vm.execute(guest, f"cat {GROUP}/cgroup.procs").stdout.split())


@pytest.mark.parametrize("limit", ["160M", "90%"])
def test_an_engine_that_takes_too_much_memory_is_ended_whole_and_comes_back_and_the_host_lives_on(guest: vm.Vm, limit: str) -> None:
    """The unit's limit is reached, or (90 % of a host whose own needs are more than the rest) the host's memory is used up."""
    serve(guest, limit)
    vm.execute(guest, "systemd-run --unit bystander sleep infinity 2>/dev/null; systemctl start bystander", check=False)
    others = "cat /proc/sys/kernel/random/boot_id; systemctl show -P MainPID ssh bystander; pgrep -x systemd-journal"
    before, alive = processes(guest), vm.execute(guest, others).stdout
    assert len(before) == 3 and record(guest)["pid"] in map(int, before), "supervisor, engine, worker"
    vm.execute(guest, f"touch {STATE}/eat", check=True)
    until(lambda: not before & processes(guest), 120, "all three are gone, although it was the worker that took the memory")
    told = vm.execute(guest, "journalctl -k -o cat --no-pager | grep -c 'oom-kill:.*task_memcg=/system.slice/qwen-serve.service'")
    assert int(told.stdout) >= 1
    until(lambda: record(guest)["state"] != "ready", 60, "its end is noted")
    ended = record(guest)
    assert (ended["state"], ended["kind"]) == ("failed", "out_of_memory") and "serve_memory_max" in ended["detail"]
    until(lambda: record(guest)["state"] == "ready", 180, "it is started again, and answers")
    assert vm.execute(guest, others).stdout == alive, "the host and what else runs on it are as they were"


def test_the_unit_opens_its_own_devices_and_no_others(guest: vm.Vm) -> None:
    """Asked as root: what is refused is refused by the control group, not by the file's mode."""

    def opened(device: str, *, within: bool) -> bool:
        enter = f"echo $$ >{GROUP}/cgroup.procs && " if within else ""
        done = vm.execute(guest, f"sh -c '{enter}exec 3<{device} && echo opened'")
        assert done.stdout.strip() == "opened" or "Operation not permitted" in done.stderr, done.stderr
        return done.ok

    nodes = ("/dev/null", "/dev/cpu_dma_latency", "/dev/kmsg", "/dev/vda")
    assert [opened(node, within=False) for node in nodes] == [True] * 4
    assert [opened(node, within=True) for node in nodes] == [True, True, False, False]
