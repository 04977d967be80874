"""Facts about a host's ssh keys, for hosts that copy from each other."""

from __future__ import annotations

import re
import shlex

from pyinfra.api.facts import FactBase

KEY = re.compile(r"((?:ssh-|ecdsa-|sk-)\S+) (\S+)")


class HostKeys(FactBase[str]):
    """The public key by which a host's sshd is known: ed25519 if it has one; empty without any."""

    default = str

    def command(self) -> str:
        keys = "/etc/ssh/ssh_host_ed25519_key.pub /etc/ssh/ssh_host_ecdsa_key.pub /etc/ssh/ssh_host_rsa_key.pub"
        return f"cat {keys} 2>/dev/null | head -n 1"

    def process(self, output: list[str]) -> str:
        found = KEY.match(output[0]) if output else None
        return found[0] if found else ""


class PublicKey(FactBase[str]):
    """A public key of a file; empty where there is none."""

    default = str

    def command(self, path: str) -> str:
        return f"cat {shlex.quote(path)} 2>/dev/null || true"

    def process(self, output: list[str]) -> str:
        found = KEY.match(output[0]) if output else None
        return found[0] if found else ""


class TextOf(FactBase[str]):
    """A small text file's content; empty where there is none."""

    default = str

    def command(self, path: str) -> str:
        return f"cat {shlex.quote(path)} 2>/dev/null || true"

    def process(self, output: list[str]) -> str:
        return "".join(f"{line}\n" for line in output)
