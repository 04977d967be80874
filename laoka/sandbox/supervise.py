"""Keeps one throw-away host running, as firmware and a power switch would: starts it, and starts it again on reboot.

Run as `python -m laoka.sandbox.supervise HOST_FOLDER`; `laoka sandbox up` does that in the background.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from laoka.sandbox import boot, cgroups

# With --keep-unit, systemd-nspawn ends with this status when the host asked for a reboot.
REBOOT_STATUS = 133


def command(machine: str, hostname: str, bridge: str, root: Path, binds: Sequence[str], uptime_s: int) -> list[str]:
    """The command that boots the host once.

    Arguments: `binds` are ready --bind= options; `uptime_s` is this machine's uptime, which a time namespace subtracts, so
    that the host's own uptime starts at 0 on each boot (pyinfra's server.reboot waits for that).
    """
    return [
        "unshare", "--time", "--boottime", str(-uptime_s), "--fork", "--kill-child", "--",
        "systemd-nspawn", "--boot", "--quiet", f"--directory={root}", f"--machine={machine}", f"--hostname={hostname}",
        # No systemd on this machine is asked for anything: it may not even be running here.
        "--register=no", "--keep-unit", "--resolv-conf=copy-host", f"--network-bridge={bridge}", "--console=pipe", *binds,
    ]  # fmt: skip


def main(folder: Path) -> int:
    """Boot the host until it powers off, or does not come back because `no-return` says so. Returns the last status."""
    record = json.loads((folder / "host.json").read_text())
    cgroups.enter(record["machine"])
    while True:
        boot.boot(folder / "root", folder / "card")
        uptime_s = int(float(Path("/proc/uptime").read_text().split()[0]))
        argv = command(record["machine"], record["hostname"], record["bridge"], folder / "root", record["binds"], uptime_s)
        # The unified cgroup view: on the hybrid one a unit stayed `deactivating` long after its processes had gone.
        env = {**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"}
        status = subprocess.call(argv, stdin=subprocess.DEVNULL, env=env)
        print(f"[sandbox] systemd-nspawn ended with status {status}", flush=True)
        if status != REBOOT_STATUS or (folder / "no-return").exists():
            return status
        delay = folder / "reboot-delay"
        time.sleep(float(delay.read_text()) if delay.exists() else 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
