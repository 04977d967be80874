"""Who ran the probe, when and where: the probe itself, and bare metal, VM, container, WSL2 or Windows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from laoka.host.sections import Sections
from laoka.host.unread import Maybe, Unread

Kind = Literal["bare", "vm", "container", "wsl", "windows"]


@dataclass(frozen=True)
class ProbeInfo:
    """How the facts were read. `epoch_s` is the host's clock then; `simulated`: a sandbox's card, not a real one."""

    source: Literal["probe", "files"]
    complete: bool
    is_root: Maybe[bool]
    epoch_s: Maybe[int]
    uptime_s: Maybe[float]
    duration_ms: int | None
    simulated: bool


@dataclass(frozen=True)
class Platform:
    """What the system runs in. `technology`: systemd-detect-virt's word (kvm, docker, ...), None on bare metal."""

    kind: Maybe[Kind]
    technology: str | None = None


def read_probe_info(sections: Sections) -> ProbeInfo:
    """From the probe's own section; single files have none."""
    output = sections.output("probe")
    if isinstance(output, Unread):
        source: Literal["probe", "files"] = "probe" if "probe" in {**sections.by_name, **sections.skipped} else "files"
        return ProbeInfo(source, sections.complete, output, output, output, sections.duration_ms, False)
    values = dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
    uid, epoch, uptime = values.get("uid", ""), values.get("epoch_s", ""), values.get("uptime_s", "")
    return ProbeInfo(
        "probe",
        sections.complete,
        int(uid) == 0 if uid.isdecimal() else Unread("the probe printed no user id"),
        int(epoch) if epoch.isdecimal() else Unread("the probe printed no time"),
        float(uptime) if re.fullmatch(r"\d+(\.\d+)?", uptime) else Unread("the probe printed no uptime"),
        sections.duration_ms,
        values.get("simulated") == "1",
    )


_HYPERVISORS = {
    "kvm": r"KVM|QEMU|Firecracker|Amazon EC2",
    "vmware": r"VMware",
    "oracle": r"VirtualBox",
    "microsoft": r"Microsoft Corporation.*Virtual Machine|Hyper-V",
    "xen": r"\bXen\b",
}


def read_platform(sections: Sections) -> Platform:
    """From uname, systemd-detect-virt and DMI; Unread when none of them says anything."""
    uname = sections.output("uname")
    virt = sections.output("virt")
    words = "" if isinstance(virt, Unread) else virt
    kernel = "" if isinstance(uname, Unread) else uname
    values = [tuple(line.split("=", 1)) for line in words.splitlines() if "=" in line]
    if re.search(r"microsoft-standard|WSL2?\b|[Mm]icrosoft", kernel) or ("dxg", "1") in values:
        return Platform("wsl", "wsl")
    if re.search(r"MINGW|MSYS|CYGWIN|Windows", kernel):
        return Platform("windows", "windows")
    containers = [value for key, value in values if key == "container" and value != "none"]
    if containers or ("dockerenv", "1") in values or ("containerenv", "1") in values:
        technology = containers[0] if containers else "docker" if ("dockerenv", "1") in values else "podman"
        return Platform("wsl" if technology == "wsl" else "container", technology)
    machines = [value for key, value in values if key == "vm"]
    detected = next((value for value in machines if re.fullmatch(r"[a-z0-9-]+", value)), None)
    if detected and detected != "none":
        return Platform("vm", detected)
    dmi = sections.output("dmi")
    for name, pattern in _HYPERVISORS.items():
        if not isinstance(dmi, Unread) and re.search(pattern, dmi):
            return Platform("vm", name)
    cpu = sections.output("cpuinfo")
    if not isinstance(cpu, Unread) and re.search(r"^flags\s*:.*\bhypervisor\b", cpu, re.MULTILINE):
        return Platform("vm", "unknown")
    if detected == "none" or not isinstance(cpu, Unread):
        return Platform("bare")
    return Platform(Unread("nothing given says what this system runs in"))
