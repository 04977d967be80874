"""What `laoka check` costs, the probe on an idle sandbox host and 100 captures: `sudo python -m benchmarks.check`."""

from __future__ import annotations

import re
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from laoka.cli.capture import bundle_of
from laoka.cli.check import check_many
from laoka.host import collect, probe
from laoka.host.sections import parse
from laoka.sandbox import hosts
from laoka.sandbox.lab import HostFolder, open_lab

CPU_LIMIT_S, TRIPS_LIMIT, CAPTURES, CAPTURES_LIMIT_S, ROUNDS = 1.0, 1, 100, 5.0, 3


def main() -> int:
    """Measure all three three times; the worst round counts. Exit status 1 when one is over its limit."""
    lab = open_lab("bench")
    hosts.down(lab)
    try:
        host = hosts.up(lab, 1, print)[0]
        rounds = [measure(host) for _ in range(ROUNDS)]
    finally:
        hosts.down(lab)
    limits = {"probe, CPU s": CPU_LIMIT_S, "probe, round trips": TRIPS_LIMIT, f"{CAPTURES} captures, s": CAPTURES_LIMIT_S}
    print(f"{'what':<22}{'worst':<10}{'limit':<10}{'of the limit':<14}")
    worst = [max(values) for values in zip(*rounds, strict=True)]
    for (name, limit), value in zip(limits.items(), worst, strict=True):
        print(f"{name:<22}{value:<10.2f}{limit:<10g}{value / limit:<14.2f}")
    return 0 if all(value <= limit for value, limit in zip(worst, limits.values(), strict=True)) else 1


def measure(host: HostFolder) -> tuple[float, float, float]:
    """CPU seconds of the probe on the host, ssh sessions it took, seconds for 100 captures of that host."""
    target = hosts.ssh_target(host)
    cpu_s = probe_cpu_s(host)
    before = sessions(host)
    text = collect.text_over_ssh(target)
    trips = sessions(host) - before - 1  # the question itself is a session
    data, _ = bundle_of(parse(text))
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.tar.gz" for number in range(CAPTURES)]
        for file in files:
            file.write_bytes(data)
        started = time.monotonic()
        results = check_many([(file.name, partial(collect.from_file, file)) for file in files])
        seconds = time.monotonic() - started
    assert all(result.findings for result in results)
    return cpu_s, trips, seconds


def probe_cpu_s(host: HostFolder) -> float:
    """CPU seconds that the probe and its programs take on the host."""
    done = hosts.execute(host, "sh -s >/dev/null; times", stdin=probe.script(), check=True)
    minutes = re.findall(r"(\d+)m([\d.]+)s", done.stdout.splitlines()[-1])
    return sum(int(whole) * 60 + float(rest) for whole, rest in minutes)


def sessions(host: HostFolder) -> int:
    """How many ssh sessions the host has accepted since it booted."""
    return int(hosts.execute(host, "journalctl -b -u ssh --no-pager -o cat | grep -c '^Accepted publickey'", check=True).stdout)


if __name__ == "__main__":
    sys.exit(main())
