"""The NVIDIA driver: pinned by version, held, kept from everything by which apt would move it, and changed with proof."""

from __future__ import annotations

from io import StringIO

from pyinfra.api.deploy import deploy
from pyinfra.context import host
from pyinfra.operations import files

from laoka.catalog.messages import language
from laoka.operations.driver import Wish, driver_change, driver_gate, driver_stage, prove_pins
from laoka.operations.steps import STAMPS, refuse, until_stamped
from laoka.stack.driver_target import DriverTarget, driver_pins, kernel_pins, preferences, upgrade_blacklist
from roles.base.deploy import BaseSettings
from roles.driver.settings import DriverSettings
from roles.driver.target import wanted
from roles.serve.deploy import ServeSettings

# What somebody may type some day; after it driver and kernel must stand where they stood.
TYPED = {
    "upgrade": ("upgrade",), "dist-upgrade": ("dist-upgrade",),
    **{f"install {name}": ("install", name) for name in ("cuda", "nvidia-driver-595", "linux-generic")},
}  # fmt: skip
# Tried too, where apt has a candidate at all.
TYPED_TOO = (
    "cuda-drivers", "cuda-drivers-580", "nvidia-headless-595-server", "nvidia-driver", "nvidia-open", "nvidia-dkms",
    "libnvidia-compute", "linux-image-generic", "linux-image-amd64", "linux-headers-generic",
)  # fmt: skip
SERIAL_DEADLINE_S = 4 * 3600


def pins_text(target: DriverTarget) -> str:
    """All pins of driver and kernel, as one file of preferences."""
    return preferences((*driver_pins(target), *kernel_pins()))


def wish_of(target: DriverTarget) -> Wish:
    """How the driver of this host is to be changed, by its inventory."""
    own, base = DriverSettings.of(host), BaseSettings.of(host)
    lang = language(base.lang)
    return Wish(
        target=target, expected_gpus=len(base.expected_gpus), preferences=pins_text(target), reboot=own.reboot,
        reboot_deadline_s=own.reboot_deadline_s, drain_deadline_s=own.drain_deadline_s, lock_wait_s=base.apt_lock_wait_s,
        metrics_url=f"http://127.0.0.1:{ServeSettings.of(host).serve_port}/metrics", lang=lang,
    )  # fmt: skip


@deploy("Driver")
def driver() -> None:
    """Pin first, then change with proof, one host at a time, then try what would undo it."""
    target = wanted(host)
    if target is None:
        host.noop("no driver: this host has no card")
        return
    if isinstance(target, str):
        refuse(name="Gate: a driver that can be had here", lines=[f"{host.name} refused, nothing was changed: {target}"])
        return
    wish = wish_of(target)
    branch = target.branch
    driver_gate(name=f"Plan and gate: driver {target.version or branch} for kernel {target.kernel}", wish=wish)
    what = f"the NVIDIA driver stays on {target.version_glob}; what would move or replace it is forbidden"
    files.put(
        name=f"Pin branch {branch}, forbid the rest",
        src=StringIO(preferences(driver_pins(target), what)),
        dest="/etc/apt/preferences.d/00laoka-driver",
        mode="644",
    )
    files.put(
        name="unattended-upgrades leaves driver and kernel alone",
        src=StringIO(upgrade_blacklist(target)),
        dest="/etc/apt/apt.conf.d/52laoka-blacklist",
    )
    blacklist = "# laoka: nouveau would take the card before the NVIDIA module\nblacklist nouveau\noptions nouveau modeset=0\n"
    files.put(name="nouveau is blacklisted", src=StringIO(blacklist), dest="/etc/modprobe.d/laoka-nouveau.conf")
    until_stamped(
        name="The initial RAM disk knows the blacklist",
        stamp=f"{STAMPS}/nouveau-initramfs",
        text="blacklisted 1",
        commands=["if command -v update-initramfs >/dev/null; then update-initramfs -u -k all; fi"],
    )
    driver_stage(name="Fetch the driver's packages, and those of the way back", wish=wish, _timeout=SERIAL_DEADLINE_S)
    driver_change(name="Change the driver, one host at a time", wish=wish, _serial=True, _timeout=SERIAL_DEADLINE_S)
    prove_pins(name="Nothing that somebody may type moves driver or kernel", wish=wish, typed=TYPED, also=TYPED_TOO)
