"""The hosts of an inventory as targets that can be read: where each is, how to get there, what it should have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laoka.fleet.inventory import HostEntry
from laoka.host import collect
from laoka.host.collect import SshTarget
from laoka.host.report import HostReport


@dataclass(frozen=True)
class InventoryTarget:
    """One host of an inventory. `ssh` is None for pyinfra's `@local`; `expected_gpus` None where the inventory names none."""

    name: str
    ssh: SshTarget | None
    expected_gpus: int | None

    def read(self, deadline_s: float | None = None) -> HostReport:
        """The host's report, by one round trip. Arguments: `deadline_s` the longest it may take. Errors: CouldNotCollect."""
        return collect.from_this_machine() if self.ssh is None else collect.from_ssh(self.ssh, deadline_s)


def ssh_target(name: str, data: Mapping[str, Any]) -> SshTarget | None:
    """How OpenSSH reaches a host, from the keys that pyinfra's own connector reads; None for `@local`."""
    if name == "@local":
        return None
    return SshTarget(
        host=str(data.get("ssh_hostname") or name),
        port=int(data.get("ssh_port") or 22),
        user=_text(data.get("ssh_user")),
        key_file=_path(data.get("ssh_key")),
        known_hosts_file=_path(data.get("ssh_known_hosts_file")),
        config_file=_path(data.get("ssh_config_file")),
    )


def target_of(entry: HostEntry) -> InventoryTarget:
    """One host of an inventory as a target."""
    gpus = entry.data.get("expected_gpus")
    return InventoryTarget(entry.name, ssh_target(entry.name, entry.data), None if gpus is None else len(gpus))


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _path(value: object) -> str | None:
    return None if value is None else str(Path(str(value)).expanduser())
