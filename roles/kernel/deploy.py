"""The kernel packages that must not move: held, so that no upgrade leaves the driver without its module."""

from __future__ import annotations

from pyinfra.api.deploy import deploy
from pyinfra.context import host
from pyinfra.facts.server import KernelVersion

from laoka.operations.steps import apt_hold, apt_install
from roles.settings import RoleSettings

METAS = ("linux-generic", "linux-image-generic", "linux-headers-generic", "linux-image-amd64", "linux-headers-amd64")


class KernelSettings(RoleSettings):
    """Settings of the kernel."""

    kernel_packages: tuple[str, ...] | None = None
    """Kernel packages to install and hold; None holds those of the running kernel that are installed."""


@deploy("Kernel")
def kernel() -> None:
    """Install and hold the pinned kernel. The boot loader's default entry is not touched yet."""
    settings = KernelSettings.of(host)
    if settings.kernel_packages:
        apt_install(name=f"Install {', '.join(settings.kernel_packages)}", packages=list(settings.kernel_packages))
        wanted = settings.kernel_packages
    else:
        running = host.get_fact(KernelVersion)
        wanted = tuple(f"linux-{part}-{running}" for part in ("image", "headers", "modules", "modules-extra"))
    apt_hold(name="Hold the kernel", packages=[*wanted, *METAS], certain=list(settings.kernel_packages or ()))
