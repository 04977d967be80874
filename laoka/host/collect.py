"""Collectors: the probe's text of this machine, of a host over SSH, or out of a file; one round trip each."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from laoka.host import probe
from laoka.host.bundle import is_bundle, read_bundle
from laoka.host.report import HostReport
from laoka.host.sections import NotAProbe
from laoka.process import Completed, run

CONNECT_TIMEOUT_S = 10
SSH_FAILED_STATUS = 255
# OpenSSH before 9.9 prefers a key exchange that takes 70 ms of CPU on our side. Without it the client and the host agree on the
# ML-KEM of newer ones, or on the curve25519 that pyinfra's own connections use. A choice of the owner's own is left alone.
KEY_EXCHANGE = "KexAlgorithms=-sntrup761x25519*"
SSH_CONFIGS = (
    "~/.ssh/config",
    "~/.ssh/config.d/*",
    "/etc/ssh/ssh_config",
    "/etc/ssh/ssh_config.d/*",
    "/etc/crypto-policies/back-ends/openssh.config",
)

# Root sees more; where sudo asks no password it is used, else the probe reads what a user may.
_REMOTE_COMMAND = 'if [ "$(id -u)" != 0 ] && sudo -n true 2>/dev/null; then exec sudo -n sh -s; else exec sh -s; fi'


class CouldNotCollect(Exception):
    """No probe came back; the message is one line: what, where, why."""


@dataclass(frozen=True)
class SshTarget:
    """How to reach a host with the OpenSSH client. `user`, `key_file` None: as the client's own configuration says.

    `known_hosts_file` makes that file the only one that counts; `jump` is `[user@]host[:port]` of a host in between;
    `config_file` takes the place of the client's own configuration (it may name a host in between too).
    """

    host: str
    port: int = 22
    user: str | None = None
    key_file: str | None = None
    known_hosts_file: str | None = None
    jump: str | None = None
    config_file: str | None = None

    @property
    def name(self) -> str:
        """`user@host:port` without what is the default."""
        user = f"{self.user}@" if self.user else ""
        return f"{user}{self.host}" + (f":{self.port}" if self.port != 22 else "")


def ssh_argv(target: SshTarget, command: str = _REMOTE_COMMAND) -> tuple[str, ...]:
    """The ssh command that runs `command` (default: a shell for the probe on its input); it never asks and never waits long."""
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}"]
    if not _names_key_exchange((*SSH_CONFIGS, target.config_file or "")):
        options += ["-o", KEY_EXCHANGE]
    if target.config_file:
        options += ["-F", target.config_file]
    if target.key_file:
        options += ["-i", target.key_file, "-o", "IdentitiesOnly=yes"]
    if target.known_hosts_file:
        options += ["-o", f"UserKnownHostsFile={target.known_hosts_file}", "-o", "StrictHostKeyChecking=yes"]
    argv = ["ssh", "-T", *options]
    if target.jump:
        # Not -J: that leaves the key and the known hosts out for the host in between.
        host, _, port = target.jump.partition(":")
        argv += ["-o", "ProxyCommand=" + shlex.join(["ssh", *options, "-p", port or "22", "-W", "[%h]:%p", host])]
    argv += ["-p", str(target.port)]
    if target.user:
        argv += ["-l", target.user]
    return (*argv, "--", target.host, command)


@cache
def _names_key_exchange(patterns: tuple[str, ...]) -> bool:
    """Whether a configuration of the ssh client says which key exchange it wants."""
    for place in (Path(pattern).expanduser() for pattern in patterns if pattern):
        for file in place.parent.glob(place.name):
            with contextlib.suppress(OSError):
                if "kexalgorithms" in file.read_text(encoding="utf-8", errors="replace").lower():
                    return True
    return False


def text_of_this_machine() -> str:
    """The probe's text of the machine we are on. Errors: CouldNotCollect."""
    return _probe_text(run(["sh", "-s"], stdin=probe.script(), deadline_s=probe.DEADLINE_S + 5), "@local")


def text_over_ssh(target: SshTarget, deadline_s: float | None = None) -> str:
    """The probe's text of a host. Arguments: `deadline_s` the longest it may take; None: connecting, the probe, and a little.

    Errors: CouldNotCollect when the host can't be reached or its shell can't run it.
    """
    if deadline_s is None:
        deadline_s = CONNECT_TIMEOUT_S * (2 if target.jump else 1) + probe.DEADLINE_S + 5
    return _probe_text(run(ssh_argv(target), stdin=probe.script(), deadline_s=deadline_s), target.name)


def text_of_file(path: str | Path) -> str:
    """The probe's text out of a capture (`laoka capture`) or of a saved probe. Errors: CouldNotCollect."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CouldNotCollect(f"{path}: {error.strerror}") from None
    try:
        return read_bundle(data) if is_bundle(data) else data.decode(errors="replace")
    except ValueError as error:
        raise CouldNotCollect(f"{path}: {error}") from None


def from_this_machine() -> HostReport:
    """The report of this machine. Errors: CouldNotCollect."""
    return _report(text_of_this_machine(), "@local")


def from_ssh(target: SshTarget, deadline_s: float | None = None) -> HostReport:
    """The report of a host over SSH. Arguments: `deadline_s` as for `text_over_ssh`. Errors: CouldNotCollect."""
    return _report(text_over_ssh(target, deadline_s), target.name)


def from_file(path: str | Path) -> HostReport:
    """The report of a capture or a saved probe. Errors: CouldNotCollect."""
    return _report(text_of_file(path), str(path))


def _probe_text(completed: Completed, where: str) -> str:
    if "@laoka-probe " in completed.stdout:
        return completed.stdout
    if completed.timed_out:
        raise CouldNotCollect(f"{where}: no answer before the deadline")
    if completed.status == SSH_FAILED_STATUS:
        why = completed.last_line().rstrip(".")
        raise CouldNotCollect(
            f"{where}: ssh could not connect: {why} (ssh has to get there without a question: address, key, jump host)"
        )
    raise CouldNotCollect(f"{where}: its shell did not run the probe: {completed.last_line()}")


def _report(text: str, where: str) -> HostReport:
    try:
        return HostReport.from_probe(text)
    except NotAProbe as error:
        raise CouldNotCollect(f"{where}: {error}") from None
