"""What `laoka check` and `laoka audit` read, as pyinfra facts: driver, cards, next boot, what laoka has put on a host.

`pyinfra INVENTORY fact laoka.NvidiaDriver` prints one for every host; a deploy asks `host.get_fact(NvidiaDriver)`. Each is
one round trip of the same probe. What could not be read is {"unread": reason}, never an empty value.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pyinfra.api.facts import FactBase

from laoka.checks.driver import driver_packages, version_in_use
from laoka.checks.facts import cards, listed_cards
from laoka.facts.report import read, read_command
from laoka.host.report import HostReport
from laoka.host.unread import Unread


def plain(value: Any) -> Any:
    """A value of a report in JSON's types."""
    if isinstance(value, Unread):
        return {"unread": value.reason}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return value


class _OfReport(FactBase[dict[str, Any]]):
    """Part of the report."""

    abstract = True

    def command(self) -> str:
        return read_command()

    def process(self, output: list[str]) -> dict[str, Any]:
        found: dict[str, Any] = plain(self.of(read(output)))
        return found

    def of(self, report: HostReport) -> dict[str, Any]:
        """The part that this fact is."""
        raise NotImplementedError


class NvidiaDriver(_OfReport):
    """Version in use, module loaded and on disk for each kernel, userspace, packages and their holds.

    .. code:: json

        {"version": "580.173.02", "loaded": {"version": "580.173.02", "flavour": "proprietary"}, "held": true}
    """

    def of(self, report: HostReport) -> dict[str, Any]:
        driver, packages, holds = report.driver, driver_packages(report), report.packages.holds
        held: object = holds
        if isinstance(packages, Unread):
            held = packages
        elif not isinstance(holds, Unread):
            held = all(package.name in holds for package in packages)
        return {
            "version": version_in_use(report), "loaded": driver.loaded, "on_disk": driver.on_disk, "userspace": driver.userspace,
            "dkms": driver.dkms, "packages": packages, "held": held,
        }  # fmt: skip


class NvidiaCards(_OfReport):
    """Cards by PCI address: id, driver, BARs and link of the bus; UUID, serial number, temperatures and cap of nvidia-smi."""

    def of(self, report: HostReport) -> dict[str, Any]:
        if isinstance(report.gpus, Unread):
            return {"unread": report.gpus.reason}
        shown = listed_cards(report)
        smi = {} if isinstance(shown, Unread) else {gpu.address: gpu for gpu in shown}
        found: dict[str, Any] = {}
        for gpu in cards(report):
            other = smi.get(gpu.address)
            listed = shown if isinstance(shown, Unread) else Unread("nvidia-smi does not list it")
            found[gpu.address] = {
                "id": gpu.id_text, "driver": gpu.driver, "bars": gpu.bars, "link": gpu.link,
                "nvidia_smi": listed if other is None else other,
            }  # fmt: skip
        return found


class NextBoot(_OfReport):
    """The kernel that runs, the one that the next boot takes, and those that are installed."""

    def of(self, report: HostReport) -> dict[str, Any]:
        kernel = report.kernel
        return {"running": kernel.release, "next": kernel.next_boot, "installed": kernel.installed}


class LaokaDeployed(_OfReport):
    """Engine, model, flags, units, watchdog and deploys; {"unread": reason} on a host that has nothing of laoka's."""

    def of(self, report: HostReport) -> dict[str, Any]:
        return {"unread": report.deployed.reason} if isinstance(report.deployed, Unread) else vars(report.deployed)
