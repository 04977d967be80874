"""Which driver and kernel a host is to have: by its lock, or where it has none by its inventory."""

from __future__ import annotations

from pyinfra.api.host import Host

from laoka.operations.driver import basics
from laoka.stack.driver_target import DriverTarget, TargetError, target_from_lock, target_of, wished_driver
from laoka.stack.request import RequestError, card_of, parse_driver
from roles.base.deploy import BaseSettings
from roles.driver.settings import DriverSettings
from roles.plan import PlanSettings, locked_stack


def wanted(host: Host) -> DriverTarget | str | None:
    """The target of a host, why there can be none (one line), or None: it has no card and needs no driver."""
    base, plan = BaseSettings.of(host), PlanSettings.of(host)
    release, running = basics()
    stack = locked_stack(host)
    kernel = plan.kernel or running
    try:
        if stack:
            return target_from_lock(stack, release, kernel, plan.driver_source or None, kernel_named=plan.kernel is not None)
        if not base.expected_gpus:
            return None
        wish = parse_driver(plan.driver or DriverSettings.of(host).driver_branch)
        branch, version, flavour = wished_driver(tuple(card_of(gpu.device_id) for gpu in base.expected_gpus), wish)
        return target_of(
            release, branch, version, flavour, kernel, plan.driver_source or None, kernel_named=plan.kernel is not None
        )
    except (TargetError, RequestError) as error:
        return str(error)
