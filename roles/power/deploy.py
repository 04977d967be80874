"""Power caps and persistence: applied by a unit, so that they are there after every boot, and read back."""

from __future__ import annotations

from pathlib import Path

from pyinfra.api.deploy import deploy
from pyinfra.context import host
from pyinfra.operations import files

from laoka.operations.steps import run_unit
from roles.base.deploy import BaseSettings
from roles.settings import RoleSettings

TEMPLATE = Path(__file__).resolve().parents[2] / "templates" / "power" / "laoka-power.service.j2"
UNIT = "laoka-power.service"


class PowerSettings(RoleSettings):
    """Settings of power."""

    power_limit_w: int | None = None
    """Cap of each card in watts; None leaves the card's own. A V100 PCIe takes 100 to 250 W."""


def limit_test(limit_w: int, cards: int) -> str:
    """Shell text that succeeds when nvidia-smi says within 20 s that at least `cards` cards, and all, have this cap."""
    query = "timeout 20 nvidia-smi --query-gpu=power.limit --format=csv,noheader,nounits"
    return f"{query} | awk -v want={limit_w} -v cards={cards} '$1 + 0 == want {{ n++ }} END {{ exit !(n >= cards && n == NR) }}'"


@deploy("Power")
def power() -> None:
    """Apply the cap by a unit, and have the card confirm it."""
    limit_w = PowerSettings.of(host).power_limit_w
    if limit_w is None:
        host.noop("no power cap: none is asked for (power_limit_w in the inventory)")
        return
    files.template(name="Unit", src=str(TEMPLATE), dest=f"/etc/systemd/system/{UNIT}", mode="644", limit_w=limit_w)
    cards = max(1, len(BaseSettings.of(host).expected_gpus))
    run_unit(
        name=f"Cap of {limit_w} W at every boot, and every card says so",
        unit=UNIT,
        config=[f"/etc/systemd/system/{UNIT}"],
        test=limit_test(limit_w, cards),
        test_deadline_s=20,
        _timeout=120,
    )
