"""The Debian tree under every throw-away host: made once by debootstrap, then only read."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from laoka.files import write_atomic
from laoka.process import run
from laoka.sandbox import machine
from laoka.sandbox.boot import GRUB_PROBE
from laoka.sandbox.lab import SandboxError

SUITE = "bookworm"
# A bare server as a provider or a USB stick leaves it: systemd, sshd, python3. Everything else is the roles' work.
PACKAGES = (
    "systemd", "systemd-sysv", "dbus", "openssh-server", "sudo", "iproute2", "python3", "ca-certificates", "curl", "procps",
    "kmod", "udev", "less", "pciutils", "netbase", "gnupg", "libpam-systemd", "unattended-upgrades", "grub-common", "grub2-common",
)  # fmt: skip
DOWNLOAD_MB = 99  # measured: the .debs that debootstrap fetches for the list above
REVISION = 4  # raise it when the recipe below changes
SIMULATED_MOUNTS = {"sys-bus-pci.mount": "/sys/bus/pci", "proc-driver.mount": "/proc/driver"}
_BOOTSTRAP_DEADLINE_S = 1800


def path(state: Path) -> Path:
    """Where the tree for the present recipe lies; the name changes with the recipe."""
    recipe = hashlib.sha256(f"{REVISION} {SUITE} {' '.join(PACKAGES)}".encode()).hexdigest()[:12]
    return state / "trees" / f"{SUITE}-{recipe}"


def make(state: Path, say: Callable[[str], None]) -> Path:
    """Make the tree unless it is there; return its path.

    Arguments: `say` gets a line before each slow step. Errors: SandboxError with debootstrap's last words.
    A tree is built beside its place and renamed, so that an interrupted build is never taken for a whole one.
    """
    target = path(state)
    if target.is_dir():
        return target
    for old in (state / "trees").glob(".new-*"):
        shutil.rmtree(old)  # left by a run that was killed
    work = state / "trees" / f".new-{os.getpid()}"
    work.mkdir(parents=True)
    try:
        sources = machine.debian_sources(SUITE)
        mirror = [source.uri for source in sources if SUITE in source.suites][:1]
        say(f"making a Debian {SUITE} tree with debootstrap (about {DOWNLOAD_MB} MB of downloads, 1-2 minutes)")
        argv = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(work), *mirror]
        done = run(argv, deadline_s=_BOOTSTRAP_DEADLINE_S, env={"DEBIAN_FRONTEND": "noninteractive", "TMPDIR": str(state)})
        if not done.ok:
            raise SandboxError(f"debootstrap failed: {done.last_line()}")
        _configure(work, sources)
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return target


def _configure(root: Path, sources: tuple[machine.AptSource, ...]) -> None:
    """Settle what all hosts have in common: package sources, certificates, sshd, journald, the network unit."""
    if sources:
        write_atomic(root / "etc/apt/sources.list", "".join(f"{line}\n" for item in sources for line in item.lines()))
    proxies = machine.proxies()
    if proxies:
        lines = [f'Acquire::{name.split("_")[0]}::Proxy "{url}";\n' for name, url in proxies.items() if name != "no_proxy"]
        write_atomic(root / "etc/apt/apt.conf.d/80proxy", "".join(lines))
    if Path(machine.CA_BUNDLE).exists():
        shutil.copyfile(machine.CA_BUNDLE, root / machine.CA_BUNDLE.lstrip("/"))
    write_atomic(
        root / "etc/ssh/sshd_config.d/laoka-sandbox.conf",
        "PermitRootLogin prohibit-password\nPasswordAuthentication no\nUseDNS no\nMaxStartups 100:30:200\n",
    )
    write_atomic(
        root / "etc/systemd/network/10-host0.network",
        "[Match]\nName=host0\n[Network]\nAddress=@ADDRESS@/24\nGateway=@GATEWAY@\nLinkLocalAddressing=no\n",
    )
    # systemd-nspawn lays its own /sys over a --bind= below it, so the host itself puts the simulated card's tree there.
    for unit, where in SIMULATED_MOUNTS.items():
        write_atomic(
            root / "etc/systemd/system" / unit,
            f"[Unit]\nDescription=The simulated card's {where} (laoka sandbox)\nDefaultDependencies=no\n"
            f"ConditionPathIsDirectory={where}\n"
            f"[Mount]\nWhat=/srv/laoka-sandbox{where}\nWhere={where}\nType=none\nOptions=bind\n"
            "[Install]\nWantedBy=sysinit.target\n",
        )
    # GRUB is real but for the program that looks at disks: a host's overlay has none.
    divert = ["dpkg-divert", "--local", "--rename", "--divert", "/usr/sbin/grub-probe.real", "--add", "/usr/sbin/grub-probe"]
    run(["chroot", str(root), *divert], deadline_s=30, check=True)
    write_atomic(root / "usr/sbin/grub-probe", GRUB_PROBE, 0o755)
    shutil.copyfile(root / "usr/share/grub/default/grub", root / "etc/default/grub")
    (root / "var/log/journal").mkdir(exist_ok=True)
    # Timers that would take apt's lock or the clock of a demo away; a real host keeps them and the roles wait for the lock.
    run(
        [
            "systemctl",
            f"--root={root}",
            "mask",
            "apt-daily.timer",
            "apt-daily-upgrade.timer",
            "systemd-timesyncd.service",
        ],
        deadline_s=30,
    )
    enabled = ("systemd-networkd.service", "ssh.service", *SIMULATED_MOUNTS)
    run(["systemctl", f"--root={root}", "enable", *enabled], deadline_s=30, check=True)
    shutil.rmtree(root / "var/cache/apt/archives", ignore_errors=True)
    (root / "var/cache/apt/archives/partial").mkdir(parents=True)
