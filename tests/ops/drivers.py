"""What the tests of driver, CUDA and power share: the stand-ins' versions and kernels, a run of deploys/driver.py, an engine."""

from __future__ import annotations

from collections.abc import Mapping

from laoka.sandbox import hosts
from laoka.sandbox.lab import HostFolder
from tests.hosts import INVENTORY, Deployed, pyinfra

OLD, NEW = "580.159.03", "580.173.02"
KERNEL, NEXT = "6.8.0-124-generic", "6.14.0-33-generic"
Pair = tuple[HostFolder, HostFolder]
CHANGE = "Driver | Change the driver, one host at a time"
GATE = f"Driver | Plan and gate: driver {{}} for kernel {KERNEL}"


def arguments(host: HostFolder, *, only: bool = True, data: Mapping[str, object] | None = None) -> list[str]:
    """pyinfra's arguments for deploys/driver.py, the stand-ins apt's only source; on this host alone unless `only` is off."""
    given = {"apt_sources_only": True, "driver": NEW, **(data or {})}
    words = [word for name, value in given.items() for word in ("--data", f"{name}={value}")]
    return [*(("--limit", host.name) if only else ()), *words, INVENTORY, "deploys/driver.py"]


def deploy(host: HostFolder, how: str, *, only: bool = True, data: Mapping[str, object] | None = None) -> Deployed:
    return pyinfra(host.lab, how, *arguments(host, only=only, data=data), deadline_s=300)


def say(host: HostFolder, command: str) -> str:
    return hosts.execute(host, command, deadline_s=60, check=True).stdout.strip()


def loaded(host: HostFolder) -> str:
    return say(host, "sed -n 's/.*Module  \\([0-9.]*\\)  .*/\\1/p' /proc/driver/nvidia/version")


def driver_packages(host: HostFolder) -> str:
    return say(host, "dpkg-query -W '*nvidia*' | grep -v '^[^\t]*\t$'; apt-mark showhold; dpkg -l | grep '^i[^i]'; true")


def boot_id(host: HostFolder) -> str:
    return say(host, "cat /proc/sys/kernel/random/boot_id")


SERVE = """\
[Service]
ExecStart=/usr/bin/python3 -m http.server --bind 127.0.0.1 8000 --directory /srv/engine
ExecStartPost=/bin/sh -c 'echo "$(date +%%s.%%N) started" >> /srv/engine.log'
ExecStopPost=/bin/sh -c 'echo "$(date +%%s.%%N) stopped" >> /srv/engine.log'
[Install]
WantedBy=multi-user.target
"""


def busy(host: HostFolder, requests: int) -> None:
    """What the engine's metrics say."""
    text = f'vllm:num_requests_running{{model=\\"x\\"}} {requests}.0\\nvllm:num_requests_waiting{{model=\\"x\\"}} 0.0\\n'
    say(host, f'mkdir -p /srv/engine && printf "{text}" > /srv/engine/metrics')
