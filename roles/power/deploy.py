"""Persistence, caps, clocks, ECC and compute mode: applied by a unit at every boot and after every recovery, and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pyinfra.api.deploy import deploy
from pyinfra.context import host
from pyinfra.operations import files

from laoka.catalog.messages import language
from laoka.operations.steps import refuse, run_unit
from laoka.stack.power_budget import budget_of, told
from laoka.stack.request import card_of
from roles.base.deploy import BaseSettings
from roles.settings import RoleSettings

TEMPLATE = Path(__file__).resolve().parents[2] / "templates" / "power" / "laoka-power.service.j2"
UNIT = "laoka-power.service"
DAEMON = "nvidia-persistenced.service"
# nvidia-smi's numbers for -c, and the words in which it tells them.
COMPUTE_MODES = {"default": (0, "Default"), "exclusive": (3, "Exclusive_Process"), "prohibited": (2, "Prohibited")}


class PowerSettings(RoleSettings):
    """Settings of power."""

    power_limit_w: int | None = None
    """Cap of each card in watts; None leaves the card's own. A V100 PCIe takes 100 to 250 W."""
    application_clocks_mhz: tuple[int, int] | None = None
    """Memory and graphics clock under load, such as [877, 1230]; None leaves the card's own."""
    ecc: Literal["on", "off"] | None = None
    """Error correction of the cards' memory; a change takes effect at the next boot. None leaves it."""
    compute_mode: Literal["default", "exclusive", "prohibited"] | None = None
    """How many processes may use a card; None leaves it."""
    psu_rating_w: int | None = Field(default=None, gt=0)
    """What the power supply gives, in watts, as its label says; None: the sum of caps can't be checked."""
    psu_model: str | None = None
    """Maker and model of the power supply: `laoka audit` tells when several hosts with the same one lose cards or power."""
    host_power_w: int | None = Field(default=None, gt=0)
    """What the host draws without its cards under load, in watts: measure it at the wall."""


def wanted_values(settings: PowerSettings) -> dict[str, str]:
    """nvidia-smi's query fields and what each has to say, in plain csv without units."""
    values = {"persistence_mode": "Enabled"}
    if settings.power_limit_w is not None:
        values["power.limit"] = f"{settings.power_limit_w:.2f}"
    if settings.application_clocks_mhz is not None:
        values["clocks.applications.memory"], values["clocks.applications.graphics"] = map(str, settings.application_clocks_mhz)
    if settings.ecc is not None:
        values["ecc.mode.pending"] = "Enabled" if settings.ecc == "on" else "Disabled"
    if settings.compute_mode is not None:
        values["compute_mode"] = COMPUTE_MODES[settings.compute_mode][1]
    return values


def changes(settings: PowerSettings) -> list[str]:
    """Arguments of nvidia-smi that bring them about, in order: nothing lasts without persistence mode."""
    found = ["-pm 1"]
    if settings.power_limit_w is not None:
        found.append(f"-pl {settings.power_limit_w}")
    if settings.application_clocks_mhz is not None:
        found.append("-ac {},{}".format(*settings.application_clocks_mhz))
    if settings.ecc is not None:
        found.append(f"-e {int(settings.ecc == 'on')}")
    if settings.compute_mode is not None:
        found.append(f"-c {COMPUTE_MODES[settings.compute_mode][0]}")
    return found


def power_test(values: dict[str, str], cards: int) -> str:
    """Shell text that succeeds when nvidia-smi says within 20 s that at least `cards` cards, and all, have these values."""
    query = f"timeout 20 nvidia-smi --query-gpu={','.join(values)} --format=csv,noheader,nounits"
    line = ", ".join(values.values())
    return f"{query} | awk -v want='{line}' -v cards={cards} '$0 == want {{ n++ }} END {{ exit !(n >= cards && n == NR) }}'"


def budget_line() -> tuple[bool, str]:
    """(whether the supply is known to be too weak for this host, the line that tells the sum)."""
    own, base = PowerSettings.of(host), BaseSettings.of(host)
    cards = [card_of(gpu.device_id) for gpu in base.expected_gpus]
    lang = language(base.lang)
    return told(budget_of(cards, own.power_limit_w, own.host_power_w, own.psu_rating_w), lang)


@deploy("Power gate")
def power_gate() -> None:
    """Refuse a host whose cards may draw more than its supply gives, before anything changed; say so when that is not known."""
    if not BaseSettings.of(host).expected_gpus:
        return
    stop, line = budget_line()
    if not stop:
        host.log(line)
    refuse(name="Gate: the power supply", lines=[f"{host.name} refused, nothing was changed: {line}"] if stop else [])


@deploy("Power")
def power() -> None:
    """Have the persistence daemon run, apply all by a unit, and have the cards confirm it."""
    base, own = BaseSettings.of(host), PowerSettings.of(host)
    if not base.expected_gpus:
        host.noop("no power settings: this host has no card")
        return
    cards = len(base.expected_gpus)
    run_unit(name="The persistence daemon runs", unit=DAEMON, config=[], _timeout=120)
    files.template(name="Unit", src=str(TEMPLATE), dest=f"/etc/systemd/system/{UNIT}", mode="644", changes=changes(own))
    values = wanted_values(own)
    run_unit(
        name=f"{', '.join(f'{key} {value}' for key, value in values.items())}: at every boot, and every card says so",
        unit=UNIT,
        config=[f"/etc/systemd/system/{UNIT}"],
        test=power_test(values, cards),
        test_deadline_s=20,
        _timeout=120,
    )
