"""How long ten sandbox hosts take to answer on sshd, against the limit of 10 s: `sudo python -m benchmarks.sandbox_up`."""

from __future__ import annotations

import sys
import time

from laoka.sandbox import hosts
from laoka.sandbox.lab import open_lab

HOSTS, LIMIT_S, ROUNDS = 10, 10.0, 3


def main() -> int:
    """Bring ten hosts up and down three times; the Debian tree and the packages are there before the clock starts."""
    lab = open_lab("ops")
    hosts.down(lab)
    hosts.up(lab, 1, print)
    hosts.down(lab)
    print(f"{'round':<8}{'hosts':<8}{'up, s':<10}{'of the limit':<14}{'down, s':<10}")
    slowest_s = 0.0
    for number in range(1, ROUNDS + 1):
        started = time.monotonic()
        hosts.up(lab, HOSTS, print)
        up_s = time.monotonic() - started
        started = time.monotonic()
        hosts.down(lab)
        down_s = time.monotonic() - started
        slowest_s = max(slowest_s, up_s)
        print(f"{number:<8}{HOSTS:<8}{up_s:<10.1f}{up_s / LIMIT_S:<14.2f}{down_s:<10.1f}")
    print(f"slowest: {slowest_s:.1f} s, {slowest_s / LIMIT_S:.2f} of the limit of {LIMIT_S:g} s")
    return 0 if slowest_s <= LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
