"""The kernel: held as it is, and the boot loader's default on one that has its module; the role driver moves both."""

from __future__ import annotations

from io import StringIO

from pyinfra.api.deploy import deploy
from pyinfra.context import host
from pyinfra.operations import files

from laoka.operations.driver import basics, keep_boot
from laoka.operations.steps import apt_hold
from laoka.stack.driver_target import kernel_names, kernel_pins, kernel_row, preferences
from roles.driver.deploy import wish_of
from roles.driver.target import wanted


@deploy("Kernel")
def kernel() -> None:
    """Keep kernel and boot where they are; another kernel comes with the module that is proven for it (role driver)."""
    target = wanted(host)
    if target is None or isinstance(target, str):
        return  # no card; or the driver's gate tells why not
    files.put(
        name="Forbid names that follow the newest kernel",
        src=StringIO(preferences(kernel_pins(), f"the kernel stays {target.kernel}, and moves by a deploy only")),
        dest="/etc/apt/preferences.d/00laoka-kernel",
        mode="644",
    )
    wish = wish_of(target)
    keep_boot(name="The next boot takes a kernel that has its module", wish=wish)
    # Held as they are: the kernel that runs is the one to go back to. The wanted one is held with the driver (role driver).
    row = kernel_row(target.source)
    names = [*kernel_names(row, basics()[1]), *row.metas]
    apt_hold(name="Hold the kernel", packages=names, certain=[], lock_wait_s=wish.lock_wait_s, lang=wish.lang)
