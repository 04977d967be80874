"""Telling systemd how we are: the sd_notify protocol over $NOTIFY_SOCKET (sd_notify(3)), in the few lines that it takes."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


class Notifier:
    """Sends states such as READY=1 and WATCHDOG=1; does nothing where no socket was given."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        env = os.environ if env is None else env
        path = env.get("NOTIFY_SOCKET", "")
        # "@" stands for the abstract namespace.
        self._address = "\0" + path[1:] if path.startswith("@") else path
        usec = env.get("WATCHDOG_USEC", "")
        pid = env.get("WATCHDOG_PID", "")
        ours = not pid or pid == str(os.getpid())
        self.watchdog_s = int(usec) / 1e6 if usec.isascii() and usec.isdecimal() and ours and self._address else 0.0
        """The unit's WatchdogSec; 0: none."""

    def send(self, *states: str) -> bool:
        """Send states; False when nobody listens or the socket did not take them (never an error, never blocks)."""
        if not self._address:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.setblocking(False)
                sock.sendto("\n".join(states).encode(), self._address)
        except OSError:
            return False
        return True
