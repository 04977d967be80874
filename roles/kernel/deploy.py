"""The kernel: the pinned one installed beside the one that runs, held, and the boot loader's default on a proven one."""

from __future__ import annotations

from io import StringIO

from pyinfra.api.deploy import deploy
from pyinfra.context import host
from pyinfra.operations import files

from laoka.operations.driver import basics, keep_boot
from laoka.operations.steps import apt_hold, apt_install
from laoka.stack.driver_target import kernel_names, kernel_pins, optional_names, preferences
from roles.driver.deploy import kernel_row, wish_of
from roles.driver.target import wanted


@deploy("Kernel")
def kernel() -> None:
    """Keep the boot where it is, install and hold the pinned kernel; the boot moves when its module is proven (role driver)."""
    target = wanted(host)
    if target is None or isinstance(target, str):
        return  # no card; or the driver's gate tells why not
    row = kernel_row(target)
    names = kernel_names(row, target.kernel)
    files.put(
        name="Forbid names that follow the newest kernel",
        src=StringIO(preferences(kernel_pins(), f"the kernel stays {target.kernel}, and moves by a deploy only")),
        dest="/etc/apt/preferences.d/00laoka-kernel",
        mode="644",
    )
    keep_boot(name="The next boot takes a kernel that has its module", wish=wish_of(target))
    apt_install(name=f"Install kernel {target.kernel}", packages=list(names))
    # The kernel that runs now is held too: it is the one to go back to.
    also = [*optional_names(row, target.kernel), *row.metas, *kernel_names(row, basics()[1])]
    apt_hold(name="Hold the kernel", packages=[*names, *also], certain=list(names))
