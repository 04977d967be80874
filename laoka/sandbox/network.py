"""The lab's own network on this machine: a bridge, masquerading for downloads, and the way back out of it all."""

from __future__ import annotations

import os
from pathlib import Path

from laoka.process import run
from laoka.sandbox.lab import Changes, Lab, read_changes, write_changes

NSPAWN_RUN = Path("/run/systemd/nspawn")
# From about 27 hosts on, systemd in the hosts runs out of inotify instances at the kernel's default of 128.
WANTED_SYSCTLS = {"net/ipv4/ip_forward": "1", "fs/inotify/max_user_instances": "8192"}


def ruleset(lab: Lab) -> str:
    """nft commands for the lab's table: hosts reach the outside by this machine's address, nothing comes in.

    The table is deleted and made in one transaction, so that a second `up` finds what it wants.
    """
    return (
        f"table ip {lab.bridge} {{}}\n"
        f"delete table ip {lab.bridge}\n"
        f"table ip {lab.bridge} {{\n"
        "  chain post {\n"
        "    type nat hook postrouting priority 100;\n"
        f'    ip saddr {lab.prefix}.0/24 oifname != "{lab.bridge}" masquerade\n'
        "  }\n}\n"
    )


def up(lab: Lab) -> None:
    """Make the lab's network; safe to repeat. What is changed outside the lab is recorded first. Errors: ProcessError."""
    changes = read_changes(lab.state)
    if not changes.labs:
        found = tuple((name, (Path("/proc/sys") / name).read_text().strip()) for name in WANTED_SYSCTLS)
        # systemd-nspawn refuses to clear a folder on a disk; on machines whose /run is on disk it needs a tmpfs there.
        needs_tmpfs = _filesystem("/run") != "tmpfs" and not os.path.ismount(NSPAWN_RUN)
        changes = Changes((), found, needs_tmpfs)
    write_changes(lab.state, Changes(tuple(sorted({*changes.labs, lab.name})), changes.sysctls, changes.mounted_nspawn_tmpfs))
    for name, value in WANTED_SYSCTLS.items():
        (Path("/proc/sys") / name).write_text(value)
    if changes.mounted_nspawn_tmpfs and not os.path.ismount(NSPAWN_RUN):
        NSPAWN_RUN.mkdir(parents=True, exist_ok=True)
        run(["mount", "-t", "tmpfs", "tmpfs", str(NSPAWN_RUN)], deadline_s=10, check=True)
    if not Path(f"/sys/class/net/{lab.bridge}").exists():
        run(["ip", "link", "add", lab.bridge, "type", "bridge"], deadline_s=10, check=True)
    run(["ip", "addr", "replace", f"{lab.gateway}/24", "dev", lab.bridge], deadline_s=10, check=True)
    run(["ip", "link", "set", lab.bridge, "up"], deadline_s=10, check=True)
    run(["nft", "-f", "-"], stdin=ruleset(lab), deadline_s=10, check=True)


def down(lab: Lab) -> None:
    """Remove the lab's network; the last lab to go restores what the first one found. Safe to repeat."""
    run(["nft", "delete", "table", "ip", lab.bridge], deadline_s=10)
    if Path(f"/sys/class/net/{lab.bridge}").exists():
        run(["ip", "link", "delete", lab.bridge], deadline_s=10)
    changes = read_changes(lab.state)
    left = tuple(name for name in changes.labs if name != lab.name)
    if left or not changes.labs:
        write_changes(lab.state, Changes(left, changes.sysctls, changes.mounted_nspawn_tmpfs))
        return
    for name, value in changes.sysctls:
        (Path("/proc/sys") / name).write_text(value)
    if changes.mounted_nspawn_tmpfs and os.path.ismount(NSPAWN_RUN):
        run(["umount", "-l", str(NSPAWN_RUN)], deadline_s=10)
    (lab.state / "machine.json").unlink(missing_ok=True)


def remove(interface: str) -> None:
    """Take away a host's end on the bridge: the kernel keeps it a while after the host is gone, and a new one could not come up."""
    if Path(f"/sys/class/net/{interface}").exists():
        run(["ip", "link", "delete", interface], deadline_s=10)


def cut(interface: str, *, cut_off: bool) -> None:
    """Take one host off the bridge's network, or put it back. Errors: ProcessError."""
    run(["ip", "link", "set", interface, "down" if cut_off else "up"], deadline_s=10, check=True)


def _filesystem(mount_point: str) -> str:
    kind = ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[4] == mount_point:
            kind = right.split()[0]
    return kind
