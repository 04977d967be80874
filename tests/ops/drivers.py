"""What the tests of driver, CUDA and power share: the stand-ins' versions and kernels, a run of deploys/driver.py, an engine."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from laoka.sandbox import hosts
from laoka.sandbox.lab import HostFolder
from tests.hosts import INVENTORY, ROOT, Deployed, environment, pyinfra, pyinfra_argv, until

OLD, NEW = "580.159.03", "580.173.02"
KERNEL, NEXT = "6.8.0-124-generic", "6.14.0-33-generic"
RELEASES = ("ubuntu-24.04", "ubuntu-22.04")
"""What the two hosts say that they are, so that their driver comes by Ubuntu's names. All else of them is Debian 12."""
Pair = tuple[HostFolder, HostFolder]
CHANGE = "Driver | Change the driver, one host at a time"
GATE = f"Driver | Plan and gate: driver {{}} for kernel {KERNEL}"


def arguments(host: HostFolder, *, only: bool = True, data: Mapping[str, object] | None = None) -> list[str]:
    """pyinfra's arguments for deploys/driver.py, the stand-ins apt's only source; on this host alone unless `only` is off.

    The inventory's driver_source is taken back: the host's release decides.
    """
    given = {"apt_sources_only": True, "driver": NEW, "driver_source": "", **(data or {})}
    words = [word for name, value in given.items() for word in ("--data", f"{name}={value}")]
    return [*(("--limit", host.name) if only else ()), *words, INVENTORY, "deploys/driver.py"]


def deploy(host: HostFolder, how: str, *, only: bool = True, data: Mapping[str, object] | None = None) -> Deployed:
    return pyinfra(host.lab, how, *arguments(host, only=only, data=data), deadline_s=300)


def say(host: HostFolder, command: str) -> str:
    return hosts.execute(host, command, deadline_s=60, check=True).stdout.strip()


def name_release(host: HostFolder, release: str) -> None:
    """Have a host say that it is a release, such as ubuntu-24.04."""
    name, version = release.split("-")
    say(host, f"rm /etc/os-release; printf 'ID={name}\\nVERSION_ID=\"{version}\"\\n' > /etc/os-release")


def loaded(host: HostFolder) -> str:
    return say(host, "sed -n 's/.*Module  \\([0-9.]*\\)  .*/\\1/p' /proc/driver/nvidia/version")


def driver_packages(host: HostFolder) -> str:
    """Installed ones with their versions (not what a removed one left), what is on hold, and what dpkg did not end."""
    return say(
        host,
        "dpkg-query -W -f '${db:Status-Status} ${Package} ${Version}\\n' '*nvidia*' | sed -n 's/^installed //p'; "
        "apt-mark showhold; dpkg -l | grep '^[hi][^i]'; true",
    )


def boot_id(host: HostFolder) -> str:
    return say(host, "cat /proc/sys/kernel/random/boot_id")


def until_booted_since(host: HostFolder, before: str) -> None:
    """Wait until a host that is on its way down, or away, has come back from that boot."""
    until(lambda: hosts.execute(host, "cat /proc/sys/kernel/random/boot_id").stdout.strip() not in ("", before), 60, "it is back")


SERVE = """\
[Service]
ExecStart=/usr/bin/python3 -m http.server --bind 127.0.0.1 8000 --directory /srv/engine
ExecStartPost=/bin/sh -c 'echo "$(date +%%s.%%N) started" >> /srv/engine.log'
ExecStopPost=/bin/sh -c 'echo "$(date +%%s.%%N) stopped" >> /srv/engine.log'
[Install]
WantedBy=multi-user.target
"""


def serve_metrics(host: HostFolder) -> None:
    """Have an engine run that has metrics and nothing else."""
    busy(host, 0)
    hosts.execute(host, "cat > /etc/systemd/system/qwen-serve.service", stdin=SERVE, check=True)
    say(host, "systemctl daemon-reload && systemctl enable --now qwen-serve 2>&1")


def busy(host: HostFolder, requests: int) -> None:
    """What the engine's metrics say."""
    text = f'vllm:num_requests_running{{model=\\"x\\"}} {requests}.0\\nvllm:num_requests_waiting{{model=\\"x\\"}} 0.0\\n'
    say(host, f'mkdir -p /srv/engine && printf "{text}" > /srv/engine/metrics')


def make_bare(host: HostFolder) -> None:
    """Take everything back that deploys/driver.py did to a host. Kernels stay, and the engine runs."""
    say(
        host,
        "apt-mark unhold $(apt-mark showhold) >/dev/null; systemctl stop qwen-serve; "
        "systemctl disable --now laoka-power nvidia-persistenced >/dev/null 2>&1; "
        "apt-get -qq -y purge '*nvidia*' 'cuda*' >/dev/null 2>&1; rmmod nvidia; "
        "rm -rf /etc/apt/preferences.d/00laoka* /etc/apt/apt.conf.d/5?laoka* /etc/apt/laoka.sources.d /etc/modprobe.d/laoka* "
        "/etc/default/grub.d/zz* /etc/systemd/system/laoka-power.service /etc/systemd/system/qwen-serve*.service.d "
        "/etc/profile.d/laoka-cuda.sh /var/lib/laoka; "
        "systemctl daemon-reload; systemctl start qwen-serve",
    )


# The driver's deploy leaves the stand-ins as apt's only source; these come from what the host had before, with lists of its own.
FROM_DEBIAN = (
    "mkdir -p /srv/lists/partial; for words in update 'install --no-install-recommends {names}'; do "
    "DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o Dir::State::Lists=/srv/lists -o Dir::Etc::SourceList=/etc/apt/sources.list "
    "-o Dir::Etc::SourceParts=/dev/null $words 2>&1 || exit 1; done"
)


def install_from_debian(host: HostFolder, *names: str) -> None:
    done = hosts.execute(host, FROM_DEBIAN.format(names=" ".join(names)), deadline_s=300)
    assert done.status == 0, done.stdout[-2000:]


# ---- runs that are read while they go on, and somebody who has apt's lock


HOLD_LOCK = """\
import fcntl, time
lock = open("/var/lib/dpkg/lock-frontend", "a")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


@contextmanager
def lock_held(host: HostFolder) -> Iterator[subprocess.Popen[str]]:
    """Somebody's program has apt's lock until it is ended, or to the end of the block."""
    command = f"exec python3 -c {shlex.quote(HOLD_LOCK)}"
    # With its terminal the program ends too.
    child = subprocess.Popen([*hosts.ssh_argv(host), "-tt", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline().strip() == "held"
        yield child
    finally:
        child.terminate()
        child.wait()


def read_to(run: subprocess.Popen[str], words: str) -> str:
    """What a run says up to a line with these words."""
    assert run.stderr is not None
    lines = []
    for line in run.stderr:
        lines.append(line)
        if words in line:
            return "".join(lines)
    raise AssertionError(f"it never said {words!r}:\n{''.join(lines)[-3000:]}")


def read_all(run: subprocess.Popen[str]) -> tuple[int, str]:
    assert run.stderr is not None
    rest = run.stderr.read()
    return run.wait(timeout=200), rest


@contextmanager
def under_way(host: HostFolder, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A run of pyinfra with these words, to the end of the block at most, which reads what it says."""
    run = subprocess.Popen(
        pyinfra_argv(*words), cwd=ROOT, env=environment(host.lab), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        yield run
    finally:
        run.kill()
        run.wait()


@contextmanager
def while_requests_end(host: HostFolder, data: Mapping[str, object]) -> Iterator[subprocess.Popen[str]]:
    """A run that waits for a request to end; the block ends it by `no_requests`, and reads what the run says."""
    busy(host, 1)
    with under_way(host, "-y", *arguments(host, data=data)) as run:
        until(lambda: "doing" in say(host, "test -s /var/lib/laoka/driver/stopped && echo doing; true"), 120, "the drain began")
        yield run


def no_requests(host: HostFolder) -> None:
    """The engine's metrics go, which takes no room on its disk."""
    say(host, "rm /srv/engine/metrics")


# ---- runs that are killed


Point = tuple[str, str]
"""Where a run was killed: (operation, step), the step "" where its first command was about to start."""


def write_points(file: Path, points: Sequence[Point]) -> None:
    file.write_text("".join(f"{json.dumps(point)}\n" for point in points))


def read_points(file: Path) -> list[Point]:
    return [(name, step) for name, step in map(json.loads, file.read_text().splitlines())] if file.exists() else []


def killed_at(host: HostFolder, *where: str, data: Mapping[str, object]) -> subprocess.CompletedProcess[str]:
    """Run deploys/driver.py by tests.killed with its words."""
    argv = [sys.executable, "-m", "tests.killed", *where, "-y", *arguments(host, data=data)]
    return subprocess.run(argv, cwd=ROOT, env=environment(host.lab), capture_output=True, text=True, timeout=300, check=False)


def killed(host: HostFolder, file: Path, data: Mapping[str, object], inside: str = CHANGE) -> Point | None:
    """Such a run, killed at the first point that is not in the file; None: it went to its end, well."""
    before = read_points(file)
    done = killed_at(host, str(file), inside, data=data)
    new = read_points(file)[len(before) :]
    assert (done.returncode, len(new)) in ((-9, 1), (0, 0)), done.stderr[-2500:]
    return new[0] if new else None


def killed_everywhere(
    host: HostFolder,
    file: Path,
    data: Mapping[str, object],
    after_each: Callable[[Point], None] = lambda _: None,
    inside: str = CHANGE,
) -> list[Point]:
    """Such runs, each from what the one before left, until one goes to its end. Returns where they were killed, in order."""
    found: list[Point] = []
    while (point := killed(host, file, data, inside)) is not None:
        found.append(point)
        after_each(point)
        assert len(found) < 60, found
    return found
