"""nouveau is kept from the card by the initial RAM disk, where modules come first: the rebuild by the role, and a new kernel's own.

initramfs-tools are Debian's real ones; the kernels are stand-ins without a module of their own, as are the driver's packages.
"""

from __future__ import annotations

import pytest

from laoka.sandbox.lab import HostFolder
from tests.ops.drivers import KERNEL, NEXT, OLD, Pair, deploy, install_from_debian, make_bare, say

pytestmark = pytest.mark.long
STEP = "Driver | The initial RAM disk knows the blacklist"


def blacklisted(host: HostFolder, kernel: str) -> list[str]:
    """What the initial RAM disk of a kernel says of nouveau."""
    unpacked = f"rm -rf /srv/unpacked && unmkinitramfs /boot/initrd.img-{kernel} /srv/unpacked && cd /srv/unpacked && ls init"
    assert say(host, unpacked) == "init"
    return say(host, "grep -rhw nouveau /srv/unpacked/etc/modprobe.d /srv/unpacked/lib/modprobe.d 2>/dev/null; true").splitlines()


def test_the_role_rebuilds_the_one_of_the_pinned_kernel_and_a_new_kernel_comes_with_it(old_pair: Pair) -> None:
    host = old_pair[0]
    make_bare(host)
    install_from_debian(host, "initramfs-tools", "zstd")
    say(host, f"update-initramfs -c -k {KERNEL} 2>&1")
    assert blacklisted(host, KERNEL) == []
    made = f"stat -c %Y.%i /boot/initrd.img-{KERNEL}"
    before = say(host, made)
    done = deploy(host, "-y", data={"driver": OLD})
    assert done.status == 0 and STEP in done.changed(host.name), done.stderr[-2500:]
    assert say(host, made) != before
    own = ["# laoka: nouveau would take the card before the NVIDIA module", "blacklist nouveau", "options nouveau modeset=0"]
    assert blacklisted(host, KERNEL) == own
    after = say(host, made)
    assert deploy(host, "-y", data={"driver": OLD}).changed(host.name) == []
    assert say(host, made) == after
    say(host, f"apt-get -qq -y --allow-change-held-packages purge linux-image-{NEXT} linux-modules-{NEXT} >/dev/null 2>&1; true")
    done = deploy(host, "-y", data={"driver": OLD, "kernel": NEXT})
    assert (done.status, say(host, "uname -r")) == (0, NEXT), done.stderr[-2500:]
    assert blacklisted(host, NEXT) == own
    assert f"initrd.img-{NEXT}" in say(host, "cat /boot/grub/grub.cfg")
