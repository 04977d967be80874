"""The system around the cards: OS, CPU, memory, disks, logs, services, processes, and what other AI software is there."""

from __future__ import annotations

import re
from dataclasses import dataclass

from laoka.host.kernel_log import LogLine, read_lines
from laoka.host.sections import Sections
from laoka.host.unread import Maybe, Unread

KIB = 1024


@dataclass(frozen=True)
class Os:
    """/etc/os-release."""

    id: str
    version_id: str
    pretty_name: str


@dataclass(frozen=True)
class Cpu:
    """`flags` are the kernel's names of CPU features."""

    model: str
    sockets: int
    threads: int
    flags: frozenset[str]


@dataclass(frozen=True)
class Memory:
    """/proc/meminfo."""

    total_bytes: int
    available_bytes: int
    swap_total_bytes: int


@dataclass(frozen=True)
class Mount:
    """One line of df; `inodes_free` None where the file system has no fixed number of them."""

    path: str
    source: str
    size_bytes: int
    available_bytes: int
    inodes_free: int | None = None
    inodes: int | None = None


@dataclass(frozen=True)
class Unit:
    """A systemd unit; `loaded` False: there is no such unit."""

    name: str
    loaded: bool
    active: str
    enabled: str
    restarts: int | None


@dataclass(frozen=True)
class Process:
    """Out of /proc/PID/stat; `state` D is an uninterruptible read, Z a zombie."""

    pid: int
    state: str
    parent: int
    resident_bytes: int
    name: str


@dataclass(frozen=True)
class Install:
    """A Python package of interest: `where` is the folder of its environment."""

    name: str
    version: str
    where: str


@dataclass(frozen=True)
class System:
    """Everything of the system that is not driver, kernel or package."""

    os: Maybe[Os]
    glibc_version: Maybe[str]
    pythons: Maybe[tuple[tuple[str, str], ...]]
    compiler: Maybe[str]
    cpu: Maybe[Cpu]
    memory: Maybe[Memory]
    numa_nodes: Maybe[int]
    mounts: Maybe[tuple[Mount, ...]]
    log_size_bytes: Maybe[int]
    journal_size_bytes: Maybe[int]
    journald: Maybe[tuple[tuple[str, str], ...]]
    rsyslog_filters: Maybe[tuple[str, ...]]
    units: Maybe[tuple[Unit, ...]]
    failed_units: Maybe[tuple[str, ...]]
    processes: Maybe[tuple[Process, ...]]
    cuda_folders: Maybe[tuple[str, ...]]
    installs: Maybe[tuple[Install, ...]]
    fans_rpm: Maybe[tuple[tuple[str, int], ...]]
    previous_boot: Maybe[tuple[LogLine, ...]]

    def unit(self, name: str) -> Unit | None:
        """The unit called `name`, None when it was not asked for or is unread."""
        return None if isinstance(self.units, Unread) else next((u for u in self.units if u.name == name), None)


def read_system(given: Sections) -> System:
    """From the sections of the system; each on its own."""
    release, glibc, python = given.output("os-release"), given.output("glibc"), given.output("python")
    compiler, cpu, memory = given.output("compiler"), given.output("cpuinfo"), given.output("meminfo")
    numa, disks, log_size = given.output("numa"), given.output("disks"), given.section("log-size")
    journal, journald, filters = given.output("journal-size"), given.output("journald"), given.output("rsyslog-filters")
    services, failed, processes = given.output("services"), given.output("failed-units"), given.output("processes")
    installs, hwmon = given.output("installs"), given.output("hwmon")
    previous = given.output("journal-previous-boot")
    return System(
        os=release if isinstance(release, Unread) else read_os_release(release),
        glibc_version=glibc if isinstance(glibc, Unread) else _version(glibc, "getconf"),
        pythons=python if isinstance(python, Unread) else tuple(re.findall(r"^(\S+) Python (\S+)$", python, re.MULTILINE)),
        compiler=compiler if isinstance(compiler, Unread) else _version(compiler, "gcc"),
        cpu=cpu if isinstance(cpu, Unread) else read_cpuinfo(cpu),
        memory=memory if isinstance(memory, Unread) else read_meminfo(memory),
        numa_nodes=numa if isinstance(numa, Unread) else len(re.findall(r"/node\d+/cpulist:", numa)),
        mounts=disks if isinstance(disks, Unread) else read_df(disks, given.output("inodes")),
        log_size_bytes=log_size if isinstance(log_size, Unread) else _du(log_size.stdout),
        journal_size_bytes=journal if isinstance(journal, Unread) else _journal_size(journal),
        journald=journald if isinstance(journald, Unread) else _settings(journald),
        rsyslog_filters=filters if isinstance(filters, Unread) else tuple(_lines(filters)),
        units=services if isinstance(services, Unread) else read_units(services),
        failed_units=failed if isinstance(failed, Unread) else tuple(line.split()[0] for line in _lines(failed)),
        processes=processes if isinstance(processes, Unread) else read_processes(processes),
        cuda_folders=installs if isinstance(installs, Unread) else _cuda_folders(installs),
        installs=installs if isinstance(installs, Unread) else _installs(installs),
        fans_rpm=hwmon if isinstance(hwmon, Unread) else _fans(hwmon),
        previous_boot=previous if isinstance(previous, Unread) else read_lines(previous),
    )


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def read_os_release(text: str) -> Maybe[Os]:
    """The names of /etc/os-release."""
    values = {key: value.strip().strip("\"'") for key, value in re.findall(r"^([A-Z_]+)=(.*)$", text, re.MULTILINE)}
    if "ID" not in values:
        return Unread("os-release has no ID")
    return Os(values["ID"], values.get("VERSION_ID", ""), values.get("PRETTY_NAME", ""))


def _version(text: str, program: str) -> Maybe[str]:
    found = re.findall(r"\b\d+\.\d+(?:\.\d+)?\b", text.strip().partition("\n")[0])
    return found[-1] if found else Unread(f"{program} printed no version")


def read_cpuinfo(text: str) -> Maybe[Cpu]:
    """/proc/cpuinfo, whole or as the probe reduces it (each different line once, and the number of threads)."""
    models = re.findall(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.*)$", text, re.MULTILINE)
    if not models or not flags:
        return Unread("cpuinfo names no model or no flags")
    sockets = len(set(re.findall(r"^physical id\s*:\s*(\d+)", text, re.MULTILINE))) or 1
    threads = re.search(r"^threads: (\d+)", text, re.MULTILINE)
    count = int(threads[1]) if threads else len(re.findall(r"^processor\s*:", text, re.MULTILINE))
    return Cpu(models[0].strip(), sockets, count, frozenset(flags[1].split()))


def read_meminfo(text: str) -> Maybe[Memory]:
    """/proc/meminfo."""
    values = {key: int(value) * KIB for key, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    try:
        return Memory(values["MemTotal"], values["MemAvailable"], values["SwapTotal"])
    except KeyError as error:
        return Unread(f"meminfo has no {error.args[0]}")


def read_df(blocks: str, inodes: Maybe[str]) -> tuple[Mount, ...]:
    """`df -kP` and, if it could be read, `df -iP`."""
    line = re.compile(
        r"^(?P<source>.+?)\s+(?P<size>\d+|-)\s+(?P<used>\d+|-)\s+(?P<free>-?\d+|-)\s+\S+\s+(?P<path>/.*)$", re.MULTILINE
    )
    counts: dict[str, tuple[int, int]] = {}
    for found in () if isinstance(inodes, Unread) else line.finditer(inodes):
        if found["size"].isdecimal() and int(found["size"]) and found["free"].isdecimal():
            counts[found["path"]] = (int(found["free"]), int(found["size"]))
    return tuple(
        Mount(
            found["path"],
            found["source"],
            int(found["size"]) * KIB,
            max(int(found["free"]), 0) * KIB,
            *counts.get(found["path"], (None, None)),
        )
        for found in line.finditer(blocks)
        if found["size"].isdecimal() and re.fullmatch(r"-?\d+", found["free"])
    )


def _du(text: str) -> Maybe[int]:
    found = re.search(r"^(\d+)\s+/var/log", text, re.MULTILINE)
    return int(found[1]) * KIB if found else Unread("du gave no size of /var/log before its deadline")


def _journal_size(text: str) -> Maybe[int]:
    found = re.search(r"take up ([\d.]+)([BKMGT])", text)
    units = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    return int(float(found[1]) * units[found[2]]) if found else Unread("journalctl gave no size")


def _settings(text: str) -> tuple[tuple[str, str], ...]:
    """Settings of journald.conf and its drop-ins; the later file wins, as with systemd."""
    return tuple(dict(re.findall(r"^[^:]+:\s*(\w+)=(.*)$", text, re.MULTILINE)).items())


def read_units(text: str) -> tuple[Unit, ...]:
    """`systemctl show -p Id,LoadState,...` of several units, with an empty line between them."""
    units = []
    for block in re.split(r"\n\s*\n", text):
        values = dict(re.findall(r"^(\w+)=(.*)$", block, re.MULTILINE))
        if "Id" in values:
            restarts = values.get("NRestarts", "")
            units.append(
                Unit(
                    values["Id"],
                    values.get("LoadState") not in ("not-found", None),
                    values.get("ActiveState", ""),
                    values.get("UnitFileState", ""),
                    int(restarts) if restarts.isdecimal() else None,
                )
            )
    return tuple(units)


def read_processes(text: str) -> tuple[Process, ...]:
    """The probe's lines: pid, state, parent, resident pages, start, name."""
    pattern = re.compile(r"^(\d+) (\S) (\d+) (-?\d+) \d+ (.*)$", re.MULTILINE)
    return tuple(
        Process(int(pid), state, int(parent), max(int(pages), 0) * 4096, name)
        for pid, state, parent, pages, name in pattern.findall(text)
    )


def _cuda_folders(text: str) -> tuple[str, ...]:
    return tuple(sorted({line for line in _lines(text) if re.fullmatch(r"/\S*/cuda-\d[\d.]*", line)}))


def _installs(text: str) -> tuple[Install, ...]:
    pattern = re.compile(r"^(/.*?)/lib/python3[^/]*/[^/]+/([^/]+?)-([^/-]+)\.dist-info$", re.MULTILINE)
    return tuple(Install(name.replace("_", "-"), version, where) for where, name, version in pattern.findall(text))


def _fans(text: str) -> tuple[tuple[str, int], ...]:
    return tuple((name, int(rpm)) for name, rpm in re.findall(r"(hwmon\d+/fan\d+)_input:(\d+)$", text, re.MULTILINE))
