"""How the sandbox's own guests are reached: options for OpenSSH's programs, and waiting until a guest's sshd answers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path


def options(key: Path, known_hosts: Path) -> list[str]:
    """Options for ssh, scp and sftp: this key and these known hosts only, no question asked, nothing of the user's settings."""
    values = {
        "BatchMode": "yes", "ConnectTimeout": "10", "IdentitiesOnly": "yes", "LogLevel": "ERROR",
        "StrictHostKeyChecking": "accept-new", "UserKnownHostsFile": str(known_hosts), "ServerAliveInterval": "15",
    }  # fmt: skip
    return ["-F", "none", "-i", str(key), *(word for name, value in values.items() for word in ("-o", f"{name}={value}"))]


def wait(address: str, port: int, deadline_s: float, *, greeting_s: float = 1, running: Callable[[], bool] = lambda: True) -> bool:
    """Wait until the sshd there greets, at most `deadline_s` seconds.

    `greeting_s` bounds one try: how long an sshd that took the connection may need for its first words. The wait is given up
    when `running()` is false.
    """
    until = time.monotonic() + deadline_s
    while time.monotonic() < until and running():
        try:
            with socket.create_connection((address, port), greeting_s) as connection:
                if connection.recv(7).startswith(b"SSH-2"):
                    return True
        except OSError:
            pass
        time.sleep(0.05)
    return False
