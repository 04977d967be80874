"""CUDA and power on a real host: accidents told and removed, one toolkit that is found, settings that survive what undoes them.

Toolkits are stand-in packages, the card is simulated; apt, systemd and the roles are real. The tests stand in the order of a story.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from laoka.sandbox import hosts
from laoka.sandbox.lab import HostFolder
from tests.hosts import INVENTORY, Deployed, pyinfra, until
from tests.ops.drivers import Pair, boot_id, lock_held, read_all, read_to, say, under_way, until_booted_since

pytestmark = pytest.mark.ops
DEPLOY = str(Path(__file__).parent / "deploy_cuda_power.py")
ACCIDENTS = {"cuda-toolkit-13-0", "nvidia-cuda-toolkit"}
POWER = {"power_limit_w": 150, "application_clocks_mhz": "[877, 1230]", "ecc": "off", "compute_mode": "exclusive"}
WANTED = {"apt_sources_only": True, "cuda_toolkit": "12-8", "psu_rating_w": 850, "host_power_w": 300, **POWER}
FIELDS = "persistence_mode,power.limit,clocks.applications.memory,clocks.applications.graphics,compute_mode"
APPLIED = "Enabled, 150.00, 877, 1230, Exclusive_Process"
CLEAR = "CUDA | No other CUDA toolkit"


@pytest.fixture
def host(driver_pair: Pair) -> HostFolder:
    return driver_pair[1]


def words(host: HostFolder, **changes: object) -> list[str]:
    data = [word for name, value in {**WANTED, **changes}.items() for word in ("--data", f"{name}={value}")]
    return ["-y", "--limit", host.name, *data, INVENTORY, DEPLOY]


def run(host: HostFolder, **changes: object) -> Deployed:
    return pyinfra(host.lab, *words(host, **changes), deadline_s=200)


def toolkits(host: HostFolder) -> set[str]:
    command = "dpkg-query -W -f '${db:Status-Status} ${Package}\\n' 'cuda*' 'nvidia-cuda*' | sed -n 's/^installed //p'"
    return set(say(host, command).split())


def settings(host: HostFolder, fields: str = FIELDS) -> str:
    return say(host, f"nvidia-smi --query-gpu={fields} --format=csv,noheader,nounits")


def cuda_home(host: HostFolder) -> tuple[str, str]:
    """Where a login shell and the units of engines find the toolkit: the one engine's and those of several, which say the same."""
    shell = say(host, "bash -lc 'echo $CUDA_HOME; command -v nvcc; true'")
    of_one = say(host, "systemctl show qwen-serve -P Environment")
    say(host, "printf '[Service]\\nExecStart=/bin/true\\n' > /run/systemd/system/qwen-serve@.service; systemctl daemon-reload")
    assert say(host, "systemctl show qwen-serve@one -P Environment") == of_one
    return shell, of_one


def test_accidents_are_told_and_the_wanted_toolkit_is_found_before_them(host: HostFolder) -> None:
    say(host, f"apt-get -q -y install {' '.join(ACCIDENTS)} >/dev/null 2>&1")
    done = run(host)
    assert done.status == 0, done.stderr[-2000:]
    assert "there is: cuda-toolkit-13-0; CUDA 13 compiles for no card before Turing" in done.stderr
    assert "there is: nvidia-cuda-toolkit; a distribution's toolkit" in done.stderr
    assert "nothing was changed; cuda_remove = True in the inventory removes them" in done.stderr
    assert CLEAR not in done.changed(host.name)
    assert toolkits(host) == {"cuda-toolkit-12-8", *ACCIDENTS}
    assert cuda_home(host) == (
        "/usr/local/cuda-12.8\n/usr/local/cuda-12.8/bin/nvcc",
        "CUDA_HOME=/usr/local/cuda-12.8",
    )
    assert "cuda-toolkit-12-8" in say(host, "apt-mark showhold").split()
    assert "the power supply suffices: cards 150 W + host 300 W <= 850 W" in done.stderr


def test_every_setting_is_on_the_card_and_ecc_waits_for_the_boot(host: HostFolder) -> None:
    assert settings(host) == APPLIED
    assert settings(host, "ecc.mode.current,ecc.mode.pending") == "Enabled, Disabled"
    assert say(host, "systemctl is-active nvidia-persistenced laoka-power").split() == ["active", "active"]


def test_with_cuda_remove_they_go_and_nothing_else_changes(host: HostFolder) -> None:
    assert run(host, cuda_remove=True).changed(host.name) == [CLEAR]
    assert toolkits(host) == {"cuda-toolkit-12-8"}
    assert run(host, cuda_remove=True).changed(host.name) == []


def test_settings_come_back_with_the_daemon_and_with_a_boot(host: HostFolder) -> None:
    say(host, "rmmod nvidia_uvm; systemctl stop qwen-serve nvidia-persistenced && rmmod nvidia && modprobe nvidia")
    assert settings(host, "power.limit,compute_mode") == "250.00, Default"  # what a module that is loaded anew leaves
    say(host, "systemctl start nvidia-persistenced")
    until(lambda: settings(host) == APPLIED, 60, "the unit ran again")
    before = boot_id(host)
    hosts.execute(host, "systemctl reboot")
    until_booted_since(host, before)
    until(lambda: settings(host, f"{FIELDS},ecc.mode.current") == f"{APPLIED}, Disabled", 60, "the unit ran at boot")


def test_a_supply_that_is_too_weak_refuses_the_host_before_anything_changed(host: HostFolder) -> None:
    done = run(host, psu_rating_w=400, power_limit_w=200)
    assert (done.status, done.stopped_at) == (1, "Power gate | Gate: the power supply")
    assert (
        f"{host.name} refused, nothing was changed: the power supply is too weak: cards 200 W + host 300 W > 400 W" in done.stderr
    )
    assert settings(host) == APPLIED


def test_cuda_13_is_refused_and_none_means_none(host: HostFolder) -> None:
    done = run(host, cuda_toolkit="13-0")
    assert done.status == 1 and "cuda_toolkit 13-0: a V100 needs CUDA 12" in done.stderr
    done = run(host, cuda_toolkit="none", cuda_remove=True)
    assert done.status == 0, done.stderr[-2000:]
    assert toolkits(host) == set()
    assert (
        say(host, "ls /etc/profile.d/laoka-cuda.sh /etc/systemd/system/qwen-serve*.service.d/laoka-cuda.conf 2>/dev/null; true")
        == ""
    )


def test_a_role_whose_package_is_missing_waits_for_apts_lock_as_long_as_the_inventory_says(host: HostFolder) -> None:
    """It fails clearly where the lock stays, and does its work once it is free."""
    assert toolkits(host) == set()
    with lock_held(host) as holder:
        done = run(host, apt_lock_wait_s=15)
        assert (done.status, done.stopped_at) == (1, "CUDA | Install cuda-toolkit-12-8")
        assert (
            f"{host.name}: apt was busy for 15 s: process " in done.stderr and "let it end, or end it, and run again" in done.stderr
        )
        assert toolkits(host) == set()
        with under_way(host, *words(host, apt_lock_wait_s=15)) as going_on:
            told = read_to(going_on, "apt is busy: process ")
            holder.terminate()
            status, rest = read_all(going_on)
    assert re.search(r"holds /var/lib/dpkg/lock-frontend; waiting, at most 1\d s more", told)
    assert status == 0, told + rest
    assert toolkits(host) == {"cuda-toolkit-12-8"}
    assert "cuda-toolkit-12-8" in say(host, "apt-mark showhold").split()
    assert run(host, apt_lock_wait_s=15).changed(host.name) == []
