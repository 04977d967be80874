"""The simulated V100 of a sandbox host: what sysfs, the kernel log and NVML say about it, and the faults it can have.

Everything lives in one directory per host, which the host sees as /srv/laoka-sandbox:

    simulated        one line saying that this GPU is simulated
    gpu.conf         state that the simulated NVML reads on every call, and writes (power limit, persistence mode)
    faults.conf      the active faults; its lines win over gpu.conf, so clearing a fault brings back what was there
    kmsg             kernel log records in the format of /dev/kmsg; a log: clearing a fault takes nothing out
    sys/bus/pci      what the host has at /sys/bus/pci; as there, devices/ holds links that name the path to a device, but the
                     tree that they lead to (pci0000:00) is beside it, so that one mount shows everything
    proc/driver      what the host can have at /proc/driver; the stand-in kernel module writes nvidia/version there
    kept, removed    originals of files that a fault replaced, and cards that a fault took away

Addresses, sizes, thresholds and log texts are those of real machines (PCI ids database, lshw and lspci of V100 hosts,
nvidia-smi of V100 cards, NVIDIA's Xid and page retirement documents); serial numbers and UUIDs are made up.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from laoka.files import write_atomic
from laoka.sandbox.lab import SandboxError

MARKER = (
    "The GPU of this host is simulated by laoka's sandbox: there is no V100 and no NVIDIA driver here, "
    "and no temperature, power or speed read here says anything about a real card.\n"
)
MIB = 1024 * 1024
GIB = 1024 * MIB
# 56T and 256G are the factory settings of MMIOHBase and MMIO High Size on common X99 boards.
MMIO_HIGH_BASE = 0x380000000000
MMIO_HIGH_BYTES = 256 * GIB
WINDOW_STEP_BYTES = 64 * GIB  # keeps every 32 GiB BAR1 aligned to its size
BRIDGE_WINDOW_BYTES = 48 * GIB  # what the kernel asks for a card with a 32 GiB BAR1
LOW_MEMORY_BASE = 0xC0000000
BAR0_BYTES, BAR3_BYTES = 16 * MIB, 32 * MIB
# Flags as in the kernel's `resource` files.
MEMORY_32 = 0x40200
MEMORY_64_PREFETCHABLE = 0x14220C
WINDOW_64_PREFETCHABLE = 0x102201
WINDOW_32_PREFETCHABLE = 0x2200
# Root ports of a Broadwell-EP processor on X99.
ROOT_PORT_IDS = {1: 0x6F02, 2: 0x6F04, 3: 0x6F08}
ROOT_BUS = "pci0000:00"
CONFIG_BYTES = 4096
UNKNOWN_PROCESS = "pid='<unknown>', name=<unknown>"


@dataclass(frozen=True)
class SimulatedCard:
    """One simulated card. What is None is not known for that card: NVML then answers "not supported".

    `bdf` is its PCI address (0000:03:00.0); its bus number is also the device number of the root port it sits behind.
    """

    bdf: str
    device_id: str
    name: str
    memory_mib: int
    bar1_mib: int
    uuid: str
    serial: str
    subsystem_id: str
    power_default_w: int
    power_min_w: int
    power_max_w: int
    idle_power_w: float = 25.13
    idle_temperature_c: int = 29
    gpu_max_c: int | None = None
    slowdown_c: int | None = None
    shutdown_c: int | None = None
    memory_max_c: int | None = None
    max_clock_mhz: int = 1380
    nvlinks: int | None = None
    vbios: str = "88.00.7E.00.03"
    board_part_number: str | None = None
    inforom_image: str | None = None

    @property
    def bus(self) -> int:
        return int(self.bdf.split(":")[1], 16)

    @property
    def root_port(self) -> str:
        return f"0000:00:{self.bus:02x}.0"


def v100_pcie_32gb(bdf: str = "0000:03:00.0", number: int = 1) -> SimulatedCard:
    """A Tesla V100 PCIe 32GB; `number` makes its UUID and serial number its own. Values: nvidia-smi -q of such a card."""
    return SimulatedCard(
        bdf=bdf,
        device_id="10de:1db6",
        name="Tesla V100-PCIE-32GB",
        memory_mib=32510,
        bar1_mib=32768,
        uuid=f"GPU-00000000-5a1d-4000-8000-{number:012d}",
        serial=f"150000000{number:04d}",
        subsystem_id="10de:124a",
        power_default_w=250,
        power_min_w=100,
        power_max_w=250,
        gpu_max_c=83,
        slowdown_c=87,
        shutdown_c=90,
        memory_max_c=85,
        board_part_number="900-2G500-0110-030",
        inforom_image="G500.0202.00.02",
    )


def v100_sxm2_16gb(bdf: str = "0000:03:00.0", number: int = 1) -> SimulatedCard:
    """A Tesla V100 SXM2 16GB on a PCIe adapter: six NVLinks, all inactive; its thresholds are not known."""
    return SimulatedCard(
        bdf=bdf,
        device_id="10de:1db1",
        name="Tesla V100-SXM2-16GB",
        memory_mib=16130,
        bar1_mib=16384,
        uuid=f"GPU-00000000-5a1d-4000-9000-{number:012d}",
        serial=f"032000000{number:04d}",
        subsystem_id="10de:1212",
        power_default_w=300,
        power_min_w=150,  # general knowledge; the maximum is nvidia-smi's
        power_max_w=300,
        idle_power_w=43.0,
        idle_temperature_c=35,
        max_clock_mhz=1530,
        nvlinks=6,
    )


# ---- gpu.conf -------------------------------------------------------------------------------------------------------


def gpu_conf(cards: Iterable[SimulatedCard], *, driver_loaded: bool = True) -> str:
    """The text of gpu.conf for healthy, idle cards. `driver_loaded` is False where the driver's probe fails for all of them."""
    cards = tuple(cards)
    lines = [
        "# State of this host's simulated GPUs (laoka's sandbox); NVML and nvidia-smi read it on every call.",
        f"count={len(cards)}",
        f"driver_loaded={int(driver_loaded)}",
    ]
    for index, card in enumerate(cards):
        lines += [f"gpu{index}.{key}={'N/A' if value is None else value}" for key, value in _settings(card).items()]
    return "\n".join(lines) + "\n"


def _settings(card: SimulatedCard) -> dict[str, int | str | None]:
    vendor, device = card.device_id.split(":")
    subsystem_vendor, subsystem = card.subsystem_id.split(":")
    return {
        "bdf": card.bdf,
        "name": card.name,
        "uuid": card.uuid,
        "serial": card.serial,
        "pci_device_id": f"0x{device}{vendor}",
        "pci_subsystem_id": f"0x{subsystem}{subsystem_vendor}",
        "vbios": card.vbios,
        "board_part_number": card.board_part_number,
        "inforom_image": card.inforom_image,
        "inforom_oem": "1.1",
        "inforom_ecc": "5.0",
        "memory_mib": card.memory_mib,
        "memory_used_mib": 0,
        "bar1_mib": card.bar1_mib,
        "bar1_used_mib": 2,
        "ecc_mode": 1,
        "ecc_mode_pending": 1,
        "ecc_corrected_volatile": 0,
        "ecc_corrected_aggregate": 0,
        "ecc_uncorrected_volatile": 0,
        "ecc_uncorrected_aggregate": 0,
        "retired_sbe": 0,
        "retired_dbe": 0,
        "retired_pending": 0,
        "retired_first_page": "0x3fdf5e",
        "temperature_c": card.idle_temperature_c,
        "memory_temperature_c": card.idle_temperature_c,
        "gpu_max_c": card.gpu_max_c,
        "slowdown_c": card.slowdown_c,
        "shutdown_c": card.shutdown_c,
        "memory_max_c": card.memory_max_c,
        "power_mw": round(card.idle_power_w * 1000),
        "power_limit_mw": card.power_default_w * 1000,
        "power_default_mw": card.power_default_w * 1000,
        "power_min_mw": card.power_min_w * 1000,
        "power_max_mw": card.power_max_w * 1000,
        "persistence": 0,
        "compute_mode": 0,
        "pstate": 0,
        "replays": 0,
        "recovery_action": 0,
        "clocks_event_reasons": 1,
        "clock_graphics_mhz": 135,
        "clock_sm_mhz": 135,
        "clock_memory_mhz": 877,
        "clock_video_mhz": 555,
        "max_clock_graphics_mhz": card.max_clock_mhz,
        "max_clock_sm_mhz": card.max_clock_mhz,
        "max_clock_memory_mhz": 877,
        "max_clock_video_mhz": 1237,
        "utilization_gpu": 0,
        "utilization_memory": 0,
        "nvlinks": card.nvlinks,
    }


def parse_conf(text: str) -> dict[str, str]:
    """The `key=value` lines of gpu.conf or faults.conf; the last one for a key counts."""
    pairs = (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
    return {key: value for key, equals, value in pairs if equals}


# ---- sysfs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bars:
    """Where a card's BARs and its root port's windows lie; `bar1` is None when there was no room for it."""

    bar0: int
    bar1: int | None
    bar1_bytes: int
    bar3: int
    window: tuple[int, int]
    window_64bit: bool


def place_bars(index: int, bar1_mib: int, *, above_4g: bool) -> Bars:
    """Where firmware and kernel put the BARs of the `index`-th card, with and without Above 4G Decoding.

    Without it BAR3 finds room below 4 GiB and BAR1 (16 or 32 GiB) stays unassigned.
    """
    bar0 = 0xFB000000 - index * 2 * BAR0_BYTES
    if above_4g:
        start = MMIO_HIGH_BASE + index * WINDOW_STEP_BYTES
        bar1_bytes = bar1_mib * MIB
        return Bars(bar0, start, bar1_bytes, start + bar1_bytes, (start, start + BRIDGE_WINDOW_BYTES - 1), True)
    start = 0xE0000000 + index * 2 * BAR3_BYTES
    return Bars(bar0, None, bar1_mib * MIB, start, (start, start + BAR3_BYTES - 1), False)


def card_files(card: SimulatedCard, index: int, *, above_4g: bool) -> dict[str, str | bytes]:
    """The files of the card's directory in /sys/bus/pci/devices, by their path in it."""
    bars = place_bars(index, card.bar1_mib, above_4g=above_4g)
    vendor, device = (int(part, 16) for part in card.device_id.split(":"))
    subsystem_vendor, subsystem = (int(part, 16) for part in card.subsystem_id.split(":"))
    regions = [(bars.bar0, BAR0_BYTES, MEMORY_32), (0, 0, 0), (0, 0, 0), (bars.bar3, BAR3_BYTES, MEMORY_64_PREFETCHABLE)]
    if bars.bar1 is not None:
        regions[1] = (bars.bar1, bars.bar1_bytes, MEMORY_64_PREFETCHABLE)
    # An unassigned 64-bit prefetchable BAR reads 0000000c, 00000000.
    low, high = (bars.bar1 or 0) & 0xFFFFFFFF, (bars.bar1 or 0) >> 32
    base_registers = [bars.bar0, low | 0xC, high, bars.bar3 & 0xFFFFFFFF | 0xC, bars.bar3 >> 32, 0]
    config = _config(vendor, device, 0x030200, 0xA1, header_type=0, capability=0x78, port_type=0)
    struct.pack_into("<6I", config, 0x10, *base_registers)
    struct.pack_into("<HH", config, 0x2C, subsystem_vendor, subsystem)
    return {
        **_common_files(vendor, device, subsystem_vendor, subsystem, 0x030200, 0xA1, card.bdf),
        "config": bytes(config),
        "resource": _resource_text(regions, 13),
    }


def root_port_files(card: SimulatedCard, index: int, *, above_4g: bool) -> dict[str, str | bytes]:
    """The files of the root port that the card sits behind."""
    bars = place_bars(index, card.bar1_mib, above_4g=above_4g)
    device = ROOT_PORT_IDS.get(card.bus, ROOT_PORT_IDS[3])
    config = _config(0x8086, device, 0x060400, 0x01, header_type=1, capability=0x90, port_type=4)
    start, end = bars.window
    kind = 1 if bars.window_64bit else 0
    struct.pack_into("<3B", config, 0x18, 0, card.bus, card.bus)  # primary, secondary and subordinate bus
    struct.pack_into("<HH", config, 0x20, bars.bar0 >> 16 & 0xFFF0, bars.bar0 >> 16 & 0xFFF0)
    struct.pack_into("<HH", config, 0x24, start >> 16 & 0xFFF0 | kind, end >> 16 & 0xFFF0 | kind)
    struct.pack_into("<II", config, 0x28, start >> 32, end >> 32)
    flags = WINDOW_64_PREFETCHABLE if bars.window_64bit else WINDOW_32_PREFETCHABLE
    regions = [(0, 0, 0)] * 13 + [(0, 0, 0), (bars.bar0, BAR0_BYTES, 0x200), (start, end - start + 1, flags)]
    errors = {f"aer_rootport_total_err_{kind}": "0\n" for kind in ("cor", "nonfatal", "fatal")}
    return {
        **_common_files(0x8086, device, 0x8086, 0, 0x060400, 0x01, card.root_port),
        **errors,
        "config": bytes(config),
        "resource": _resource_text(regions, 17),
        "secondary_bus_number": f"{card.bus}\n",
        "subordinate_bus_number": f"{card.bus}\n",
    }


def _config(
    vendor: int, device: int, pci_class: int, revision: int, *, header_type: int, capability: int, port_type: int
) -> bytearray:
    """A configuration space with power management, MSI and PCI Express (Gen3 x16) capabilities."""
    config = bytearray(CONFIG_BYTES)
    struct.pack_into("<HHHH", config, 0x00, vendor, device, 0x0007, 0x0010)
    struct.pack_into("<I", config, 0x08, pci_class << 8 | revision)
    config[0x0E] = header_type
    config[0x34] = 0x60
    config[0x3D] = 1
    struct.pack_into("<BBH", config, 0x60, 0x01, 0x68, 0x0003)
    struct.pack_into("<BBH", config, 0x68, 0x05, capability, 0x0080)
    struct.pack_into("<BBH", config, capability, 0x10, 0x00, port_type << 4 | 2)
    struct.pack_into("<I", config, capability + 0x0C, 16 << 4 | 3)  # LnkCap: x16, 8 GT/s
    struct.pack_into("<HH", config, capability + 0x10, 0, 0x1000 | 16 << 4 | 3)  # LnkSta: the same
    struct.pack_into("<I", config, 0x100, 0x00020001)  # AER
    return config


def _resource_text(regions: Iterable[tuple[int, int, int]], count: int) -> str:
    """A `resource` file: `start end flags`, one line per region, zeros for what does not exist."""
    lines = [(start, start + size - 1 if size else 0, flags) for start, size, flags in regions]
    lines += [(0, 0, 0)] * (count - len(lines))
    return "".join(f"0x{start:016x} 0x{end:016x} 0x{flags:016x}\n" for start, end, flags in lines)


_CORRECTABLE = ("RxErr", "BadTLP", "BadDLLP", "Rollover", "Timeout", "NonFatalErr", "CorrIntErr", "HeaderOF", "TOTAL_ERR_COR")
_UNCORRECTABLE = (
    "Undefined", "DLP", "SDES", "TLP", "FCP", "CmpltTO", "CmpltAbrt", "UnxCmplt", "RxOF", "MalfTLP", "ECRC", "UnsupReq",
    "ACSViol", "UncorrIntErr", "BlockedTLP", "AtomicOpBlocked", "TLPBlockedErr", "PoisonTLPBlocked",
)  # fmt: skip


def _common_files(
    vendor: int, device: int, subsystem_vendor: int, subsystem: int, pci_class: int, revision: int, bdf: str
) -> dict[str, str]:
    modalias = (
        f"pci:v{vendor:08X}d{device:08X}sv{subsystem_vendor:08X}sd{subsystem:08X}"
        f"bc{pci_class >> 16:02X}sc{pci_class >> 8 & 0xFF:02X}i{pci_class & 0xFF:02X}"
    )
    return {
        "vendor": f"0x{vendor:04x}\n",
        "device": f"0x{device:04x}\n",
        "subsystem_vendor": f"0x{subsystem_vendor:04x}\n",
        "subsystem_device": f"0x{subsystem:04x}\n",
        "class": f"0x{pci_class:06x}\n",
        "revision": f"0x{revision:02x}\n",
        "modalias": f"{modalias}\n",
        "uevent": (
            f"PCI_CLASS={pci_class:X}\nPCI_ID={vendor:04X}:{device:04X}\n"
            f"PCI_SUBSYS_ID={subsystem_vendor:04X}:{subsystem:04X}\nPCI_SLOT_NAME={bdf}\nMODALIAS={modalias}\n"
        ),
        "current_link_speed": "8.0 GT/s PCIe\n",
        "current_link_width": "16\n",
        "max_link_speed": "8.0 GT/s PCIe\n",
        "max_link_width": "16\n",
        "aer_dev_correctable": "".join(f"{name} 0\n" for name in _CORRECTABLE),
        "aer_dev_nonfatal": "".join(f"{name} 0\n" for name in (*_UNCORRECTABLE, "TOTAL_ERR_NONFATAL")),
        "aer_dev_fatal": "".join(f"{name} 0\n" for name in (*_UNCORRECTABLE, "TOTAL_ERR_FATAL")),
        "enable": "1\n",
        "irq": "16\n",
        "numa_node": "0\n",
        "d3cold_allowed": "1\n",
        "driver_override": "(null)\n",
        "reset_method": "bus\n",
        "power/control": "on\n",
        "power/runtime_status": "active\n",
        # In sysfs these take a 1 and act; here they keep what was written.
        "remove": "",
        "rescan": "",
        "reset": "",
    }


# ---- kernel log -----------------------------------------------------------------------------------------------------

# Texts of a pre-Ampere card; what stands after `Xid (PCI:…): N, pid=…, name=…, `.
XID_BODIES = {
    13: "Graphics SM Warp Exception on (GPC 0, TPC 1, SM 1): Illegal Instruction Encoding",
    31: "Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f2a_4c000000. "
    "Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
    43: "Ch 00000008",
    45: "Ch 00000008",
    48: "An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at partition 1, subpartition 1.",
    62: "0096(1c54) 00000000 00000000",
    63: "Dynamic Page Retirement: New retired page, reload the driver to activate. (0x00000000003fdf5e)",
    64: "Dynamic Page Retirement: Fatal error, unable to retire page (0x00000000003fdf5e)",
    74: "NVLink: fatal error detected on link 1",
    79: "GPU has fallen off the bus.",
    154: "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
}
# The driver names a process only for what a program did.
APPLICATION_XIDS = {13, 31, 43, 45}


def xid_lines(number: int, card: Mapping[str, str], *, text: str | None = None) -> tuple[str, ...]:
    """What the driver prints for Xid `number`: the card's UUID and serial first, then the Xid, and a line more for 79.

    Arguments: `card` its settings as in gpu.conf (bdf, uuid, serial); `text` takes the place of the known body. A number whose
    text is not known gets one that says so.
    """
    bdf = card["bdf"]
    address = bdf.rsplit(".", 1)[0]
    process = "pid=4242, name=VLLM::EngineCor" if number in APPLICATION_XIDS else UNKNOWN_PROCESS
    body = text or XID_BODIES.get(number, "text of this Xid not known to laoka's sandbox")
    lines = [
        f"NVRM: GPU at PCI:{address}: {card['uuid']}",
        f"NVRM: GPU Board Serial Number: {card['serial']}",
        f"NVRM: Xid (PCI:{address}): {number}, {process}, {body}",
    ]
    if number == 79:
        lines.append(f"NVRM: GPU {bdf}: GPU has fallen off the bus.")
    return tuple(lines)


def mismatch_lines(client_version: str, module_version: str) -> tuple[str, ...]:
    """What the driver prints when a client of another version calls it: one record of five lines."""
    return (
        "NVRM: API mismatch: the client 'nvidia-smi' (pid 4242)\n"
        f"NVRM: has the version {client_version}, but this kernel module has\n"
        f"NVRM: the version {module_version}.  Please make sure that this\n"
        "NVRM: kernel module and all NVIDIA driver components\n"
        "NVRM: have the same version.",
    )


def boot_lines(cards: Iterable[SimulatedCard], *, above_4g: bool) -> tuple[str, ...]:
    """What the kernel (6.6 and newer) prints at boot about the host's memory windows and the cards' BARs."""
    lines = [f"pci_bus 0000:00: root bus resource [mem {LOW_MEMORY_BASE:#x}-0xfbffffff window]"]
    if above_4g:
        lines.append(
            f"pci_bus 0000:00: root bus resource [mem {MMIO_HIGH_BASE:#x}-{MMIO_HIGH_BASE + MMIO_HIGH_BYTES - 1:#x} window]"
        )
    for index, card in enumerate(cards):
        bars = place_bars(index, card.bar1_mib, above_4g=above_4g)
        lines.append(f"pci {card.bdf}: [{card.device_id}] type 00 class 0x030200")
        lines.append(f"pci {card.bdf}: BAR 0 [mem {bars.bar0:#x}-{bars.bar0 + BAR0_BYTES - 1:#x}]")
        if bars.bar1 is None:
            region = f"BAR 1 [mem size {bars.bar1_bytes:#x} 64bit pref]"
            lines += [f"pci {card.bdf}: {region}: can't assign; no space", f"pci {card.bdf}: {region}: failed to assign"]
        else:
            lines.append(f"pci {card.bdf}: BAR 1 [mem {bars.bar1:#x}-{bars.bar1 + bars.bar1_bytes - 1:#x} 64bit pref]")
        lines.append(f"pci {card.bdf}: BAR 3 [mem {bars.bar3:#x}-{bars.bar3 + BAR3_BYTES - 1:#x} 64bit pref]")
    return tuple(lines)


def kmsg_record(sequence: int, time_us: int, text: str, *, level: int = 3) -> str:
    """One record as /dev/kmsg gives it; a line break inside it is written \\x0a, as the kernel does. `level`: 3 error, 6 info."""
    escaped = text.replace("\\", "\\x5c").replace("\n", "\\x0a")
    return f"{level},{sequence},{time_us},-;{escaped}\n"


def next_sequence(log: str) -> int:
    """The sequence number that the next record of `log` gets."""
    heads = [line.split(";", 1)[0].split(",") for line in log.splitlines() if ";" in line]
    numbers = [int(head[1]) for head in heads if len(head) >= 4 and head[1].isdigit()]
    return numbers[-1] + 1 if numbers else 0


# ---- faults ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault that is in effect on a host, with all its parameters."""

    name: str
    bdf: str
    params: tuple[tuple[str, int | str], ...] = ()


@dataclass(frozen=True)
class FaultKind:
    """What a fault does: its parameters with their defaults, the state it lays over gpu.conf, and what the kernel logs."""

    what: str
    params: Mapping[str, int | str]
    settings: Callable[[Mapping[str, int | str]], Mapping[str, int | str]]
    log: Callable[[Mapping[str, int | str], Mapping[str, str]], tuple[str, ...]]
    of_host: bool = False


def _silent(_params: Mapping[str, int | str], _card: Mapping[str, str]) -> tuple[str, ...]:
    return ()


FAULTS: Mapping[str, FaultKind] = {
    "card-gone": FaultKind(
        "the card vanishes from the PCI bus; Xid 79; NVML can't open it: GPU is lost",
        {},
        lambda _: {"lost": 1, "lost_at_open": 1},
        lambda _, card: xid_lines(79, card),
    ),
    "off-bus": FaultKind(
        "the card's link is dead but it is still listed: configuration space all ones; Xid 79; NVML calls say GPU is lost",
        {},
        lambda _: {"lost": 1},
        lambda _, card: xid_lines(79, card),
    ),
    "nvml-hung": FaultKind(
        "every NVML call and nvidia-smi block until the fault is cleared (SIGKILL ends them here; in a real D state it does not)",
        {},
        lambda _: {"hung": 1},
        _silent,
        of_host=True,
    ),
    "hot": FaultKind(
        "HBM above its limit of 85 C, clocks held back by the driver (SW thermal slowdown)",
        {"memory_temperature_c": 92, "temperature_c": 78},
        lambda params: {**params, "clocks_event_reasons": 0x20},
        _silent,
    ),
    "ecc-pending": FaultKind(
        "pages with several single-bit errors wait for retirement until the driver is reloaded; Xid 63",
        {"pages": 1},
        lambda params: {"retired_sbe": params["pages"], "retired_pending": 1},
        lambda _, card: xid_lines(63, card),
    ),
    "driver-mismatch": FaultKind(
        "the loaded kernel module and the library differ in version: NVML does not start (error 18)",
        {"loaded_module": "580.142", "client_version": "580.173.02"},
        lambda params: {"loaded_module": params["loaded_module"]},
        lambda params, _: mismatch_lines(str(params["client_version"]), str(params["loaded_module"])),
        of_host=True,
    ),
    "xid": FaultKind(
        "an Xid in the kernel log; an event, so it is not listed as active and there is nothing to clear",
        {"number": 79, "text": ""},
        lambda _: {},
        lambda params, card: xid_lines(int(params["number"]), card, text=str(params["text"]) or None),
    ),
}


def faults_conf(faults: Iterable[Fault], index_of: Mapping[str, int]) -> str:
    """The text of faults.conf: each fault as a JSON comment, then the lines it lays over gpu.conf.

    Arguments: `index_of` gives the number of the card at a PCI address.
    """
    lines = ["# Active faults of the simulated GPUs; these lines win over gpu.conf."]
    for fault in faults:
        kind = FAULTS[fault.name]
        prefix = "" if kind.of_host else f"gpu{index_of[fault.bdf]}."
        lines.append("#" + json.dumps({"name": fault.name, "bdf": fault.bdf, "params": dict(fault.params)}))
        lines += [f"{prefix}{key}={value}" for key, value in kind.settings(dict(fault.params)).items()]
    return "\n".join(lines) + "\n"


def parse_faults(text: str) -> tuple[Fault, ...]:
    """The faults that a faults.conf lists."""
    records = [json.loads(line[1:]) for line in text.splitlines() if line.startswith("#{")]
    return tuple(Fault(record["name"], record["bdf"], tuple(record["params"].items())) for record in records)


# ---- the directory --------------------------------------------------------------------------------------------------


def create(directory: Path, cards: Iterable[SimulatedCard], *, bar_above_4g: bool = True) -> None:
    """Make `directory` the state of a host with these cards, healthy and without faults.

    An existing one is brought to that state; its log goes on. With `bar_above_4g` False the cards are as on a board with
    Above 4G Decoding off: BAR1 unassigned, 32-bit bridge windows, and a driver that can't load.
    Errors: SandboxError when two cards share a root port or the cards do not fit the board's memory window.
    """
    cards = tuple(cards)
    if len({card.bus for card in cards}) < len(cards):
        raise SandboxError("two simulated cards on one PCI bus: give each a bus of its own, as 0000:02:00.0 and 0000:03:00.0")
    if len(cards) * WINDOW_STEP_BYTES > MMIO_HIGH_BYTES:
        raise SandboxError(f"{len(cards)} simulated cards: the simulated board has room for {MMIO_HIGH_BYTES // WINDOW_STEP_BYTES}")
    pci = directory / "sys/bus/pci"
    for folder in ("devices", "drivers/pcieport", "slots", ROOT_BUS):
        (pci / folder).mkdir(parents=True, exist_ok=True)
    for folder in ("proc/driver", "removed"):
        (directory / folder).mkdir(parents=True, exist_ok=True)
    with _locked(directory):
        write_atomic(directory / "simulated", MARKER)
        for name, content in {"rescan": "", "drivers_probe": "", "drivers_autoprobe": "1\n", "resource_alignment": "\n"}.items():
            write_atomic(pci / name, content)
        shutil.rmtree(directory / "kept", ignore_errors=True)
        devices: dict[str, dict[str, str | bytes]] = {}
        for index, card in enumerate(cards):
            devices[card.root_port] = root_port_files(card, index, above_4g=bar_above_4g)
            devices[card.bdf] = card_files(card, index, above_4g=bar_above_4g)
        for link in [*(pci / "devices").iterdir(), *(pci / "drivers").glob("*/0000:*")]:
            if link.name not in devices or link.parent.name != "devices":
                link.unlink()
        for old in [*(pci / ROOT_BUS).iterdir(), *(directory / "removed").iterdir()]:
            if old.name not in devices or old.parent.name == "removed":
                shutil.rmtree(old)
        for bdf, files in devices.items():
            _put_device(directory, bdf, files)
        for card in cards:
            (pci / "devices" / card.root_port / "driver").symlink_to("../../drivers/pcieport")
            _link_to_driver(directory, card.root_port)
            write_atomic(pci / f"slots/{card.bus}/address", f"{card.bdf.rsplit('.', 1)[0]}\n")
            for name in ("max_bus_speed", "cur_bus_speed"):
                write_atomic(pci / f"slots/{card.bus}/{name}", "8.0 GT/s PCIe\n")
        write_atomic(directory / "gpu.conf", gpu_conf(cards, driver_loaded=bar_above_4g))
        write_atomic(directory / "faults.conf", faults_conf((), {}))
        _log(directory, boot_lines(cards, above_4g=bar_above_4g), level=6)


def apply_fault(directory: Path, fault: str, bdf: str, **params: int | str) -> None:
    """Bring a fault into effect on the card at `bdf` (a fault of the whole host still names the card it starts from).

    Arguments: `params` as FAULTS lists them for this fault. Applying the same fault again changes nothing; with other
    parameters it takes their place. `xid` is an event: it logs each time.
    Errors: SandboxError for a fault, a parameter or a card that does not exist.
    """
    kind = _kind(fault)
    unknown = sorted(set(params) - set(kind.params))
    if unknown:
        raise SandboxError(f"fault {fault} has no parameter {unknown[0]!r}: it takes {', '.join(kind.params) or 'none'}")
    with _locked(directory):
        settings = _read_settings(directory)
        index_of = _indexes(settings)
        card = _card_settings(settings, index_of, bdf)
        new = Fault(fault, bdf, tuple({**kind.params, **params}.items()))
        faults = _read_faults(directory)
        if new in faults:
            return
        # Files first, the record last: when this is killed halfway, applying the fault again completes it.
        if fault == "card-gone":
            _take_away(directory, bdf)
        elif fault == "off-bus":
            _cut_off(directory, bdf)
        elif fault == "driver-mismatch":
            _load_other_module(directory, str(dict(new.params)["loaded_module"]))
        if fault != "xid":
            kept = tuple(old for old in faults if (old.name, old.bdf) != (fault, bdf))
            write_atomic(directory / "faults.conf", faults_conf((*kept, new), index_of))
        _log(directory, kind.log(dict(new.params), card))


def clear_fault(directory: Path, fault: str, bdf: str) -> None:
    """End a fault: files and state are again as they were (what the host changed since stays, and so does the log).

    A fault that is not in effect is no error. Errors: SandboxError for a fault or card that does not exist.
    """
    _kind(fault)
    with _locked(directory):
        index_of = _indexes(_read_settings(directory))
        _card_settings({}, index_of, bdf)
        faults = _read_faults(directory)
        kept = tuple(old for old in faults if (old.name, old.bdf) != (fault, bdf))
        if kept == faults:
            return
        if fault == "card-gone":
            _put_back(directory, bdf)
        elif fault == "off-bus":
            _restore_kept(directory, bdf, _device(directory, bdf))
        elif fault == "driver-mismatch":
            _restore_kept(directory, "driver", directory / "proc/driver/nvidia")
        write_atomic(directory / "faults.conf", faults_conf(kept, index_of))


def active_faults(directory: Path) -> tuple[Fault, ...]:
    """The faults in effect, oldest first."""
    return _read_faults(directory)


def set_value(directory: Path, key: str, value: int | str) -> None:
    """Change one line of gpu.conf (`gpu0.power_limit_mw`, `driver_loaded`), as a test of drift wants it.

    Errors: SandboxError for a key that gpu.conf does not have.
    """
    with _locked(directory):
        if key not in _read_settings(directory):
            raise SandboxError(f"gpu.conf of the simulated card has no {key!r}")
        lines = (directory / "gpu.conf").read_text().splitlines()
        kept = [line for line in lines if not line.startswith(f"{key}=")]
        write_atomic(directory / "gpu.conf", "\n".join([*kept, f"{key}={value}"]) + "\n")


def _kind(fault: str) -> FaultKind:
    if fault not in FAULTS:
        raise SandboxError(f"no fault of the simulated card is called {fault!r}: take one of {', '.join(FAULTS)}")
    return FAULTS[fault]


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock; the simulated NVML takes the same one before it writes."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise SandboxError(f"{directory} holds no simulated card: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read_settings(directory: Path) -> dict[str, str]:
    try:
        return parse_conf((directory / "gpu.conf").read_text())
    except OSError as error:
        raise SandboxError(f"{directory} holds no simulated card: gpu.conf: {error.strerror}") from None


def _read_faults(directory: Path) -> tuple[Fault, ...]:
    path = directory / "faults.conf"
    return parse_faults(path.read_text()) if path.exists() else ()


def _indexes(settings: Mapping[str, str]) -> dict[str, int]:
    return {settings[f"gpu{index}.bdf"]: index for index in range(int(settings["count"]))}


def _card_settings(settings: Mapping[str, str], index_of: Mapping[str, int], bdf: str) -> dict[str, str]:
    if bdf not in index_of:
        raise SandboxError(f"no simulated card at {bdf!r}: this host has {', '.join(index_of) or 'none'}")
    prefix = f"gpu{index_of[bdf]}."
    return {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}


def _log(directory: Path, lines: Iterable[str], *, level: int = 3) -> None:
    path = directory / "kmsg"
    sequence = next_sequence(path.read_text() if path.exists() else "")
    time_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    records = [kmsg_record(sequence + n, time_us + n, line, level=level) for n, line in enumerate(lines)]
    with path.open("a") as stream:  # appended, not replaced: readers hold it open, as they do /dev/kmsg
        stream.write("".join(records))


def _place(bdf: str) -> str:
    """Where a device is in sys/bus/pci: a root port on the root bus, a card below its root port."""
    bus = bdf.split(":")[1]
    return f"{ROOT_BUS}/{bdf}" if bus == "00" else f"{ROOT_BUS}/0000:00:{bus}.0/{bdf}"


def _put_device(directory: Path, bdf: str, files: Mapping[str, str | bytes]) -> None:
    """Put a complete device directory in place by rename, and its link."""
    pci = directory / "sys/bus/pci"
    staging, target, old = directory / f"removed/.new-{bdf}", pci / _place(bdf), directory / f"removed/.old-{bdf}"
    for name, content in files.items():
        path = staging / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    if target.exists():
        target.rename(old)
    staging.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    _link_device(directory, bdf)


def _link_device(directory: Path, bdf: str) -> None:
    link = directory / "sys/bus/pci/devices" / bdf
    if not link.is_symlink():
        link.symlink_to(f"../{_place(bdf)}")


def _device(directory: Path, bdf: str) -> Path:
    """The card's directory, wherever it is now."""
    removed = directory / "removed" / bdf
    return removed if removed.exists() else directory / "sys/bus/pci" / _place(bdf)


def _link_to_driver(directory: Path, bdf: str) -> None:
    """Give the driver's directory its link to the device, when a driver is bound."""
    driver = directory / "sys/bus/pci/devices" / bdf / "driver"
    if driver.is_symlink():
        link = directory / "sys/bus/pci/drivers" / driver.readlink().name / bdf
        if link.parent.is_dir() and not link.is_symlink():
            link.symlink_to(f"../../devices/{bdf}")


def _take_away(directory: Path, bdf: str) -> None:
    pci = directory / "sys/bus/pci"
    (pci / "devices" / bdf).unlink(missing_ok=True)
    if (pci / _place(bdf)).exists():
        (pci / _place(bdf)).rename(directory / "removed" / bdf)
    for driver in (pci / "drivers").iterdir():
        (driver / bdf).unlink(missing_ok=True)


def _put_back(directory: Path, bdf: str) -> None:
    removed = directory / "removed" / bdf
    if removed.exists():
        removed.rename(directory / "sys/bus/pci" / _place(bdf))
    _link_device(directory, bdf)
    _link_to_driver(directory, bdf)


def _cut_off(directory: Path, bdf: str) -> None:
    """What the kernel shows of a dead link: every register reads all ones; width 63 and an unknown speed follow from that."""
    device = _device(directory, bdf)
    ones = b"\xff" * (device / "config").stat().st_size
    dead: dict[str, str | bytes] = {"config": ones, "current_link_speed": "Unknown\n", "current_link_width": "63\n"}
    _replace_kept(directory, bdf, device, dead)


def _load_other_module(directory: Path, version: str) -> None:
    """Change the version that /proc/driver/nvidia/version gives, where a stand-in module is installed."""
    folder = directory / "proc/driver/nvidia"
    if (folder / "version").exists():
        words = [version if word.startswith("580.") else word for word in (folder / "version").read_text().split(" ")]
        _replace_kept(directory, "driver", folder, {"version": " ".join(words)})


def _replace_kept(directory: Path, what: str, folder: Path, files: Mapping[str, str | bytes]) -> None:
    kept = directory / "kept" / what
    for name, content in files.items():
        if not (kept / name).exists():
            write_atomic(kept / name, (folder / name).read_bytes())
        write_atomic(folder / name, content)


def _restore_kept(directory: Path, what: str, folder: Path) -> None:
    kept = directory / "kept" / what
    if kept.exists():
        for path in kept.iterdir():
            write_atomic(folder / path.name, path.read_bytes())
        shutil.rmtree(kept)
