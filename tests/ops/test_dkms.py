"""Debian's own NVIDIA driver for real: real packages, a real DKMS build by the role, and the module it made in a real kernel.

On the host the kernel that "runs" and the card are simulated, all else is real: Debian's archive, apt, the compiler, DKMS. The
module is then loaded in a virtual machine that runs the kernel it was built for. There is no card in either.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from laoka.sandbox import hosts, packages, vm
from laoka.sandbox.lab import HostFolder, open_lab
from tests.conftest import new_lab
from tests.hosts import INVENTORY, ROOT, Deployed, environment, pyinfra
from tests.ops.drivers import CHANGE, loaded, say

pytestmark = pytest.mark.dkms
DEPLOY = str(Path(__file__).parent / "deploy_driver.py")
BRANCH = "535"  # Debian 12's; an ended branch, which is good for a test and for nothing else
MODULES = "updates/dkms"
BUILD_DEADLINE_S = 1500


@pytest.fixture(scope="module")
def image() -> vm.Image:
    return vm.image(open_lab("dkms").state, print)


@pytest.fixture(scope="module")
def kernel(image: vm.Image) -> str:
    """The release of the kernel that the virtual machine boots, Debian's newest for this suite."""
    found = [path.name for path in (image.layer / "usr/lib/modules").iterdir() if path.name != vm.OLDER_KERNEL]
    assert len(found) == 1, found
    return found[0]


@pytest.fixture(scope="module")
def host(kernel: str) -> Iterator[HostFolder]:
    for lab in new_lab("dkms"):
        one = hosts.up(lab, 1, print)[0]
        (one.card / "kernel").write_text(f"{kernel}\n")
        yield one


def words(host: HostFolder, kernel: str) -> list[str]:
    """The inventory's keys: Debian's archive with its non-free part, and none of the stand-ins."""
    own = [line.split() for line in say(host, "grep ^deb /etc/apt/sources.list").splitlines()]
    sources = {f"non-free-{suite}": f"deb {uri} {suite} contrib non-free non-free-firmware" for _, uri, suite, *_ in own}
    data = {"apt_sources": json.dumps(sources), "driver": f'"{BRANCH}"', "driver_source": "debian-12", "kernel": kernel}
    return [word for name, value in data.items() for word in ("--data", f"{name}={value}")]


def deploy(host: HostFolder, kernel: str, *arguments: str) -> Deployed:
    return pyinfra(host.lab, *arguments, *words(host, kernel), INVENTORY, DEPLOY, deadline_s=BUILD_DEADLINE_S)


@pytest.fixture(scope="module")
def version(host: HostFolder, kernel: str) -> str:
    """The version that the role installed and built; the run was killed once that was proven, before the module is loaded."""
    where = f"{CHANGE}#4"  # begin, drain and install are done
    argv = [sys.executable, "-m", "tests.killed", where, "-y", *words(host, kernel), INVENTORY, DEPLOY]
    done = subprocess.run(
        argv, cwd=ROOT, env=environment(host.lab), capture_output=True, text=True, timeout=BUILD_DEADLINE_S, check=False
    )
    log = say(
        host, "tail -n 5 /var/lib/laoka/driver/change/install.log; tail -n 5 /var/lib/dkms/nvidia-current/*/build/make.log; true"
    )
    assert done.returncode == -9, f"{done.stderr[-1500:]}\n{log}"
    found = say(host, "dpkg-query -W -f '${Version}' nvidia-kernel-dkms 2>&1; true").partition("-")[0]
    assert found.startswith(f"{BRANCH}."), f"{found}\n{done.stderr[-1500:]}\n{log}"
    return found


def test_dkms_built_the_module_for_the_kernel_of_the_next_boot(host: HostFolder, kernel: str, version: str) -> None:
    assert say(host, "dkms status") == f"nvidia-current/{version}, {kernel}, x86_64: installed"
    assert say(host, f"modinfo -k {kernel} -F version nvidia-current") == version
    assert say(host, f"modinfo -k {kernel} -F vermagic nvidia-current").split()[0] == kernel
    assert not say(host, "dpkg --audit")


def test_the_kernel_takes_the_module(host: HostFolder, kernel: str, version: str, image: vm.Image) -> None:
    """Without a card it says so and leaves: by then its symbols were resolved and its own code ran."""
    with vm.running(image, "dkms") as guest:
        assert vm.execute(guest, "uname -r", check=True).stdout.strip() == kernel
        folder = f"/lib/modules/{kernel}/{MODULES}"
        vm.execute(guest, f"mkdir -p {folder}", check=True)
        vm.copy_in(guest, host.root / f"lib/modules/{kernel}/{MODULES}/nvidia-current.ko", folder)
        vm.execute(guest, "depmod", check=True)
        assert vm.execute(guest, f"modinfo -k {kernel} -F version nvidia-current").stdout.strip() == version
        done = vm.execute(guest, "modprobe nvidia-current", deadline_s=120)
        assert not done.ok and "No such device" in done.stderr
        log = vm.execute(guest, "dmesg", check=True).stdout
        assert "NVRM: No NVIDIA GPU found." in log and "module license 'NVIDIA' taints kernel" in log
        assert "disagrees about version of symbol" not in log and "Unknown symbol" not in log


def test_the_next_run_ends_the_change_and_the_pins_hold_over_debians_archive(
    host: HostFolder, kernel: str, version: str, tmp_path: Path
) -> None:
    """From here on the real library of a driver without a card is covered by the simulated one, of the same version."""
    library = tmp_path / "libnvidia-ml.so"
    packages.compile_nvml(library, version)
    place = f"/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.{version}"
    (host.root / place.lstrip("/")).write_bytes(library.read_bytes())
    smi = host.root / "usr/local/bin/nvidia-smi"
    smi.write_text(packages.smi_text())
    smi.chmod(0o755)
    done = deploy(host, kernel, "-y")
    assert done.status == 0, done.stderr[-2500:]
    assert "why: an earlier run began a change and did not end it" in done.stderr
    assert "the pins hold: " in done.stderr
    assert loaded(host) == version
    held = set(say(host, "apt-mark showhold").split())
    # The real kernel's own initial RAM disk.
    assert "etc/modprobe.d/laoka-nouveau.conf" in say(host, f"lsinitramfs /boot/initrd.img-{kernel}").splitlines()
    assert {"nvidia-kernel-dkms", "nvidia-smi", "libcuda1", f"linux-image-{kernel}", f"linux-headers-{kernel}"} <= held
    assert deploy(host, kernel, "-y").changed(host.name) == []
