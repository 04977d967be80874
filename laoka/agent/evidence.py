"""What a host shows at the moment of an incident, kept before anything is touched: one archive per incident, bounded, pruned.

Nothing here asks the driver: no NVML, no nvidia-smi. Every program has a deadline, every part a size; what could not be
read says so. The archive is for root only; it can hold what the engine logged.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

from laoka.agent import act
from laoka.agent.config import Config
from laoka.agent.incidents import Incident, to_json
from laoka.files import write_atomic
from laoka.process import run

PART_MAX_BYTES = 256 * 1024
ARCHIVE_MAX_BYTES = 4 * 1024 * 1024
FOLDER_MAX_BYTES = 64 * 1024 * 1024
KEPT = 40
DEADLINE_S = 25.0
PROGRAM_DEADLINE_S = 6.0
FREE_MIN_BYTES = 64 * 1024 * 1024
DEVICE_FILES = (
    "vendor", "device", "class", "resource", "enable", "current_link_speed", "current_link_width", "max_link_speed",
    "max_link_width", "aer_dev_correctable", "aer_dev_nonfatal", "aer_dev_fatal", "power/runtime_status", "reset_method",
)  # fmt: skip


def programs(config: Config) -> dict[str, list[str]]:
    """What is asked of programs, by the name of its part."""
    found = {
        "kernel-log.txt": ["journalctl", "-k", "-n", "600", "--no-pager", "-o", "short-monotonic"],
        "lspci.txt": ["lspci", "-vvvnn", "-d", "10de:"],
        "watchdog-log.txt": ["journalctl", "-u", "qwen-watchdog", "-n", "200", "--no-pager"],
        "blocked-processes.txt": ["ps", "-eo", "pid,ppid,stat,wchan:32,etimes,comm"],
        "boots.txt": ["journalctl", "--list-boots", "--no-pager"],
    }
    if config.unit:
        found["engine-log.txt"] = ["journalctl", "-u", config.unit, "-n", "300", "--no-pager"]
        found["engine-unit.txt"] = ["systemctl", "show", config.unit]
    return found


def collect(config: Config, incident: Incident, readings: str) -> str:
    """Make the archive of an incident where there is none yet. Returns its path, or why there is none."""
    folder = Path(config.state_dir) / "evidence"
    target = folder / f"{incident.id}.tar.gz"
    if target.exists():
        return str(target)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        space = os.statvfs(folder)
        if space.f_bavail * space.f_frsize < FREE_MIN_BYTES:
            return "not kept: the disk is almost full"
        write_atomic(target, archive(config, incident, readings), 0o600)
        prune(folder)
    except OSError as error:
        return f"not kept: {error.strerror}"
    return str(target)


def archive(config: Config, incident: Incident, readings: str) -> bytes:
    """The archive as bytes, at most ARCHIVE_MAX_BYTES of parts, made within DEADLINE_S."""
    held = io.BytesIO()
    end_s = time.monotonic() + DEADLINE_S
    total = 0
    with tarfile.open(fileobj=held, mode="w:gz", compresslevel=3) as tar:
        for name, data in _parts(config, incident, readings, end_s):
            data = data[-PART_MAX_BYTES:]  # the end of a log is what is about the incident
            if total + len(data) > ARCHIVE_MAX_BYTES:
                break
            total += len(data)
            entry = tarfile.TarInfo(f"{incident.id}/{name}")
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
            tar.addfile(entry, io.BytesIO(data))
    return held.getvalue()


def _parts(config: Config, incident: Incident, readings: str, end_s: float) -> Iterator[tuple[str, bytes]]:
    yield "incident.json", json.dumps(to_json(incident), ensure_ascii=False, indent=1).encode()
    yield "sensors.json", readings.encode()
    devices = Path(config.sysfs_root) / "bus/pci/devices"
    for gpu in config.gpu:
        for bdf in dict.fromkeys((gpu.bdf, act.port_of(config.sysfs_root, gpu.bdf))):
            if bdf:
                yield f"pci/{bdf}.txt", _device(devices / bdf).encode()
    yield "driver.txt", _read(Path("/proc/driver/nvidia/version"))
    yield "memory.txt", _read(Path("/proc/meminfo"))
    for name, argv in programs(config).items():
        left_s = end_s - time.monotonic()
        if left_s <= 0.5:
            yield name, b"not asked: the time was up\n"
            continue
        done = run(argv, deadline_s=min(PROGRAM_DEADLINE_S, left_s), max_output_bytes=4 * PART_MAX_BYTES)
        said = f"{done.stdout}{done.stderr}" + ("(its deadline passed)\n" if done.timed_out else "")
        yield name, said.encode()


def _device(folder: Path) -> str:
    if not folder.exists():
        return "not listed\n"
    lines = [f"{name}: {_read(folder / name).decode(errors='replace').strip()}" for name in DEVICE_FILES]
    driver = folder / "driver"
    lines.append(f"driver: {driver.resolve().name if driver.is_symlink() else 'none'}")
    data = _read(folder / "config")
    lines += [f"config {offset:03x}: {data[offset : offset + 16].hex(' ')}" for offset in range(0, min(len(data), 512), 16)]
    return "\n".join(lines) + "\n"


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(PART_MAX_BYTES)
    except OSError as error:
        return f"({error.strerror})\n".encode()


def prune(folder: Path) -> None:
    """Delete the oldest archives beyond KEPT and beyond FOLDER_MAX_BYTES together."""
    files = sorted(folder.glob("*.tar.gz"), reverse=True)
    total = 0
    for number, path in enumerate(files):
        total += path.stat().st_size
        if number and (number >= KEPT or total > FOLDER_MAX_BYTES):
            path.unlink(missing_ok=True)
