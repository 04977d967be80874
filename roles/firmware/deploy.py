"""The gate: firmware, Above 4G and the number of cards are checked before anything changes."""

from __future__ import annotations

from typing import Literal

from pyinfra.api.deploy import deploy
from pyinfra.context import host

from laoka.operations.gate import firmware_gate
from roles.base.deploy import BaseSettings
from roles.settings import RoleSettings


class FirmwareSettings(RoleSettings):
    """Settings of the gate."""

    gate: Literal["refuse", "skip"] = "refuse"
    """skip lets a host through unchecked, for one that serves without a GPU."""


@deploy("Firmware")
def firmware() -> None:
    """Refuse the host when its board can't drive its cards; the other hosts go on."""
    if FirmwareSettings.of(host).gate == "skip":
        host.noop("the gate is skipped: gate = skip in the inventory")
        return
    base = BaseSettings.of(host)
    firmware_gate(name="Gate: BARs above 4 GiB, every card there", expected_gpus=len(base.expected_gpus), lang=base.lang)
