"""Opens the gateway's port in the firewall that a host has, keeps its engines to itself, and leaves SSH as it is."""

from __future__ import annotations

import ipaddress
import json
import shlex
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Literal

from pydantic import field_validator
from pyinfra.api.deploy import deploy
from pyinfra.context import host, state
from pyinfra.operations import files, systemd

from laoka.catalog.messages import language
from laoka.operations.steps import apt_install, retire_units, run_unit
from laoka.serving.firewall import Wanted
from roles.agent.deploy import PYTHON
from roles.base.deploy import BaseSettings
from roles.gateway.config import is_loopback, split_listen
from roles.gateway.deploy import GatewaySettings, Peer, peers_of
from roles.serve.deploy import served
from roles.settings import InventoryError, RoleSettings

TEMPLATES = Path(__file__).resolve().parents[2] / "templates" / "firewall"
UNIT = "laoka-firewall.service"
AGAIN = "laoka-firewall-again.service"
SETTINGS = "/etc/laoka/firewall.json"


class FirewallSettings(RoleSettings):
    """Settings of the firewall."""

    firewall: Literal["open", "off"] = "open"
    """open: the gateway's port is let in through ufw, nftables or iptables as the host has them; off: they are left alone."""
    firewall_allow_from: tuple[str, ...] = ()
    """Networks that may use the gateway, such as 192.168.7.0/24; the group's other hosts always may. Empty: all."""

    @field_validator("firewall_allow_from")
    @classmethod
    def _are_networks(cls, sources: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(ipaddress.ip_network(source)) for source in sources)


def wanted_on(listen: str, inner_ports: Sequence[int], allow_from: Sequence[str], peers: Sequence[Peer]) -> Wanted:
    """What a host's firewall has to let in. Errors: ValueError for a peer of a limited gateway that is known by a name only."""
    if is_loopback(listen):
        return Wanted(None, (), tuple(inner_ports))
    sources = list(allow_from)
    for peer in peers if allow_from else ():
        try:
            sources.append(str(ipaddress.ip_network(peer.address)))
        except ValueError:
            raise ValueError(f"firewall_allow_from needs {peer.name}'s address: set its gateway_address to one") from None
    return Wanted(split_listen(listen)[1], tuple(dict.fromkeys(sources)), tuple(inner_ports))


@deploy("Firewall")
def firewall() -> None:
    """Have the unit that applies it at every boot, and after whoever loads the host's own rules anew."""
    settings, gateway = FirewallSettings.of(host), GatewaySettings.of(host)
    retire_units(
        name="What is not wanted is taken back",
        pattern="laoka-firewall*.service",
        keep=[UNIT, AGAIN] if settings.firewall == "open" else [],
    )
    if settings.firewall == "off":
        return
    inner_ports = [one.port for one in served(host)]
    try:
        wanted = wanted_on(gateway.gateway_listen, inner_ports, settings.firewall_allow_from, peers_of(host, state.inventory))
    except ValueError as error:
        raise InventoryError(f"host {host.name}: {error}") from None
    base = BaseSettings.of(host)
    apt_install(name="nftables", packages=["nftables"], lock_wait_s=base.apt_lock_wait_s, lang=language(base.lang))
    values = {"port": wanted.port, "sources": list(wanted.sources), "inner_ports": list(wanted.inner_ports)}
    files.put(name="What is to be open", src=StringIO(json.dumps(values, indent=1) + "\n"), dest=SETTINGS, mode="644")
    for name, unit in (("Unit", UNIT), ("Unit that puts it back", AGAIN)):
        files.template(
            name=name,
            src=str(TEMPLATES / f"{unit}.j2"),
            dest=f"/etc/systemd/system/{unit}",
            mode="644",
            python=PYTHON,
            settings=SETTINGS,
        )
    run_unit(
        name="The gateway's port is open as far as it should be, and SSH is as it was",
        unit=UNIT,
        config=[f"/etc/systemd/system/{UNIT}", f"/etc/systemd/system/{AGAIN}", SETTINGS],
        test=f"{shlex.quote(PYTHON)} -m laoka.serving.firewall check --settings {SETTINGS}",
        test_deadline_s=5,
        _timeout=180,
    )
    systemd.service(name="It is put back after the host's own rules are loaded", service=AGAIN, enabled=True, running=None)
