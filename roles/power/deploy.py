"""Power caps and persistence: applied by a unit, so that they are there after every boot, and read back."""

from __future__ import annotations

from pathlib import Path

from pyinfra.api.deploy import deploy
from pyinfra.context import host
from pyinfra.operations import files

from laoka.operations.power import power_limits
from laoka.operations.steps import run_unit
from roles.base.deploy import BaseSettings
from roles.settings import RoleSettings

TEMPLATE = Path(__file__).resolve().parents[2] / "templates" / "power" / "laoka-power.service.j2"
UNIT = "laoka-power.service"


class PowerSettings(RoleSettings):
    """Settings of power."""

    power_limit_w: int | None = None
    """Cap of each card in watts; None leaves the card's own. A V100 PCIe takes 100 to 250 W."""


@deploy("Power")
def power() -> None:
    """Apply the cap by a unit, and have the card confirm it."""
    limit_w = PowerSettings.of(host).power_limit_w
    if limit_w is None:
        host.noop("no power cap: none is asked for (power_limit_w in the inventory)")
        return
    files.template(name="Unit", src=str(TEMPLATE), dest=f"/etc/systemd/system/{UNIT}", mode="644", limit_w=limit_w)
    run_unit(name=f"Cap of {limit_w} W at every boot", unit=UNIT, config=[f"/etc/systemd/system/{UNIT}"], _timeout=120)
    cards = len(BaseSettings.of(host).expected_gpus)
    power_limits(name=f"Every card says {limit_w} W", limit_w=limit_w, cards=cards, unit=UNIT, _timeout=120)
