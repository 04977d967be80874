"""HostReport: all that is known of one host, each fact a value or Unread(reason), from the probe or from files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from laoka.host import iomem, pci, sections
from laoka.host.deployed import Deployed, read_deployed
from laoka.host.driver import Driver, read_driver
from laoka.host.firmware import Firmware, read_firmware
from laoka.host.kernel import Kernel, read_kernel
from laoka.host.kernel_log import Event, RootWindow, read_events
from laoka.host.meta import Platform, ProbeInfo, read_platform, read_probe_info
from laoka.host.nvidia import Nvidia, read_nvidia
from laoka.host.packages import Packages, read_packages
from laoka.host.pci import PciDevice
from laoka.host.sections import Sections
from laoka.host.system import System, read_system
from laoka.host.unread import Maybe, Unread

# Sections that a single file of machine output can stand for (`laoka check --file KIND=FILE`).
FILE_KINDS = frozenset({
    "apt-config", "apt-policy", "apt-preferences", "apt-sources", "bios-menu", "boot-files", "cmdline", "compiler",
    "cpuinfo", "disks", "dkms-failures", "dkms-status", "dmesg", "dmi", "dmidecode", "efi", "failed-units", "glibc",
    "grub", "grub-menu", "grubenv", "headers", "holds", "hwmon", "inodes", "installs", "iomem", "journal-kernel",
    "journal-previous-boot", "journal-size", "journald", "kernels", "log-size", "lshw", "lspci", "meminfo", "modinfo",
    "modprobe", "modules", "numa", "nvidia-libraries", "nvidia-proc", "nvidia-smi", "nvidia-smi-q", "nvidia-smi-xml",
    "nvlink", "os-release", "packages", "pci-attributes", "pci-config", "pci-links", "processes", "python", "rpms",
    "rsyslog-filters", "secure-boot", "services", "uname", "virt",
})  # fmt: skip


@dataclass(frozen=True)
class KernelLog:
    """`boot`: what the kernel said since the boot; `history`: what the journal keeps over boots, with wall times."""

    boot: Maybe[tuple[Event, ...]]
    history: Maybe[tuple[Event, ...]]


@dataclass(frozen=True)
class HostReport:
    """What a host is. Parts are frozen dataclasses; what could not be read is an Unread with its reason.

    `pci_complete`: `pci` lists every device, so that a card which is not in it is not there.
    """

    hostname: Maybe[str]
    probe: ProbeInfo
    platform: Platform
    firmware: Firmware
    pci: Maybe[tuple[PciDevice, ...]]
    pci_complete: bool
    iomem: Maybe[tuple[iomem.MemoryRange, ...]]
    kernel_log: KernelLog
    kernel: Kernel
    driver: Driver
    nvidia: Nvidia
    packages: Packages
    system: System
    deployed: Maybe[Deployed]

    @classmethod
    def from_probe(cls, text: str) -> HostReport:
        """The report of a probe's text. Errors: NotAProbe when it is none."""
        return build(sections.parse(text))

    @classmethod
    def from_files(cls, texts: Mapping[str, str]) -> HostReport:
        """The report of single files of machine output, by section name (`dmesg`, `lspci`, ...)."""
        return build(sections.from_files(texts))

    @property
    def gpus(self) -> Maybe[tuple[PciDevice, ...]]:
        """NVIDIA's display and 3D controllers on the PCI bus, by vendor id and class."""
        return self.pci if isinstance(self.pci, Unread) else tuple(dev for dev in self.pci if dev.is_nvidia_gpu)

    def device(self, address: str) -> PciDevice | None:
        """The PCI device at `address` (0000:01:00.0), if it is known."""
        if isinstance(self.pci, Unread):
            return None
        return next((dev for dev in self.pci if dev.address == address), None)

    @property
    def root_windows(self) -> Maybe[dict[str, tuple[tuple[int, int], ...]]]:
        """Memory windows (start, end) of each PCI root bus: from /proc/iomem, or else from this boot's kernel log."""
        if not isinstance(self.iomem, Unread):
            found = iomem.root_windows(self.iomem)
            return {bus: tuple((window.start, window.end) for window in windows) for bus, windows in found.items()}
        if isinstance(self.kernel_log.boot, Unread):
            return self.iomem
        told: dict[str, list[tuple[int, int]]] = {}
        for event in self.kernel_log.boot:
            if isinstance(event, RootWindow):
                told.setdefault(event.bus, []).append((event.start, event.end))
        return {bus: tuple(windows) for bus, windows in told.items()} or self.iomem

    def unread(self) -> tuple[tuple[str, str], ...]:
        """(field, reason) of all that could not be read, PCI devices left out (they have many optional files)."""
        only_from_files = ("nvidia.rows", "nvidia.links", "nvidia.settings_in_bios")
        return tuple(
            (path, reason) for path, reason in _unread(self, "") if self.probe.source == "files" or path not in only_from_files
        )


def build(given: Sections) -> HostReport:
    """The report of parsed sections. No input makes this fail."""
    info = read_probe_info(given)
    log = read_kernel_log(given, info)
    ranges = given.output("iomem")
    if info.simulated:
        ranges = Unread("/proc/iomem is the sandbox machine's, not the simulated board's")
    uname = given.output("uname")
    devices = read_pci(given, log)
    return HostReport(
        hostname=uname if isinstance(uname, Unread) else _hostname(uname),
        probe=info,
        platform=read_platform(given),
        firmware=read_firmware(given),
        pci=devices,
        pci_complete=_complete(given, devices),
        iomem=ranges if isinstance(ranges, Unread) else iomem.read_iomem(ranges),
        kernel_log=log,
        kernel=read_kernel(given),
        driver=read_driver(given),
        nvidia=read_nvidia(given),
        packages=read_packages(given),
        system=read_system(given),
        deployed=read_deployed(given),
    )


def read_pci(given: Sections, log: KernelLog) -> Maybe[tuple[PciDevice, ...]]:
    """Devices from every source given: sysfs first, then lspci, lshw, and what the kernel printed at boot."""
    attributes = given.section("pci-attributes")
    sysfs: tuple[PciDevice, ...] = ()
    if not isinstance(attributes, Unread):
        links, config = given.section("pci-links"), given.section("pci-config")
        sysfs = pci.read_sysfs(
            attributes.stdout,
            "" if isinstance(links, Unread) else links.stdout,
            "" if isinstance(config, Unread) else config.stdout,
        )
    told: list[tuple[PciDevice, ...]] = []
    for name, read in (("lspci", pci.read_lspci), ("iomem", pci.read_lspci), ("lshw", pci.read_lshw)):
        output = given.output(name)
        if not isinstance(output, Unread):
            told.append(read(output))
    if not isinstance(log.boot, Unread):
        told.append(pci.from_events(log.boot))
    if sysfs:
        # lspci and the log only add to what sysfs lists: a card that is gone must not come back through an old line.
        listed = {device.address for device in sysfs}
        told = [tuple(device for device in source if device.address in listed) for source in told]
    devices = pci.merge(sysfs, *told)
    if devices:
        return devices
    if isinstance(attributes, Unread):
        return Unread("no PCI device in it") if "lspci" in given.by_name or "lshw" in given.by_name else attributes
    return Unread("sysfs lists no PCI device")


def _complete(given: Sections, devices: Maybe[tuple[PciDevice, ...]]) -> bool:
    """True for sysfs, and for an lspci listing that has a host bridge: a few quoted lines have none."""
    if isinstance(devices, Unread):
        return False
    if "pci-attributes" in given.by_name:
        return True
    return "lspci" in given.by_name and any(device.class_code == 0x060000 for device in devices)


def read_kernel_log(given: Sections, info: ProbeInfo) -> KernelLog:
    """dmesg for this boot, or what the journal has of it; the journal for history, or else dmesg."""
    dmesg, journal = given.section("dmesg"), given.section("journal-kernel")
    boot = _events_of(dmesg)
    history = _events_of(journal)
    if isinstance(boot, Unread) and not isinstance(history, Unread):
        boot = _since_boot(history, info)
    return KernelLog(boot, boot if isinstance(history, Unread) else history)


def _events_of(section: Maybe[sections.Section]) -> Maybe[tuple[Event, ...]]:
    if isinstance(section, Unread):
        return section
    if not section.stdout.strip():
        words = [line for line in section.stderr.splitlines() if line.strip()]
        return Unread(words[-1][:200] if words else f"{section.name} is empty")
    # A log that was cut by its deadline still tells what it tells.
    return read_events(section.stdout)


def _since_boot(events: tuple[Event, ...], info: ProbeInfo) -> Maybe[tuple[Event, ...]]:
    """Events of this boot: older boots may have had other firmware settings."""
    if isinstance(info.epoch_s, Unread) or isinstance(info.uptime_s, Unread):
        return Unread("dmesg was not readable and the time of the boot is not known")
    booted_s = info.epoch_s - info.uptime_s - 60
    return tuple(event for event in events if (getattr(event, "time_s", None) or booted_s) >= booted_s)


def _hostname(uname: str) -> Maybe[str]:
    words = uname.split()
    return words[1] if len(words) > 1 else Unread("uname printed no host name")


def _unread(part: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(part, Unread):
        yield path, part.reason
    elif dataclasses.is_dataclass(part) and not isinstance(part, type | PciDevice):
        for item in dataclasses.fields(part):
            yield from _unread(getattr(part, item.name), f"{path}.{item.name}" if path else item.name)
