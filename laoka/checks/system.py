"""The system: releases and libraries that the engine needs, room on disk and in memory, and logs that eat the disk."""

from __future__ import annotations

from collections.abc import Iterator

from laoka.checks.facts import bound_in_gib
from laoka.checks.finding import Outcome
from laoka.checks.registry import Wanted, check, fail, info, ok, unread, warn
from laoka.host.report import HostReport
from laoka.host.system import Mount
from laoka.host.unread import Unread

GIB = 1 << 30
# QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4: 20.56 GB; a switch keeps the old revision beside the new one.
MODEL_BYTES = 20_560_000_000
# The 1Cat-vLLM wheels load symbols of glibc 2.38, ReVolta's of 2.34 at most.
GLIBC_BEST, GLIBC_LEAST = (2, 38), (2, 34)
# A container's default; the engine's workers passed their messages through it and hung.
SHM_LEAST_BYTES = 1 * GIB
LOG_FLOOD_BYTES = 5 * GIB


def _mount_of(report: HostReport, path: str) -> Mount | None:
    """The mount that holds `path`: the longest that it begins with."""
    mounts = report.system.mounts
    if isinstance(mounts, Unread):
        return None
    fitting = [m for m in mounts if path == m.path or path.startswith(m.path.rstrip("/") + "/")]
    return max(fitting, key=lambda mount: len(mount.path), default=None)


@check("system.release", source="the engine's wheels and NVIDIA's package names: Ubuntu 24.04 is what they are made for")
def release(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """A distribution that the engine's wheels and the driver packages are known to fit."""
    system = report.system.os
    if isinstance(system, Unread):
        yield unread(system)
    elif (system.id, system.version_id) == ("ubuntu", "24.04"):
        yield ok(system.pretty_name)
    elif (system.id, system.version_id) in (("ubuntu", "22.04"), ("debian", "12"), ("debian", "13")):
        yield info("usable", system.pretty_name, name=system.pretty_name)
    else:
        yield warn("untried", system.pretty_name, name=system.pretty_name)


@check("system.glibc", source="symbols of the wheels: 1Cat-vLLM needs glibc 2.38, ReVolta 2.34")
def glibc(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """The C library can load an engine."""
    text = report.system.glibc_version
    if isinstance(text, Unread):
        yield unread(text)
        return
    version = tuple(int(part) for part in text.split(".")[:2])
    if version >= GLIBC_BEST:
        yield ok(f"glibc {text}")
    elif version >= GLIBC_LEAST:
        yield warn("old", f"glibc {text}", version=text)
    else:
        yield fail("too-old", f"glibc {text}", version=text)


@check("system.python", source="the engine's wheels are for CPython 3.12 only")
def python(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """A Python 3.12 for the engine's environment."""
    found = report.system.pythons
    if isinstance(found, Unread):
        yield unread(found)
        return
    evidence = tuple(f"{path}: {version}" for path, version in found)
    yield ok(*evidence) if any(v.startswith("3.12.") for _, v in found) else warn("none", *(evidence or ("no python3",)))


@check("system.compiler", source="1Cat-vLLM compiles TileLang kernels at run time: a C++ compiler is needed")
def compiler(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """A compiler is there."""
    found = report.system.compiler
    if isinstance(found, Unread):
        if report.probe.source == "probe":
            yield warn("none", f"gcc: {found.reason}")
        else:
            yield unread(found)
    else:
        yield ok(f"gcc {found}")


@check("system.cpu", source="/proc/cpuinfo; X99 CPUs have AVX2")
def cpu(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """AVX2, which PyTorch's CPU code is built for."""
    found = report.system.cpu
    if isinstance(found, Unread):
        yield unread(found)
    elif "avx2" in found.flags:
        yield ok(f"{found.model}, {found.sockets} socket(s), {found.threads} threads, AVX2")
    else:
        yield warn("no-avx2", f"{found.model}: no AVX2")


@check("system.memory", source="the model's 20.56 GB pass through the page cache when it is loaded")
def memory(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Enough memory to load the model."""
    found = report.system.memory
    if isinstance(found, Unread):
        yield unread(found)
        return
    evidence = f"{bound_in_gib(found.total_bytes)} of memory, {bound_in_gib(found.available_bytes)} available"
    if found.total_bytes < MODEL_BYTES:
        yield warn("small", evidence)
    else:
        yield ok(evidence)


@check("system.swap", source="/proc/meminfo")
def swap(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Swap softens a short lack of memory while a model loads."""
    found = report.system.memory
    if isinstance(found, Unread):
        return
    evidence = f"{bound_in_gib(found.swap_total_bytes)} of swap"
    yield ok(evidence) if found.swap_total_bytes else info("none", evidence)


@check("system.shared-memory", source="vLLM issues 14025 and 51513: a small /dev/shm hangs the workers")
def shared_memory(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Shared memory is large enough for the engine's workers."""
    if isinstance(report.system.mounts, Unread):
        yield unread(report.system.mounts)
        return
    mount = next((m for m in report.system.mounts if m.path == "/dev/shm"), None)  # noqa: S108 - the mount itself
    if mount is None:
        yield warn("none", "no /dev/shm is mounted")
    elif mount.size_bytes < SHM_LEAST_BYTES:
        yield warn("small", f"{mount.path}: {bound_in_gib(mount.size_bytes)}")
    else:
        yield ok(f"{mount.path}: {bound_in_gib(mount.size_bytes)}")


@check("system.disk-model", source="the model's checkpoint is 20.56 GB, and a switch keeps two of them")
def disk_model(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Room for the model, twice."""
    if isinstance(report.system.mounts, Unread):
        yield unread(report.system.mounts)
        return
    disks = [m for m in report.system.mounts if m.source.startswith("/dev/") or m.path == "/" or m.source.count("/")]
    if not disks:
        yield unread(Unread("df lists no disk"))
        return
    best = max(disks, key=lambda mount: mount.available_bytes)
    evidence = f"{best.path}: {bound_in_gib(best.available_bytes)} free"
    if best.available_bytes < MODEL_BYTES:
        yield fail("full", evidence)
    elif best.available_bytes < 2 * MODEL_BYTES:
        yield warn("tight", evidence)
    else:
        yield ok(evidence)


@check("system.disk-root", source="df; a flood of AER lines filled one root filesystem to 100 %")
def disk_root(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """The root filesystem has room and inodes."""
    root = _mount_of(report, "/")
    if root is None:
        mounts = report.system.mounts
        yield unread(mounts if isinstance(mounts, Unread) else Unread("df does not list /"))
        return
    free = root.available_bytes / max(root.size_bytes, 1)
    evidence = f"/: {bound_in_gib(root.available_bytes)} of {bound_in_gib(root.size_bytes)} free"
    inodes = root.inodes_free / root.inodes if root.inodes and root.inodes_free is not None else 1.0
    if free < 0.02 or inodes < 0.02:
        yield fail("full", evidence, f"inodes: {inodes:.0%} free")
    elif free < 0.10 or inodes < 0.10:
        yield warn("tight", evidence, f"inodes: {inodes:.0%} free")
    else:
        yield ok(evidence)


@check("system.log-size", source="du of /var/log; one host had 18 GB of AER lines there")
def log_size(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """/var/log is not what fills the disk."""
    size = report.system.log_size_bytes
    if isinstance(size, Unread):
        yield unread(size)
    elif size > LOG_FLOOD_BYTES:
        yield warn("flood", f"/var/log: {bound_in_gib(size)}", size=bound_in_gib(size))
    else:
        yield ok(f"/var/log: {bound_in_gib(size)}")


@check("system.journal-limit", source="journald.conf: SystemMaxUse; its default is a tenth of the disk, up to 4 GB")
def journal_limit(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """The journal has a limit and outlives a reboot, or a lost card leaves no trace."""
    settings, size = report.system.journald, report.system.journal_size_bytes
    if isinstance(settings, Unread):
        return
    values = dict(settings)
    evidence = tuple(f"{name}={values[name]}" for name in ("SystemMaxUse", "Storage") if name in values) or ("defaults",)
    used = () if isinstance(size, Unread) else (f"in use: {bound_in_gib(size)}",)
    if values.get("Storage") in ("volatile", "none"):
        yield warn("volatile", *evidence, *used)
    elif "SystemMaxUse" in values:
        yield ok(*evidence, *used)
    else:
        yield info("default", *evidence, *used)


@check("system.failed-units", source="systemctl --failed")
def failed_units(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Services that failed."""
    failed = report.system.failed_units
    if isinstance(failed, Unread):
        return
    yield warn("some", *failed) if failed else ok("none")


@check("system.desktop", source="systemd; a display server takes a card's memory and can hold the driver")
def desktop(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """No display manager on a machine that serves."""
    running = [u.name for name in ("gdm.service", "lightdm.service") if (u := report.system.unit(name)) and u.active == "active"]
    if running:
        yield info("running", *running)


@check("system.stuck-processes", source="/proc/*/stat, state D: what a wedged driver leaves behind")
def stuck(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Processes that hang in the driver."""
    processes = report.system.processes
    if isinstance(processes, Unread):
        yield unread(processes)
        return
    suspects = ("nvidia", "nvtop", "nvitop", "vllm", "VLLM", "python", "dcgm")
    hanging = [p for p in processes if p.state == "D" and p.name.startswith(suspects)]
    if hanging:
        yield fail("hanging", *(f"{p.pid} {p.name}: state D" for p in hanging))
    else:
        yield ok("no GPU process hangs")
