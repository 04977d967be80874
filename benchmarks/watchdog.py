"""What the watchdog costs and how fast it is, against its limits: `sudo python -m benchmarks.watchdog`.

The real daemon as a process, with all its sensors: NVML is the host's own where there is one, else the simulated card's; systemd
answers where it runs, else a stand-in; the model server is a stand-in. Its alerts go to an endpoint on the loopback. As root it
follows the real /dev/kmsg, and the marked records of the latency measurement stay in the host's kernel log: not for a host on which
a watchdog that allows drills is running.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from laoka.agent import drill
from laoka.sandbox import packages
from tests.agent_host import BDF, Endpoint, Host, free_port, until

ENGINE = Path(__file__).resolve().parents[1] / "tests" / "unit" / "serving" / "fake_engine.py"
SAMPLES = 40
ALERT_LIMIT_S, IDLE_LIMIT_PERCENT, RSS_LIMIT_MIB = 0.5, 0.3, 60.0
IDLE_S, FLOOD_S = 120.0, 20.0
FLOOD_LINES_PER_S = 10_000
FLOOD_CPU_LIMIT_PERCENT = 20.0
FLOOD_BYTES = 3 * 1000**3
AHEAD_BYTES = 128 * 1024 * 1024
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
WATCHDOG_S = 30.0
"""What the unit has (templates/watchdog)."""
SETTLED_S = 15.0
"""A start reads the catalogue, loads the alert services and asks every sensor for the first time: not what idling costs."""

# One corrected error as a board with a bad riser logs it, four records (kernel's aer.c).
AER = (
    "pcieport 0000:00:03.0: AER: Corrected error received: 0000:00:03.0",
    "pcieport 0000:00:03.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)",
    "pcieport 0000:00:03.0:   device [8086:6f08] error status/mask=00000001/00002000",
    "pcieport 0000:00:03.0:    [ 0] RxErr                  (First)",
)


def main() -> int:
    """Measure; exit status 1 when a limit is passed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watchdog", description=__doc__)
    parser.add_argument("--idle-s", type=float, default=IDLE_S, help="seconds of idling to measure")
    parser.add_argument("--flood-bytes", type=int, default=FLOOD_BYTES, help="size of the flood that is read through")
    options = parser.parse_args()
    rows: list[tuple[str, float, float | None]] = []
    with host_with_daemon() as (host, real):
        print(f"kernel log: {real}; NVML: {'of this host' if real_nvml() else 'simulated'}; systemd: {systemd()}", file=sys.stderr)
        rows += idle(host, options.idle_s)
        rows += latencies(host)
    with host_with_daemon(kernel_log="") as (host, _):
        rows += flood(host)
        rows += great_flood(host, options.flood_bytes)
    print(f"{'what':<58}{'measured':>10}{'limit':>8}{'of it':>8}")
    for name, value, limit in rows:
        print(f"{name:<58}{value:>10.3f}" + ("" if limit is None else f"{limit:>8g}{value / limit:>8.2f}"))
    return 0 if all(limit is None or value <= limit for _, value, limit in rows) else 1


@contextmanager
def host_with_daemon(kernel_log: str | None = None) -> Iterator[tuple[Host, str]]:
    """A daemon with all sensors; `kernel_log` empty: follows a file, None: /dev/kmsg where that can be read."""
    real = "/dev/kmsg" if kernel_log is None and os.access("/dev/kmsg", os.W_OK) else ""
    endpoint = Endpoint()
    # On a disk: gigabytes. What the unit writes to /run is in memory here too.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        folder = Path(name)
        host = Host(folder, endpoint, Path(memory))
        environment = stand_ins(folder)
        log = {"kernel_log": f'"{real}"'} if real else {}
        port = free_port()
        (folder / "engine").write_text("ok\n")
        model = subprocess.Popen([sys.executable, str(ENGINE), str(port), str(folder / "engine")], stdout=subprocess.DEVNULL)
        host.configure(
            **log, drill="true", nvml='"required"', unit='"qwen-serve.service"', burst_quiet_s="0.05", recovered_after_s="0.05",
            pci_interval_s="1.0", alerts_per_hour="10000", metrics_address=f'"127.0.0.1:{free_port()}"', recovery='"observe"',
            completion_url=f'"http://127.0.0.1:{port}"', completion_model='"m"', engine_stalled_after_s="1e6", disk_free_min_mb="1",
        )  # fmt: skip
        try:
            host.start(None, WATCHDOG_USEC=str(int(WATCHDOG_S * 1e6)), **environment)
            if not until(lambda: looked(host, "nvml"), 60):
                raise SystemExit(f"NVML was not asked, so nothing that follows would be true:\n{host.log.read_text()[-2000:]}")
            yield host, real or "a file"
        finally:
            host.kill()
            model.kill()
            model.wait()
            host.socket.close()
            endpoint.server.shutdown()
            endpoint.server.server_close()


def looked(host: Host, sensor: str) -> bool:
    """Whether a sensor could look, by the daemon's state."""
    return any(one["name"] == sensor and one["verdict"] in ("ok", "bad") for one in host.state.get("sensors", ()))


def real_nvml() -> bool:
    """Whether the host has NVIDIA's own library and a card."""
    return Path("/dev/nvidiactl").exists()


def systemd() -> str:
    """What answers for systemd."""
    return "of this host" if Path("/run/systemd/system").exists() else "stand-in"


def stand_ins(folder: Path) -> dict[str, str]:
    """Environment in which what the host lacks is there."""
    environment = {}
    if not real_nvml():
        (folder / "lib").mkdir()
        packages.compile_nvml(folder / "lib" / "libnvidia-ml.so.1", "580.173.02")
        environment = {"LD_LIBRARY_PATH": str(folder / "lib"), "LAOKA_SANDBOX_GPU_CONF": str(folder / "gpu" / "gpu.conf")}
    if systemd() == "stand-in":
        (folder / "bin").mkdir()
        said = "LoadState=loaded\\nActiveState=active\\nSubState=running\\nResult=success\\nNRestarts=0\\n"
        (folder / "bin" / "systemctl").write_text(f"#!/bin/sh\nprintf '{said}'\n")
        (folder / "bin" / "systemctl").chmod(0o755)
        environment["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"
    return environment


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, of its children and of theirs that ended, user and system."""
    ticks = 0
    for each in (pid, *children(pid)):
        words = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(int(word) for word in words[11:15])
    return ticks / TICKS_PER_S


def memory_mib(pid: int, field: str) -> float:
    """A field of /proc/PID/status in MiB: VmRSS now, VmHWM the most so far."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) / 1024


def children(pid: int) -> list[int]:
    """The processes that it started and that run."""
    return [int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()]


def pid_of(host: Host) -> int:
    assert host.child is not None
    return host.child.pid


def idle(host: Host, seconds: float) -> list[tuple[str, float, float | None]]:
    """CPU share and memory when nothing happens."""
    time.sleep(SETTLED_S)
    before_s, started_s = cpu_s(pid_of(host)), time.monotonic()
    time.sleep(seconds)
    share = (cpu_s(pid_of(host)) - before_s) / (time.monotonic() - started_s) * 100
    processes = (pid_of(host), *children(pid_of(host)))
    return [
        (f"idle for {seconds:g} s, children included: % of a core", share, IDLE_LIMIT_PERCENT),
        ("resident memory, with the one that asks NVML, MiB", sum(memory_mib(pid, "VmRSS") for pid in processes), RSS_LIMIT_MIB),
    ]


def latencies(host: Host) -> list[tuple[str, float, float | None]]:
    """Seconds from the write of a kernel log record until its alert has arrived at the endpoint."""
    log = str(host.gpu / "kmsg") if "kernel_log" not in configured(host) else configured(host)["kernel_log"].strip('"')
    took = []
    spread = random.Random(7)  # noqa: S311 - so that samples do not march in step with anything
    for _ in range(SAMPLES):
        time.sleep(1.2 + spread.random())
        known = len(host.endpoint.got)
        written_s = time.monotonic()
        drill.write_record(log, drill.xid79_text(BDF))
        if not until(lambda known=known: len(host.endpoint.got) > known, 20):  # type: ignore[misc]
            raise SystemExit(f"no alert came:\n{host.log.read_text()[-2000:]}")
        took.append(host.endpoint.got[known]["received_s"] - written_s)
    took.sort()
    p99_s = statistics.quantiles(took, n=100, method="inclusive")[98]
    return [
        (f"kernel line to alert request, p50 of {SAMPLES}, s", statistics.median(took), ALERT_LIMIT_S),
        (f"kernel line to alert request, p99 of {SAMPLES}, s", p99_s, ALERT_LIMIT_S),
    ]


def configured(host: Host) -> dict[str, str]:
    """The settings' keys as they stand in the file."""
    return dict(line.split(" = ", 1) for line in host.config.read_text().splitlines() if " = " in line)


def records(first: int, count: int) -> bytes:
    """Records of a flood of corrected errors, as /dev/kmsg words them."""
    lines = (f"3,{number},{number * 100},-;{AER[number % 4]}\n" for number in range(first, first + count))
    return "".join(lines).encode()


def flood(host: Host) -> list[tuple[str, float, float | None]]:
    """CPU share while 10,000 lines come every second, and how fast a real fault is told in the middle of it."""
    log, number = host.gpu / "kmsg", 1000
    time.sleep(SETTLED_S)
    before_s, started_s = cpu_s(pid_of(host)), time.monotonic()
    known = len(host.endpoint.got)
    written_s = told_s = 0.0
    with log.open("ab", buffering=0) as stream:
        for turn in range(int(FLOOD_S * 10)):
            stream.write(records(number, FLOOD_LINES_PER_S // 10))
            number += FLOOD_LINES_PER_S // 10
            if turn == int(FLOOD_S * 5):
                stream.write(f"11,{number},{number * 100},-;{drill.xid79_text(BDF)}\n".encode())
                written_s, number = time.monotonic(), number + 1
            time.sleep(max(0.0, started_s + (turn + 1) * 0.1 - time.monotonic()))
    share = (cpu_s(pid_of(host)) - before_s) / (time.monotonic() - started_s) * 100

    def of_xid() -> list[float]:
        return [alert["received_s"] for alert in host.endpoint.got[known:] if "Xid 79" in alert["title"]]

    told_s = until(of_xid, 20)[0]
    return [
        (f"{FLOOD_LINES_PER_S} kernel lines a second for {FLOOD_S:g} s: % of a core", share, FLOOD_CPU_LIMIT_PERCENT),
        ("an Xid in the middle of it to alert request, s (file polled)", told_s - written_s, None),
    ]


def great_flood(host: Host, size_bytes: int) -> list[tuple[str, float, float | None]]:
    """Gigabytes of it as fast as they are read; what was read is given back to the disk at once."""
    log, pid = host.gpu / "kmsg", pid_of(host)
    punch = shutil.which("fallocate") or "fallocate"
    block = records(10_000_000, 100_000)
    before_s, started_s = cpu_s(pid), time.monotonic()
    written = log.stat().st_size
    end = written + size_bytes
    with log.open("ab", buffering=0) as stream:
        while read_to(pid, log) < end:
            if written < end and written - read_to(pid, log) < AHEAD_BYTES:
                stream.write(block)
                written += len(block)
                length = read_to(pid, log) // 4096 * 4096
                subprocess.run([punch, "-p", "-o", "0", "-l", str(max(4096, length)), str(log)], check=True, timeout=60)
            else:
                time.sleep(0.02)
    seconds = time.monotonic() - started_s
    size = f"{size_bytes / 1000**3:g} GB of corrected AER errors"
    return [
        (f"{size}: read in, s", seconds, None),
        (f"{size}: CPU, s", cpu_s(pid) - before_s, None),
        (f"{size}: most resident memory, MiB", memory_mib(pid, "VmHWM"), RSS_LIMIT_MIB),
    ]


def read_to(pid: int, log: Path) -> int:
    """How far the daemon has read a file, by its descriptor's position."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if entry.readlink() == log:
                return int(Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text().split()[1])
        except OSError:
            continue
    return 0


if __name__ == "__main__":
    sys.exit(main())
