"""The NVIDIA driver: its branch pinned by version, held, and kept from everything by which apt would move it."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from pyinfra.api.deploy import deploy
from pyinfra.context import host
from pyinfra.operations import files

from laoka.operations.steps import STAMPS, apt_hold, apt_install, until_stamped
from roles.settings import RoleSettings

TEMPLATES = Path(__file__).resolve().parents[2] / "templates" / "driver"

# Package names of one branch: apt preferences take globs. Ubuntu's `-server` and plain names, and Debian's and NVIDIA's
# unversioned ones, so that the same file holds wherever the driver came from.
WANTED = (
    "nvidia-*-{branch}", "nvidia-*-{branch}-server", "libnvidia-*-{branch}", "libnvidia-*-{branch}-server",
    "linux-modules-nvidia-{branch}-*", "xserver-xorg-video-nvidia-{branch}*",
)  # fmt: skip
FORBIDDEN = (
    "cuda", "cuda-[0-9]*", "cuda-drivers*", "cuda-runtime-*", "cuda-demo-suite-*", "nvidia-open*", "nvidia-driver-open*",
    "nvidia-*-open", "nvidia-*-open-*", "linux-modules-nvidia-*-open-*",
)  # fmt: skip
# Branches after the last one that drives Volta (590 dropped it), by the names that Ubuntu and NVIDIA give them.
TOO_NEW = ("590", "595", "600", "605", "610", "615", "620")


class DriverSettings(RoleSettings):
    """Settings of the driver."""

    driver_branch: str = "580"
    """Driver branch; 580 is the last one that drives a V100."""
    driver_packages: tuple[str, ...] = ("nvidia-headless-580-server", "nvidia-utils-580-server")
    """What is installed; the names are Ubuntu's, and only its archive and laoka's sandbox have them so far."""


def wanted_globs(branch: str) -> tuple[str, ...]:
    """Globs of the packages that belong to a branch."""
    return tuple(glob.format(branch=branch) for glob in WANTED)


def forbidden_globs(branch: str) -> tuple[str, ...]:
    """Globs of the packages that must never come: metapackages, open modules, branches that dropped the card."""
    other = [glob.format(branch=number) for number in TOO_NEW if number != branch for glob in WANTED]
    renamed = ["nvidia-driver", "nvidia-dkms", "libnvidia-compute", "nvidia-kernel-dkms-open"]
    return (*FORBIDDEN, *other, *renamed)


def upgrade_blacklist(branch: str) -> str:
    """unattended-upgrades settings that keep it off the driver and the kernel (they are regular expressions)."""
    patterns = (
        "nvidia",
        "libnvidia",
        "linux-modules-nvidia",
        "cuda",
        "linux-image",
        "linux-headers",
        "linux-modules",
        "linux-generic",
    )
    lines = "".join(f'  "{pattern}";\n' for pattern in patterns)
    return (
        f"// laoka: driver branch {branch} and its kernel move only by a deploy.\n"
        f"Unattended-Upgrade::Package-Blacklist {{\n{lines}}};\n"
    )


@deploy("Driver")
def driver() -> None:
    """Pin first, then install, then hold: at no moment can apt take another branch."""
    settings = DriverSettings.of(host)
    branch = settings.driver_branch
    files.template(
        name=f"Pin branch {branch}, forbid the rest",
        src=str(TEMPLATES / "preferences.j2"),
        dest="/etc/apt/preferences.d/00laoka-driver",
        mode="644",
        branch=branch,
        wanted=wanted_globs(branch),
        forbidden=forbidden_globs(branch),
    )
    files.put(
        name="unattended-upgrades leaves driver and kernel alone",
        src=StringIO(upgrade_blacklist(branch)),
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
    apt_install(name=f"Install {', '.join(settings.driver_packages)}", packages=list(settings.driver_packages))
    apt_hold(name="Hold the driver", packages=list(wanted_globs(branch)), certain=list(settings.driver_packages))
