"""NVIDIA's driver on a host: the module that is loaded, the one on disk for each kernel, DKMS, userspace, module settings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from laoka.host.sections import Sections
from laoka.host.unread import Maybe, Unread

Flavour = Literal["open", "proprietary"]


@dataclass(frozen=True)
class LoadedModule:
    """/proc/driver/nvidia/version."""

    version: str
    flavour: Flavour


@dataclass(frozen=True)
class ModuleOnDisk:
    """`modinfo nvidia` for one installed kernel; `version` None: there is no such module for it."""

    kernel: str
    version: str | None
    flavour: Flavour | None = None
    signed: bool = False
    signer: str = ""


@dataclass(frozen=True)
class DkmsEntry:
    """One line of `dkms status`. `kernel` None: only added, built for no kernel."""

    module: str
    version: str
    kernel: str | None
    state: str
    note: str = ""


@dataclass(frozen=True)
class DkmsFailure:
    """A module build that failed, out of apt's or dkms's own log."""

    kernel: str
    version: str | None


@dataclass(frozen=True)
class ConfigLine:
    """A line of a modprobe.d, modules-load.d or initramfs file."""

    file: str
    text: str


@dataclass(frozen=True)
class Driver:
    """`loaded` None: no nvidia module is loaded. `userspace` versions of libnvidia-ml and libcuda found on disk."""

    loaded: Maybe[LoadedModule | None]
    on_disk: Maybe[tuple[ModuleOnDisk, ...]]
    userspace: Maybe[tuple[str, ...]]
    dkms: Maybe[tuple[DkmsEntry, ...]]
    dkms_failures: Maybe[tuple[DkmsFailure, ...]]
    modules: Maybe[tuple[str, ...]]
    config: Maybe[tuple[ConfigLine, ...]]


def read_driver(sections: Sections) -> Driver:
    """From the sections nvidia-proc, modinfo, nvidia-libraries, dkms-status, dkms-failures, modules and modprobe."""
    modinfo, libraries = sections.output("modinfo"), sections.output("nvidia-libraries")
    dkms, failures = sections.output("dkms-status"), sections.output("dkms-failures")
    config = sections.output("modprobe")
    modules = _modules(sections)
    return Driver(
        loaded=_loaded(sections, modules),
        on_disk=modinfo if isinstance(modinfo, Unread) else read_modinfo(modinfo),
        userspace=libraries if isinstance(libraries, Unread) else _library_versions(libraries),
        dkms=dkms if isinstance(dkms, Unread) else read_dkms_status(dkms),
        dkms_failures=failures if isinstance(failures, Unread) else read_dkms_failures(failures),
        modules=modules,
        config=config if isinstance(config, Unread) else read_config_lines(config),
    )


def read_proc_version(text: str) -> LoadedModule | None:
    """The version line of /proc/driver/nvidia/version in its proprietary and its open wording."""
    found = re.search(r"NVRM version: .*?(Open )?Kernel Module\b.*?\s(\d+\.\d+(?:\.\d+)?)\s", text + " ")
    return LoadedModule(found[2], "open" if found[1] else "proprietary") if found else None


def _loaded(sections: Sections, modules: Maybe[tuple[str, ...]]) -> Maybe[LoadedModule | None]:
    section = sections.section("nvidia-proc")
    if isinstance(section, Unread):
        return section
    found = read_proc_version(section.stdout)
    if found:
        return found
    if "No such file" in section.stderr or (not isinstance(modules, Unread) and "nvidia" not in modules):
        return None
    return Unread("/proc/driver/nvidia/version is not in a known form")


def _modules(sections: Sections) -> Maybe[tuple[str, ...]]:
    section = sections.section("modules")
    if isinstance(section, Unread):
        return section
    if section.status != 0:
        # A kernel without module support has no such file, and so no module either.
        return () if "No such file" in section.stderr else Unread("/proc/modules could not be read")
    return tuple(line.split()[0] for line in section.stdout.splitlines() if line.strip() and not line.startswith("#"))


def read_modinfo(text: str) -> tuple[ModuleOnDisk, ...]:
    """The probe's `[KERNEL]` blocks, each with modinfo's lines or its complaint."""
    found = []
    for block in re.split(r"^\[", text, flags=re.MULTILINE)[1:]:
        kernel, _, body = block.partition("]")
        fields = dict(re.findall(r"^(\w+):\s+(.*)$", body, re.MULTILINE))
        licence = fields.get("license", "")
        flavour: Flavour | None = None
        if licence:
            flavour = "proprietary" if licence.strip() == "NVIDIA" else "open"
        found.append(
            ModuleOnDisk(kernel, fields.get("version"), flavour, bool(fields.get("signer")), fields.get("signer", "").strip())
        )
    return tuple(found)


def _library_versions(text: str) -> tuple[str, ...]:
    versions = re.findall(r"lib(?:nvidia-ml|cuda)\.so\.(\d+\.\d+(?:\.\d+)?)\b", text)
    return tuple(sorted(set(versions)))


_DKMS = re.compile(r"(?P<module>[\w.+-]+)(?:/|, )(?P<version>[^,:]+)(?:, (?P<kernel>[^,]+), [^,:]+)?: (?P<state>\w+)(?P<note>.*)$")


def read_dkms_status(text: str) -> tuple[DkmsEntry, ...]:
    """`dkms status` in its newer (module/version) and older (module, version) form; "added" means not built."""
    return tuple(
        DkmsEntry(found["module"], found["version"].strip(), found["kernel"], found["state"], found["note"].strip())
        for line in text.splitlines()
        if not line.startswith("#") and (found := _DKMS.match(line.strip()))
    )


def read_dkms_failures(text: str) -> tuple[DkmsFailure, ...]:
    """Builds that ended in `Bad return status for module build on kernel: K`, with the version of the log they name."""
    failures: list[DkmsFailure] = []
    for line in text.splitlines():
        if found := re.search(r"Bad return status for module build on kernel: (\S+)", line):
            failures.append(DkmsFailure(found[1], None))
        elif failures and (found := re.search(r"Consult /var/lib/dkms/[\w-]+/([\w.]+)/", line)):
            failures[-1] = DkmsFailure(failures[-1].kernel, found[1])
    return tuple(failures)


def read_config_lines(text: str) -> tuple[ConfigLine, ...]:
    """`FILE:LINE` lines of grep."""
    return tuple(
        ConfigLine(found[1], found[2].strip())
        for line in text.splitlines()
        if (found := re.match(r"(/[^:]+):(.*)$", line)) and found[2].strip()
    )
