"""One download, then copies: a host gets model files from another host of the inventory, by ssh, with a key that reads the model
store and nothing else.

A source `host:NAME` in the inventory is written for the host as ssh://laoka-peer@ADDRESS:PORT/FOLDER. NAME itself leaves it out, so
a whole group may have the same line.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyinfra.api.host import Host
from pyinfra.context import host

from laoka.catalog.messages import language
from laoka.operations.peers import authorize_peers, known_peers, peer_key
from laoka.operations.steps import apt_install
from laoka.serving.model_source import PEER_USER
from roles.base.deploy import BaseSettings
from roles.settings import InventoryError, data_of

PREFIX = "host:"


def named_hosts(sources: Sequence[str]) -> tuple[str, ...]:
    """Names of the hosts among sources."""
    return tuple(source.removeprefix(PREFIX) for source in sources if source.startswith(PREFIX))


def is_from_peer(on: Host, sources: Sequence[str]) -> bool:
    """Whether a host may get files from another one of the inventory."""
    return any(name != on.name for name in named_hosts(sources))


def peer(on: Host, name: str) -> Host:
    """Another host of the inventory. Errors: InventoryError."""
    for other in on.state.inventory:
        if other.name == name:
            found: Host = other
            return found
    known = ", ".join(sorted(str(other.name) for other in on.state.inventory))
    raise InventoryError(f"host {on.name}: source host:{name}: the inventory has no host of this name; it has: {known}")


def address_of(other: Host) -> tuple[str, int]:
    """Where the other hosts reach one: (address, port of ssh)."""
    data = data_of(other)
    return str(data.get("model_peer_address") or data.get("ssh_hostname") or other.name), int(data.get("ssh_port") or 22)


def written(on: Host, sources: Sequence[str], folder: str) -> list[str]:
    """Sources as the host's laoka reads them.

    Arguments: `folder` of the revision below the model store, "ORG--NAME/REVISION". Errors: InventoryError.
    """
    found = []
    for source in sources:
        if not source.startswith(PREFIX):
            found.append(source)
        elif source != f"{PREFIX}{on.name}":
            address, port = address_of(peer(on, source.removeprefix(PREFIX)))
            found.append(f"ssh://{PEER_USER}@{address}:{port}/{folder}")
    return found


def set_up(own: Sequence[str], askers: Sequence[Host]) -> None:
    """Have keys in place: this host's for those that it asks, and on this host those of who asks it.

    Arguments: `own` are this host's sources; `askers` the hosts whose sources name this one.
    """
    asked = [peer(host, name) for name in dict.fromkeys(named_hosts(own)) if name != host.name]
    if asked or askers:
        base = BaseSettings.of(host)
        apt_install(
            name="rsync, for copies between hosts",
            packages=["rsync", "openssh-client"],
            lock_wait_s=base.apt_lock_wait_s,
            lang=language(base.lang),
        )
    if asked:
        peer_key(name="A key that asks other hosts for model files")
        known_peers(name="Which hosts it is for, by their keys", peers=[(str(one.name), *address_of(one)) for one in asked])
    if askers:
        authorize_peers(name="Who may read the model store by it", askers=[str(one.name) for one in askers])
