"""What an inventory may say for `laoka plan` and `laoka lock`, and what the lock says for a host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyinfra.api.host import Host

from laoka.stack.lock import NAME, LockError, read_lock
from roles.settings import InventoryError, RoleSettings


class PlanSettings(RoleSettings):
    """Settings of the plan and the lock file."""

    lock_file: str | None = None
    """Lock file of `laoka lock` that hosts are set up by; None takes stack.lock.toml of this folder for the hosts that it has."""
    os_release: str | None = None
    """The host's system, such as ubuntu-24.04 or debian-12; None stands for ubuntu-24.04 in a plan, for what it is in a deploy."""
    kernel: str | None = None
    """Its kernel, such as 6.8.0-124-generic: installed if need be, and pinned. None pins the one that runs."""
    model: str | None = None
    """A model of the catalogue, or a folder with a checkpoint; None takes model_id."""
    context_tokens: int | None = None
    """The longest context that is wanted; None takes max-model-len of serve_flags."""
    streams: int | None = None
    """How many requests at once; None takes max-num-seqs of serve_flags."""
    engine: str | None = None
    """An engine, such as 1cat-vllm==1.5.1; None takes engine_name and engine_version."""
    driver: str | None = None
    """A driver branch (580) or version (580.173.02); None takes driver_branch."""
    driver_source: str | None = None
    """Where driver packages come from, such as ubuntu-server or nvidia-debian; None takes the first that fits the release."""


def lock_path(host: Host) -> Path | None:
    """The lock file that a host is set up by; None when it is set up without one. Errors: InventoryError."""
    return _lock_file(PlanSettings.of(host).lock_file) if locked_stack(host) else None


def _lock_file(named: str | None) -> Path:
    """Where the lock file is: as the inventory names it, else in this folder."""
    return Path(named).expanduser() if named else Path(NAME)


def locked_stack(host: Host) -> Mapping[str, Any]:
    """What the lock file fixes for a host; empty when there is no lock file. Errors: InventoryError."""
    named = PlanSettings.of(host).lock_file
    path = _lock_file(named)
    if not named and not path.is_file():
        return {}
    try:
        lock = read_lock(path)
        if not named and not any(host.name in group.hosts for group in lock.groups):
            return {}
        return lock.group_of(host.name).stack
    except LockError as error:
        raise InventoryError(f"host {host.name}: {error}") from None
