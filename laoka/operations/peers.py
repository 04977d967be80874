"""Operations that let hosts of one inventory copy model files from each other: a key, known hosts, a user that only reads."""

from __future__ import annotations

import shlex
from io import StringIO

from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.context import host
from pyinfra.facts.files import File
from pyinfra.operations import files

from laoka.facts.peers import HostKeys, PublicKey, TextOf
from laoka.operations.steps import Commands
from laoka.serving.model_source import PEER, PEER_USER
from laoka.serving.model_store import STORE

HOME = f"/var/lib/{PEER_USER}"
AUTHORIZED = f"{HOME}/.ssh/authorized_keys"
KNOWN = f"{PEER}/known_hosts"
RRSYNC = "/usr/bin/rrsync"
"""Comes with rsync; lets a key read one folder and nothing else."""


def reached(name: str) -> Host | None:
    """Another host of this run, if it is part of it and answers."""
    for other in host.state.inventory.get_active_hosts():
        if other.name == name and other.connected:
            return other
    return None


@operation()
def peer_key() -> Commands:
    """Have a key of this host's own, without a passphrase, readable by root alone."""
    if host.get_fact(File, path=f"{PEER}/key"):
        host.noop("there is one")
        return
    key = shlex.quote(f"{PEER}/key")
    yield f"mkdir -p {PEER} && chmod 700 {PEER} && rm -f {key} {key}.pub && ssh-keygen -q -t ed25519 -N '' -C {PEER_USER} -f {key}"


def merged(old: str, new: dict[str, str], keep: set[str]) -> str:
    """Lines that end in `# NAME`: those of `new`, and of `old` those in `keep` that are not in it. Pure."""
    lines = {line.rpartition(" # ")[2]: line for line in old.splitlines() if " # " in line}
    return "".join(f"{line}\n" for name, line in sorted({**{k: v for k, v in lines.items() if k in keep}, **new}.items()))


@operation()
def known_peers(peers: list[tuple[str, str, int]]) -> Commands:
    """Have the keys of the hosts that are asked; taken over the connection of this run, so that nobody can slip in another.

    + peers: (name, address, port) of each; the key of one that is not part of this run stays as it was
    """
    found = {}
    for name, address, port in peers:
        other = reached(name)
        key = other.get_fact(HostKeys) if other is not None else ""
        if key:
            found[name] = f"{address if port == 22 else f'[{address}]:{port}'} {key} # {name}"
    content = merged(host.get_fact(TextOf, path=KNOWN), found, {name for name, _, _ in peers})
    yield from files.put._inner(src=StringIO(content), dest=KNOWN, mode="644", create_remote_dir=True)


@operation()
def authorize_peers(askers: list[str]) -> Commands:
    """Have a user whose keys may read the model store by rsync, and do nothing else.

    + askers: names of the hosts that may; the key of one that is not part of this run stays as it was
    """
    command = f"{RRSYNC} -ro {STORE}"
    found = {}
    for name in askers:
        other = reached(name)
        key = other.get_fact(PublicKey, path=f"{PEER}/key.pub") if other is not None else ""
        if key:
            found[name] = f'command="{command}",restrict {key} # {name}'
    old = host.get_fact(TextOf, path=AUTHORIZED)
    content = merged(old, found, set(askers))
    # In a dry run the key of an asker may not be made yet; one that is not part of this run is waited for.
    expected = [name for name in askers if f" # {name}\n" not in content and reached(name) is not None]
    if content == old and not expected:
        host.noop(f"{', '.join(askers)}: nothing to change")
        return
    if not old:
        told = f"{host.name}: {RRSYNC} is not there: rsync 3.2.7 or later has it; upgrade rsync, or take another model_source"
        yield f"[ -x {RRSYNC} ] || {{ echo {shlex.quote(told)} >&2; exit 1; }}"
        # "*" and not "!": no password, but not locked, which sshd takes for no login at all without PAM.
        yield f"id {PEER_USER} >/dev/null 2>&1 || useradd --system -M -d {HOME} -s /bin/sh -p '*' {PEER_USER}"
        yield f"install -d -m 755 {HOME} {HOME}/.ssh {STORE}"
    if content != old or not old:
        yield from files.put._inner(src=StringIO(content), dest=AUTHORIZED, mode="644")
