"""stack.lock.toml: one resolved stack for each group of like hosts, and what it was resolved from. Roles read only this."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from laoka.catalog import toml
from laoka.catalog.load import is_sha256
from laoka.catalog.selfcheck import catalogue_hash
from laoka.files import write_atomic
from laoka.stack.message import Message, message
from laoka.stack.request import Request
from laoka.stack.resolve import Refusal, Stack, resolve
from laoka.stack.tables import stack_table

FORMAT = 1
NAME = "stack.lock.toml"
HEADER = (
    "# Written by `laoka lock`; roles read only this file. Change the inventory or the catalogue and lock again, never edit it.\n\n"
)


class LockError(ValueError):
    """A lock file that can't be read, or does not have what is asked of it; the message is one line."""


@dataclass(frozen=True)
class LockedGroup:
    """Hosts with the same cards, release and wishes, and their stack as a plain table."""

    id: str
    hosts: tuple[str, ...]
    request: Mapping[str, Any]
    stack: Mapping[str, Any]


@dataclass(frozen=True)
class Lock:
    """A lock file's content."""

    catalogue: str
    inventory: str
    groups: tuple[LockedGroup, ...]

    def group_of(self, host: str) -> LockedGroup:
        """The group of a host. Errors: LockError when the lock does not have the host."""
        for group in self.groups:
            if host in group.hosts:
                return group
        raise LockError(f"{NAME}: host {host} is not in it: laoka lock INVENTORY")

    @property
    def hashes(self) -> dict[str, str]:
        """Wheel hashes that were locked, by "name==version"."""
        return {
            f"{group.stack['engine']}=={group.stack['engine_version']}": group.stack["wheel_sha256"]
            for group in self.groups
            if "wheel_sha256" in group.stack
        }


def request_table(request: Request) -> dict[str, Any]:
    """A request as a plain table: what of the inventory decides on the stack."""
    table: dict[str, Any] = {
        "cards": [card.device_id for card in request.cards],
        "os_release": request.os_release,
        "kernel": request.kernel,
        "model": request.checkpoint.name,
        "context_tokens": request.context_tokens,
        "streams": request.streams,
        "speculative": request.speculative,
        "speculative_config": None
        if request.speculative_config is None
        else json.dumps(request.speculative_config, sort_keys=True),
        "engine": request.engine,
        "engine_version": request.engine_version,
        "driver": request.driver.text if request.driver else None,
        "driver_source": request.driver_source,
    }
    return {key: value for key, value in table.items() if value is not None}


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table with the keys of its tables as "serve_flags.max-model-len"."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= {f"{key}.{name}": said for name, said in value.items()} if isinstance(value, Mapping) else {key: value}
    return found


def inventory_hash(requests: Mapping[str, Request]) -> str:
    """SHA-256 over what of an inventory decides on stacks."""
    told = {host: request_table(request) for host, request in requests.items()}
    return f"sha256:{hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()}"


def make_lock(requests: Mapping[str, Request]) -> tuple[Lock | None, tuple[Message, ...]]:
    """The lock of an inventory.

    Arguments: the request of each host by its name.
    Returns the lock and no problems, or None and every problem: a refusal, a stack without a known hash, one that does not fit.
    """
    found: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {}
    problems: list[Message] = []
    for host in sorted(requests):
        outcome = resolve(requests[host])
        if isinstance(outcome, Refusal):
            problems += [
                message("lock_refused", host=host, constraint=item.constraint, evidence=item.evidence, way_out=item.way_out)
                for item in outcome.violations
            ]
            continue
        problem = _unlockable(host, outcome)
        if problem is not None:
            problems.append(problem)
            continue
        asked = request_table(requests[host])
        found.setdefault(json.dumps(asked, sort_keys=True), (asked, stack_table(outcome), []))[2].append(host)
    if problems:
        return None, tuple(problems)
    groups: list[LockedGroup] = []
    for asked, stack, hosts in sorted(found.values(), key=lambda item: item[2]):
        label = (
            f"{stack['gpu_count']}x {stack['gpu']}, {stack['os_release']}" if "gpu" in stack else f"no GPU, {stack['os_release']}"
        )
        twins = sum(group.id == label or group.id.startswith(f"{label} #") for group in groups)
        groups.append(LockedGroup(f"{label} #{twins + 1}" if twins else label, tuple(hosts), asked, stack))
    return Lock(catalogue_hash(), inventory_hash(requests), tuple(groups)), ()


def _unlockable(host: str, stack: Stack) -> Message | None:
    if stack.wheel_sha256 is None:
        return message("lock_no_hash", host=host, engine=stack.engine.pin)
    # Without cards the memory of the host is not known here; with cards it has to be.
    if stack.memory.fits is not True and stack.engine.device == "cuda":
        return message("lock_does_not_fit", host=host)
    return None


def to_toml(lock: Lock) -> str:
    """The file's text: sorted, so that two locks can be compared line by line."""
    groups = [
        {"hosts": sorted(group.hosts), "id": group.id, "request": _sorted(group.request), "stack": _sorted(group.stack)}
        for group in sorted(lock.groups, key=lambda group: group.id)
    ]
    content = {"catalogue": lock.catalogue, "format": FORMAT, "inventory": lock.inventory, "group": groups}
    return HEADER + tomli_w.dumps(content, multiline_strings=False)


def _sorted(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _sorted(table[key]) if isinstance(table[key], Mapping) else table[key] for key in sorted(table)}


def parse_lock(text: str, where: str) -> Lock:
    """Read a lock. Errors: LockError for anything else, a format that is not known here, or a hash that is none."""
    try:
        content = toml.loads(text, where)
    except toml.TomlError as error:
        raise LockError(f"{error}: laoka lock again") from None
    if content.get("format") != FORMAT:
        raise LockError(f"{where}: format {content.get('format')!r} is not known here (known: {FORMAT}): laoka lock again")
    try:
        groups = tuple(
            LockedGroup(str(raw["id"]), tuple(raw["hosts"]), dict(raw["request"]), dict(raw["stack"])) for raw in content["group"]
        )
        lock = Lock(str(content["catalogue"]), str(content["inventory"]), groups)
    except (KeyError, TypeError, ValueError) as error:
        raise LockError(f"{where}: damaged: {type(error).__name__} {str(error)[:60]}: laoka lock again") from None
    hosts = [host for group in groups for host in group.hosts]
    if len(set(hosts)) != len(hosts):
        raise LockError(f"{where}: damaged: a host is in two groups: laoka lock again")
    for group in groups:
        if (
            not is_sha256(str(group.stack.get("wheel_sha256")))
            or "engine" not in group.stack
            or "engine_version" not in group.stack
        ):
            raise LockError(f"{where}: damaged: group {group.id} pins no wheel by its SHA-256: laoka lock again")
    return lock


def read_lock(path: Path) -> Lock:
    """Read a lock file. Errors: LockError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LockError(f"{path}: {getattr(error, 'strerror', None) or error}: laoka lock INVENTORY writes it") from None
    return parse_lock(text, str(path))


def write_lock(path: Path, lock: Lock) -> None:
    """Write a lock file, whole or not at all. Errors: OSError."""
    write_atomic(path, to_toml(lock))


def moved(locked: Lock, requests: Mapping[str, Request], catalogue: str | None = None) -> tuple[Message, ...]:
    """What is no longer as it was locked: the catalogue, the inventory, and each stack key that would now differ.

    Arguments: `catalogue` is the catalogue's hash now (for tests). Hashes that the lock has count as known, so this works offline.
    """
    now = catalogue or catalogue_hash()
    found: list[Message] = []
    if locked.catalogue != now:
        found.append(message("lock_moved_catalogue", locked=locked.catalogue[:19], now=now[:19]))
    if locked.inventory != inventory_hash(requests):
        found.append(message("lock_moved_inventory"))
    in_lock = {host for group in locked.groups for host in group.hosts}
    found += [message("lock_moved_host", host=host) for host in sorted(in_lock ^ set(requests))]
    for host in sorted(in_lock & set(requests)):
        outcome = resolve(requests[host])
        was = _flat(locked.group_of(host).stack)
        if isinstance(outcome, Refusal):
            found += [
                message("lock_refused", host=host, constraint=item.constraint, evidence=item.evidence, way_out=item.way_out)
                for item in outcome.violations
            ]
            continue
        new = _flat(stack_table(outcome))
        for key in sorted({*was, *new}):
            if was.get(key) != new.get(key):
                found.append(message("lock_moved_stack", host=host, item=key, locked=str(was.get(key)), now=str(new.get(key))))
    return tuple(found)
