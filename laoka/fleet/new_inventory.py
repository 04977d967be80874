"""The first inventory of somebody's hosts, written from what the hosts themselves said. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from laoka.catalog import gpus
from laoka.catalog.drivers import release
from laoka.host.bundle import CAPTURE_SUFFIXES
from laoka.host.collect import SshTarget
from laoka.host.report import HostReport
from laoka.host.unread import Unread

HEAD = '''"""The hosts of one place; written by `laoka init` from what they said on {day}. Edit it: it is yours now.

    laoka plan --inventory {file}                # which stack these cards can run
    pyinfra {file} deploys/check.py              # the gate alone: changes nothing
    pyinfra {file} deploys/full.py --dry         # what would change

docs/inventory.md lists every key, inventories/example.py shows the usual ones.
"""

gpu_hosts = (
    [
'''
TAIL = """    ],
    {{
        # What every host above has in common.
        "_sudo": {sudo},
        # --- to be decided by you; a line without its # takes effect ---
        # "model_id": "QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4",
        # "model_revision": "",  # the hub's whole commit: laoka model fetch NAME --revision main --dry tells it
        # "model_source": ["modelscope", "hf-mirror", "hf"],
        # "gateway_listen": "0.0.0.0:8080",  # beyond the host itself only with keys
        # "gateway_keys_file": "inventories/secrets/gateway-keys",  # NAME KEY a line; openssl rand -hex 24 makes a key
        # "alert_urls_file": "inventories/secrets/alert-urls",  # docs/alerts.md
        # "http_proxy": "http://192.168.7.2:3128",
        # "pip_index_url": "",  # a mirror near you
        # "lang": "zh",
    }},
)
"""


@dataclass(frozen=True)
class NewHost:
    """A host that was read: how it was reached (None: a capture was read), what it is, its name if it does not tell it."""

    target: SshTarget | None
    report: HostReport
    name: str | None = None


def named_like(file: str) -> str:
    """The host that a capture is named after: a redacted one does not tell its host's name."""
    return next((file.removesuffix(suffix) for suffix in CAPTURE_SUFFIXES if file.endswith(suffix)), file)


def names_of(hosts: Sequence[NewHost]) -> tuple[str, ...]:
    """A name for each host: its own host name, with a number where two have the same or it has none."""
    names: list[str] = []
    for host in hosts:
        said = host.name or host.report.hostname
        base = re.sub(r"[^a-z0-9-]+", "-", ("" if isinstance(said, Unread) else said.split(".")[0]).lower()).strip("-") or "host"
        number = 2
        name = base
        while name in names:
            name, number = f"{base}-{number}", number + 1
        names.append(name)
    return tuple(names)


def notes_of(host: NewHost) -> tuple[str, ...]:
    """What the owner should know about a host's entry: message keys of `init.` that hold for it."""
    cards = host.report.gpus
    unread = isinstance(cards, Unread)
    seen = () if isinstance(cards, Unread) else cards
    unknown = any(gpus.by_device_id(card.id_text) is None for card in seen)
    return tuple(
        key
        for key, holds in (
            ("unreached", host.target is None),
            ("cards_unread", unread),
            ("no_cards", not unread and not seen),
            ("unknown_card", unknown),
            ("no_release", not unread and _os_release(host.report) is None),
        )
        if holds
    )


def inventory_text(hosts: Sequence[NewHost], file: str, day: str) -> str:
    """The inventory as Python text.

    Arguments: `file` is what it will be called, `day` the date to name in it. A fact that a host did not tell is left out.
    """
    lines = [HEAD.format(day=day, file=file)]
    for name, host in zip(names_of(hosts), hosts, strict=True):
        lines.append(f"        (\n            {_literal(name)},\n            {{\n")
        lines += _reached(host.target)
        release_name = _os_release(host.report)
        if release_name:
            lines.append(f'                "os_release": {_literal(release_name)},\n')
        lines += _cards(host.report)
        lines.append("            },\n        ),\n")
    sudo = any(host.target is not None and host.target.user not in (None, "root") for host in hosts)
    return "".join(lines) + TAIL.format(sudo=sudo)


def _reached(target: SshTarget | None) -> list[str]:
    """The lines of how a host is reached; of a capture's host, one to fill in."""
    if target is None:
        return ['                # "ssh_hostname": "",  # a capture does not tell it; without it the name above is the address\n']
    found: dict[str, object] = {"ssh_hostname": target.host}
    if target.port != 22:
        found["ssh_port"] = target.port
    if target.user:
        found["ssh_user"] = target.user
    if target.key_file:
        found["ssh_key"] = target.key_file
    return [f"                {_literal(key)}: {_literal(value)},\n" for key, value in found.items()]


def _os_release(report: HostReport) -> str | None:
    system = report.system.os
    if isinstance(system, Unread):
        return None
    name = f"{system.id}-{system.version_id}"
    return name if release(name) else None


def _cards(report: HostReport) -> list[str]:
    """The lines of expected_gpus: a card that is missing later is an incident."""
    cards = report.gpus
    if isinstance(cards, Unread):
        return [f"                # expected_gpus: the cards could not be read ({_plain(cards.reason)})\n"]
    if not cards:
        return ["                # expected_gpus: no card was seen\n"]
    lines = ['                "expected_gpus": [\n']
    for card in cards:
        known = gpus.by_device_id(card.id_text)
        about = known.name if known else "not in laoka's catalogue"
        entry = f'"bdf": {_literal(card.address)}, "device_id": {_literal(card.id_text)}'
        lines.append(f"                    {{{entry}}},  # {about}\n")
    return [*lines, "                ],\n"]


def _literal(value: object) -> str:
    """A text or number as Python and a formatter write it."""
    return json.dumps(value, ensure_ascii=False)


def _plain(text: str) -> str:
    """A reason as part of a comment."""
    return " ".join(text.split())[:100]
