"""nvidia-smi, simulated by laoka's sandbox: the real tool's shapes and words over the simulated libnvidia-ml.so.1.

It knows what NVML answers and nothing else, as the real one: a hung NVML hangs it, a lost card is lost for it. Standard
library only, Python 3.10 or newer. Shapes are those of driver 580, and of a V100 where the two differ; wording of errors
follows real output. Exit codes are NVML's own: 2 bad argument, 4 no permission, 6 not found, 9 driver not loaded,
12 no library, 15 GPU is lost (its handle can't be had; the other cards are printed all the same), 18 version mismatch.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn
from xml.sax.saxutils import escape

MARKER = "simulated by laoka's sandbox"
NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, NO_DRIVER, NO_LIBRARY, LOST, MISMATCH = 3, 4, 6, 9, 12, 15, 18
MIB = 1024 * 1024
MEMORY_TEMPERATURE, RETIRED_SBE, RETIRED_DBE, RECOVERY_ACTION = 82, 29, 30, 230
GRAPHICS, SM, MEMORY, VIDEO = range(4)
CORRECTED, UNCORRECTED = 0, 1
VOLATILE, AGGREGATE = 0, 1
DEVICE_MEMORY, CBU = 2, 6
COMPUTE_MODES = ("Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process")
RECOVERY_ACTIONS = ("None", "Reset", "Reboot", "Drain P2P", "Drain and Reset")
DEPRECATED = "Requested functionality has been deprecated"


class NvmlError(Exception):
    """NVML answered with an error code."""

    def __init__(self, code: int, words: str) -> None:
        self.code = code
        super().__init__(words)


class Exit(Exception):
    """Stop: print `words` to standard output, as nvidia-smi does, and exit with `status`."""

    def __init__(self, status: int, words: str) -> None:
        self.status = status
        super().__init__(words)


class _FieldValue(ctypes.Structure):
    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp_us", ctypes.c_longlong),
        ("latency_us", ctypes.c_longlong),
        ("value_type", ctypes.c_uint),
        ("result", ctypes.c_uint),
        ("number", ctypes.c_uint),
        ("padding", ctypes.c_uint),
    )


class _PciInfo(ctypes.Structure):
    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("device_id", ctypes.c_uint),
        ("subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


class Nvml:
    """The library; every call raises NvmlError when NVML says no."""

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            raise Exit(
                NO_LIBRARY,
                "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. "
                "Please make sure that the NVIDIA Display Driver is properly installed and present in your system.\n"
                "Please also try adding directory that contains libnvidia-ml.so to your system PATH.",
            ) from None
        self.library.nvmlErrorString.restype = ctypes.c_char_p

    def call(self, function: str, *arguments: object) -> None:
        code = getattr(self.library, function)(*arguments)
        if code:
            raise NvmlError(code, self.library.nvmlErrorString(code).decode())

    def text(self, function: str, *arguments: object) -> str:
        out = ctypes.create_string_buffer(128)
        self.call(function, *arguments, out, ctypes.c_uint(len(out)))
        return out.value.decode()

    def number(self, function: str, *arguments: object) -> int:
        out = ctypes.c_uint()
        self.call(function, *arguments, ctypes.byref(out))
        return out.value

    def version(self) -> str:
        """NVML's version without the CUDA part, as nvidia-smi prints it: 580.173 of 13.580.173.02."""
        return ".".join(self.text("nvmlSystemGetNVMLVersion").split(".")[1:3])

    def cuda(self) -> str:
        number = self.number("nvmlSystemGetCudaDriverVersion_v2")
        return f"{number // 1000}.{number % 1000 // 10}"


class Gpu:
    """One card: thin readers over NVML, in NVML's own units."""

    def __init__(self, nvml: Nvml, index: int, handle: ctypes.c_void_p) -> None:
        self.nvml, self.index, self.handle = nvml, index, handle

    @property
    def pci(self) -> _PciInfo:
        info = _PciInfo()
        self.nvml.call("nvmlDeviceGetPciInfo_v3", self.handle, ctypes.byref(info))
        return info

    @property
    def bus_id(self) -> str:
        return bytes(self.pci.bus_id).decode()

    def text(self, what: str, *arguments: object) -> str:
        return self.nvml.text(f"nvmlDeviceGet{what}", self.handle, *arguments)

    def number(self, what: str, *arguments: int) -> int:
        return self.nvml.number(f"nvmlDeviceGet{what}", self.handle, *map(ctypes.c_uint, arguments))

    def long(self, what: str, *arguments: int) -> int:
        out = ctypes.c_ulonglong()
        self.nvml.call(f"nvmlDeviceGet{what}", self.handle, *map(ctypes.c_uint, arguments), ctypes.byref(out))
        return out.value

    def numbers(self, what: str, count: int) -> tuple[int, ...]:
        """Several unsigned values that NVML returns at once, each through a pointer of its own."""
        out = [ctypes.c_uint() for _ in range(count)]
        self.nvml.call(f"nvmlDeviceGet{what}", self.handle, *map(ctypes.byref, out))
        return tuple(value.value for value in out)

    def memory_mib(self, what: str) -> tuple[int, int, int]:
        """Total, free, used."""
        out = (ctypes.c_ulonglong * 3)()
        self.nvml.call(f"nvmlDeviceGet{what}", self.handle, ctypes.byref(out))
        return out[0] // MIB, out[1] // MIB, out[2] // MIB

    def utilization(self) -> tuple[int, int]:
        out = (ctypes.c_uint * 2)()
        self.nvml.call("nvmlDeviceGetUtilizationRates", self.handle, ctypes.byref(out))
        return out[0], out[1]

    def field(self, field: int) -> int:
        value = _FieldValue(field=field)
        self.nvml.call("nvmlDeviceGetFieldValues", self.handle, ctypes.c_int(1), ctypes.byref(value))
        if value.result:
            raise NvmlError(value.result, self.nvml.library.nvmlErrorString(value.result).decode())
        return int(value.number)

    def retired_pages(self, cause: int) -> list[int]:
        count = ctypes.c_uint(64)  # a card before Ampere retires 64 pages at most
        pages = (ctypes.c_ulonglong * 64)()
        self.nvml.call("nvmlDeviceGetRetiredPages", self.handle, ctypes.c_uint(cause), ctypes.byref(count), ctypes.byref(pages))
        return list(pages[: count.value])


# ---- values as nvidia-smi words them --------------------------------------------------------------------------------


def enabled(value: int) -> str:
    return "Enabled" if value else "Disabled"


def yes(value: int) -> str:
    return "Yes" if value else "No"


def watts(milliwatts: int) -> str:
    return f"{milliwatts / 1000:.2f}"


def reason(gpu: Gpu, mask: int) -> str:
    return "Active" if gpu.long("CurrentClocksEventReasons") & mask else "Not Active"


def capability(gpu: Gpu) -> str:
    return "{}.{}".format(*gpu.numbers("CudaComputeCapability", 2))


def not_on_this_card(_gpu: Gpu) -> str:
    raise NvmlError(NOT_SUPPORTED, "Not Supported")


# ---- --query-gpu ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """One field of --query-gpu: its unit ("" for none) and how it is read."""

    unit: str
    read: Callable[[Gpu], object]


REASONS = {
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}

# Fields of the real tool that a V100 answers with N/A.
ABSENT_FIELDS = (
    "addressing_mode",
    "driver_model.current",
    "driver_model.pending",
    "gom.current",
    "gom.pending",
    "inforom.pwr",
    "mig.mode.current",
    "mig.mode.pending",
    "gsp.mode.current",
    "gsp.mode.default",
    "c2c.mode",
    "temperature.gpu.tlimit",
    "remapped_rows.correctable",
    "remapped_rows.uncorrectable",
    "remapped_rows.pending",
    "remapped_rows.failure",
)

ALIASES = {
    "gpu_name": "name",
    "gpu_serial": "serial",
    "gpu_uuid": "uuid",
    "gpu_bus_id": "pci.bus_id",
    "inforom.image": "inforom.img",
    "inforom.power": "inforom.pwr",
    "clocks.gr": "clocks.current.graphics",
    "clocks.sm": "clocks.current.sm",
    "clocks.mem": "clocks.current.memory",
    "clocks.video": "clocks.current.video",
    "clocks.max.gr": "clocks.max.graphics",
    "clocks.max.mem": "clocks.max.memory",
    "clocks.applications.gr": "clocks.applications.graphics",
    "clocks.applications.mem": "clocks.applications.memory",
    "retired_pages.sbe": "retired_pages.single_bit_ecc.count",
    "retired_pages.dbe": "retired_pages.double_bit.count",
    "gpu.power.requested_limit": "power.limit",
    "gpu.power.current_limit": "enforced.power.limit",
    "gpu.power.default_limit": "power.default_limit",
    "gpu.power.min_limit": "power.min_limit",
    "gpu.power.max_limit": "power.max_limit",
    "gpu.power.draw.average": "power.draw.average",
    "gpu.power.draw.instant": "power.draw.instant",
    "gpu_operation_mode.current": "gom.current",
    "gpu_operation_mode.pending": "gom.pending",
    "remapped_rows.sbe": "remapped_rows.correctable",
    "remapped_rows.dbe": "remapped_rows.uncorrectable",
    **{f"clocks_throttle_reasons.{name}": f"clocks_event_reasons.{name}" for name in (*REASONS, "active", "supported")},
}


def _fields() -> dict[str, Field]:
    def power(function: str) -> Callable[[Gpu], str]:
        return lambda gpu: watts(gpu.number(function))

    def constraint(which: int) -> Callable[[Gpu], str]:
        return lambda gpu: watts(gpu.numbers("PowerManagementLimitConstraints", 2)[which])

    def part(function: str, which: int) -> Callable[[Gpu], int]:
        return lambda gpu: gpu.memory_mib(function)[which]

    def clock(function: str, kind: int) -> Callable[[Gpu], int]:
        return lambda gpu: gpu.number(function, kind)

    def reason_of(mask: int) -> Callable[[Gpu], str]:
        return lambda gpu: reason(gpu, mask)

    fields = {
        "timestamp": Field("", lambda _: time.strftime("%Y/%m/%d %H:%M:%S") + f".{time.time_ns() // 1000000 % 1000:03d}"),
        "driver_version": Field("", lambda gpu: gpu.nvml.text("nvmlSystemGetDriverVersion")),
        "count": Field("", lambda gpu: gpu.nvml.number("nvmlDeviceGetCount_v2")),
        "index": Field("", lambda gpu: gpu.index),
        "name": Field("", lambda gpu: gpu.text("Name")),
        "serial": Field("", lambda gpu: gpu.text("Serial")),
        "uuid": Field("", lambda gpu: gpu.text("UUID")),
        "pci.bus_id": Field("", lambda gpu: gpu.bus_id),
        "pci.domain": Field("", lambda gpu: f"0x{gpu.pci.domain:04X}"),
        "pci.bus": Field("", lambda gpu: f"0x{gpu.pci.bus:02X}"),
        "pci.device": Field("", lambda gpu: f"0x{gpu.pci.device:02X}"),
        "pci.baseClass": Field("", lambda _: "0x3"),
        "pci.subClass": Field("", lambda _: "0x2"),
        "pci.device_id": Field("", lambda gpu: f"0x{gpu.pci.device_id:08X}"),
        "pci.sub_device_id": Field("", lambda gpu: f"0x{gpu.pci.subsystem_id:08X}"),
        "pcie.link.gen.current": Field("", lambda gpu: gpu.number("CurrPcieLinkGeneration")),
        "pcie.link.gen.gpucurrent": Field("", lambda gpu: gpu.number("CurrPcieLinkGeneration")),
        "pcie.link.gen.max": Field("", lambda gpu: gpu.number("MaxPcieLinkGeneration")),
        "pcie.link.gen.gpumax": Field("", lambda gpu: gpu.number("GpuMaxPcieLinkGeneration")),
        "pcie.link.gen.hostmax": Field("", not_on_this_card),
        "pcie.link.width.current": Field("", lambda gpu: gpu.number("CurrPcieLinkWidth")),
        "pcie.link.width.max": Field("", lambda gpu: gpu.number("MaxPcieLinkWidth")),
        "display_mode": Field("", lambda _: f"[{DEPRECATED}]"),
        "display_active": Field("", lambda gpu: enabled(gpu.number("DisplayActive"))),
        "persistence_mode": Field("", lambda gpu: enabled(gpu.number("PersistenceMode"))),
        "vbios_version": Field("", lambda gpu: gpu.text("VbiosVersion")),
        "inforom.img": Field("", lambda gpu: gpu.text("InforomImageVersion")),
        "inforom.oem": Field("", lambda gpu: gpu.text("InforomVersion", ctypes.c_int(0))),
        "inforom.ecc": Field("", lambda gpu: gpu.text("InforomVersion", ctypes.c_int(1))),
        "gpu_recovery_action": Field("", lambda gpu: RECOVERY_ACTIONS[gpu.field(RECOVERY_ACTION)]),
        "fan.speed": Field("%", not_on_this_card),
        "pstate": Field("", lambda gpu: f"P{gpu.number('PerformanceState')}"),
        "clocks_event_reasons.supported": Field("", lambda gpu: f"0x{gpu.long('SupportedClocksEventReasons'):016x}"),
        "clocks_event_reasons.active": Field("", lambda gpu: f"0x{gpu.long('CurrentClocksEventReasons'):016x}"),
        **{f"clocks_event_reasons.{name}": Field("", reason_of(mask)) for name, mask in REASONS.items()},
        "memory.total": Field("MiB", part("MemoryInfo", 0)),
        "memory.reserved": Field("MiB", lambda _: 0),
        "memory.free": Field("MiB", part("MemoryInfo", 1)),
        "memory.used": Field("MiB", part("MemoryInfo", 2)),
        "compute_mode": Field("", lambda gpu: COMPUTE_MODES[gpu.number("ComputeMode")]),
        "compute_cap": Field("", capability),
        "utilization.gpu": Field("%", lambda gpu: gpu.utilization()[0]),
        "utilization.memory": Field("%", lambda gpu: gpu.utilization()[1]),
        "ecc.mode.current": Field("", lambda gpu: enabled(gpu.numbers("EccMode", 2)[0])),
        "ecc.mode.pending": Field("", lambda gpu: enabled(gpu.numbers("EccMode", 2)[1])),
        "retired_pages.single_bit_ecc.count": Field("", lambda gpu: gpu.field(RETIRED_SBE)),
        "retired_pages.double_bit.count": Field("", lambda gpu: gpu.field(RETIRED_DBE)),
        "retired_pages.pending": Field("", lambda gpu: yes(gpu.number("RetiredPagesPendingStatus"))),
        "temperature.gpu": Field("", lambda gpu: gpu.number("Temperature", 0)),
        "temperature.memory": Field("", lambda gpu: gpu.field(MEMORY_TEMPERATURE)),
        "power.management": Field("", lambda gpu: enabled(gpu.number("PowerManagementMode"))),
        "power.draw": Field("W", power("PowerUsage")),
        "power.draw.average": Field("W", power("PowerUsage")),
        "power.draw.instant": Field("W", power("PowerUsage")),
        "power.limit": Field("W", power("PowerManagementLimit")),
        "enforced.power.limit": Field("W", power("EnforcedPowerLimit")),
        "power.default_limit": Field("W", power("PowerManagementDefaultLimit")),
        "power.min_limit": Field("W", constraint(0)),
        "power.max_limit": Field("W", constraint(1)),
        **{name: Field("", not_on_this_card) for name in ABSENT_FIELDS},
    }
    for kind, name in ((GRAPHICS, "graphics"), (SM, "sm"), (MEMORY, "memory"), (VIDEO, "video")):
        fields[f"clocks.current.{name}"] = Field("MHz", clock("ClockInfo", kind))
        if kind != VIDEO:
            fields[f"clocks.max.{name}"] = Field("MHz", clock("MaxClockInfo", kind))
        if kind in (GRAPHICS, MEMORY):
            fields[f"clocks.applications.{name}"] = Field("MHz", clock("ApplicationsClock", kind))
    for error_type, type_name in ((CORRECTED, "corrected"), (UNCORRECTED, "uncorrected")):
        for counter, counter_name in ((VOLATILE, "volatile"), (AGGREGATE, "aggregate")):
            for location in ("device_memory", "total"):
                name = f"ecc.errors.{type_name}.{counter_name}.{location}"
                fields[name] = Field("", _ecc_reader(error_type, counter))
    return fields


def _ecc_reader(error_type: int, counter: int) -> Callable[[Gpu], int]:
    return lambda gpu: gpu.long("TotalEccErrors", error_type, counter)


def query_gpu(gpus: Iterable[Gpu], names: list[str], formats: list[str]) -> None:
    """Print the CSV of --query-gpu. Errors: Exit(2) for a field or format that the tool does not know."""
    known = _fields()
    if "csv" not in formats or set(formats) - {"csv", "noheader", "nounits"}:
        raise Exit(2, 'Invalid "--format" value: csv is required, with noheader and nounits on request.')
    wanted = [ALIASES.get(name, name) for name in names]
    for name in wanted:
        if name not in known:
            raise Exit(2, f'Field "{name}" is not a valid field to query.\n')
    if "noheader" not in formats:
        print(", ".join(f"{name} [{known[name].unit}]" if known[name].unit else name for name in wanted))
    for gpu in gpus:
        print(", ".join(_csv_value(known[name], gpu, "nounits" not in formats) for name in wanted))


def _csv_value(field: Field, gpu: Gpu, units: bool) -> str:
    try:
        value = str(field.read(gpu))
    except NvmlError as error:
        return "[N/A]" if error.code == NOT_SUPPORTED else f"[{error}]"
    return f"{value} {field.unit}" if units and field.unit else value


# ---- -q and -q -x ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A line of -q (label) and an element of -q -x (tag), with a value or with nodes; an empty label or tag leaves one out."""

    label: str
    tag: str
    value: str | None
    nodes: tuple[Node, ...] = ()


def full_report(gpu: Gpu) -> tuple[Node, ...]:
    """Everything that -q prints about one card, in the order and shape of driver 580."""

    def row(label: str, tag: str, read: str | Callable[[], object] = "N/A", unit: str = "") -> Node:
        if isinstance(read, str):
            return Node(label, tag, read)
        try:
            value = str(read())
        except NvmlError as error:
            return Node(label, tag, "N/A" if error.code == NOT_SUPPORTED else str(error))
        return Node(label, tag, f"{value} {unit}" if unit else value)

    def section(label: str, tag: str, *nodes: Node) -> Node:
        return Node(label, tag, None, nodes)

    def number(what: str, *arguments: int) -> Callable[[], int]:
        return lambda: gpu.number(what, *arguments)

    def memory(what: str) -> tuple[Node, ...]:
        return (
            row("Total", "total", lambda: gpu.memory_mib(what)[0], "MiB"),
            row("Used", "used", lambda: gpu.memory_mib(what)[2], "MiB"),
            row("Free", "free", lambda: gpu.memory_mib(what)[1], "MiB"),
        )

    def reason_row(label: str, name: str) -> Node:
        return row(label, f"clocks_event_reason_{name}", lambda: reason(gpu, REASONS[name]))

    def ecc(label: str, tag: str, counter: int) -> Node:
        return section(
            label,
            tag,
            section(
                "Single Bit",
                "single_bit",
                row("Device Memory", "device_memory", lambda: gpu.long("TotalEccErrors", CORRECTED, counter)),
                row("Total", "total", lambda: gpu.long("TotalEccErrors", CORRECTED, counter)),
            ),
            section(
                "Double Bit",
                "double_bit",
                row("Device Memory", "device_memory", lambda: gpu.long("TotalEccErrors", UNCORRECTED, counter)),
                row("CBU", "cbu", lambda: gpu.long("MemoryErrorCounter", UNCORRECTED, counter, CBU)),
                row("Total", "total", lambda: gpu.long("TotalEccErrors", UNCORRECTED, counter)),
            ),
        )

    def retired(tag: str, cause: int, field: int) -> Node:
        try:
            pages = gpu.retired_pages(cause)
        except NvmlError:
            pages = []  # the count beside it says what is wrong
        addresses = (Node("", "retired_page_address", f"0x{page:016x}") for page in pages)
        return section("", tag, row("", "retired_count", lambda: gpu.field(field)), section("", "retired_pagelist", *addresses))

    def clocks(label: str, tag: str, what: str) -> Node:
        names = (("Graphics", "graphics"), ("SM", "sm"), ("Memory", "mem"), ("Video", "video"))
        return section(
            label,
            tag,
            *(row(name, f"{short}_clock", number(what, kind), "MHz") for kind, (name, short) in enumerate(names)),
        )

    def power(label: str, tag: str, what: str) -> Node:
        return row(label, tag, lambda: watts(gpu.number(what)), "W")

    def constraint(label: str, tag: str, which: int) -> Node:
        return row(label, tag, lambda: watts(gpu.numbers("PowerManagementLimitConstraints", 2)[which]), "W")

    return (
        row("Product Name", "product_name", lambda: gpu.text("Name")),
        row("Product Brand", "product_brand", lambda: "Tesla" if gpu.number("Brand") == 2 else "NVIDIA"),
        row("Product Architecture", "product_architecture", lambda: "Volta" if gpu.number("Architecture") == 5 else "N/A"),
        row("Display Mode", "display_mode", DEPRECATED),
        row("Display Active", "display_active", lambda: enabled(gpu.number("DisplayActive"))),
        row("Persistence Mode", "persistence_mode", lambda: enabled(gpu.number("PersistenceMode"))),
        row("Addressing Mode", "addressing_mode"),
        section("MIG Mode", "mig_mode", row("Current", "current_mig"), row("Pending", "pending_mig")),
        section("Driver Model", "driver_model", row("Current", "current_dm"), row("Pending", "pending_dm")),
        row("Serial Number", "serial", lambda: gpu.text("Serial")),
        row("GPU UUID", "uuid", lambda: gpu.text("UUID")),
        row("Minor Number", "minor_number", number("MinorNumber")),
        row("VBIOS Version", "vbios_version", lambda: gpu.text("VbiosVersion")),
        row("MultiGPU Board", "multigpu_board", lambda: yes(gpu.number("MultiGpuBoard"))),
        row("Board ID", "board_id", lambda: f"0x{gpu.number('BoardId'):x}"),
        row("Board Part Number", "board_part_number", lambda: gpu.text("BoardPartNumber")),
        section(
            "Inforom Version",
            "inforom_version",
            row("Image Version", "img_version", lambda: gpu.text("InforomImageVersion")),
            row("OEM Object", "oem_object", lambda: gpu.text("InforomVersion", ctypes.c_int(0))),
            row("ECC Object", "ecc_object", lambda: gpu.text("InforomVersion", ctypes.c_int(1))),
            row("Power Management Object", "pwr_object"),
        ),
        row(
            "GPU Recovery Action",
            "gpu_recovery_action",
            lambda: RECOVERY_ACTIONS[gpu.field(RECOVERY_ACTION)],
        ),
        row("GSP Firmware Version", "gsp_firmware_version"),
        section(
            "PCI",
            "pci",
            Node("Bus", "", f"0x{gpu.pci.bus:02X}"),
            Node("", "pci_bus", f"{gpu.pci.bus:02X}"),
            Node("Device", "", f"0x{gpu.pci.device:02X}"),
            Node("", "pci_device", f"{gpu.pci.device:02X}"),
            Node("Domain", "", f"0x{gpu.pci.domain:04X}"),
            Node("", "pci_domain", f"{gpu.pci.domain:04X}"),
            Node("Device Id", "", f"0x{gpu.pci.device_id:08X}"),
            Node("", "pci_device_id", f"{gpu.pci.device_id:08X}"),
            row("Bus Id", "pci_bus_id", gpu.bus_id),
            Node("Sub System Id", "", f"0x{gpu.pci.subsystem_id:08X}"),
            Node("", "pci_sub_system_id", f"{gpu.pci.subsystem_id:08X}"),
            section(
                "GPU Link Info",
                "pci_gpu_link_info",
                section(
                    "PCIe Generation",
                    "pcie_gen",
                    row("Max", "max_link_gen", number("MaxPcieLinkGeneration")),
                    row("Current", "current_link_gen", number("CurrPcieLinkGeneration")),
                    row("Device Current", "device_current_link_gen", number("CurrPcieLinkGeneration")),
                    row("Device Max", "max_device_link_gen", number("GpuMaxPcieLinkGeneration")),
                    row("Host Max", "max_host_link_gen"),
                ),
                section(
                    "Link Width",
                    "link_widths",
                    row("Max", "max_link_width", lambda: f"{gpu.number('MaxPcieLinkWidth')}x"),
                    row("Current", "current_link_width", lambda: f"{gpu.number('CurrPcieLinkWidth')}x"),
                ),
            ),
            row("Replays Since Reset", "replay_counter", number("PcieReplayCounter")),
            row("Tx Throughput", "tx_util", number("PcieThroughput", 0), "KB/s"),
            row("Rx Throughput", "rx_util", number("PcieThroughput", 1), "KB/s"),
        ),
        row("Fan Speed", "fan_speed"),
        row("Performance State", "performance_state", lambda: f"P{gpu.number('PerformanceState')}"),
        section(
            "Clocks Event Reasons",
            "clocks_event_reasons",
            reason_row("Idle", "gpu_idle"),
            reason_row("Applications Clocks Setting", "applications_clocks_setting"),
            reason_row("SW Power Cap", "sw_power_cap"),
            reason_row("HW Slowdown", "hw_slowdown"),
            reason_row("    HW Thermal Slowdown", "hw_thermal_slowdown"),
            reason_row("    HW Power Brake Slowdown", "hw_power_brake_slowdown"),
            reason_row("Sync Boost", "sync_boost"),
            reason_row("SW Thermal Slowdown", "sw_thermal_slowdown"),
        ),
        section("FB Memory Usage", "fb_memory_usage", *memory("MemoryInfo")),
        section("BAR1 Memory Usage", "bar1_memory_usage", *memory("BAR1MemoryInfo")),
        row("Compute Mode", "compute_mode", lambda: COMPUTE_MODES[gpu.number("ComputeMode")]),
        section(
            "Utilization",
            "utilization",
            row("GPU", "gpu_util", lambda: gpu.utilization()[0], "%"),
            row("Memory", "memory_util", lambda: gpu.utilization()[1], "%"),
        ),
        section(
            "ECC Mode",
            "ecc_mode",
            row("Current", "current_ecc", lambda: enabled(gpu.numbers("EccMode", 2)[0])),
            row("Pending", "pending_ecc", lambda: enabled(gpu.numbers("EccMode", 2)[1])),
        ),
        section("ECC Errors", "ecc_errors", ecc("Volatile", "volatile", VOLATILE), ecc("Aggregate", "aggregate", AGGREGATE)),
        section(
            "Retired Pages",
            "retired_pages",
            retired("multiple_single_bit_retirement", 0, RETIRED_SBE),
            retired("double_bit_retirement", 1, RETIRED_DBE),
            row("Single Bit ECC", "", lambda: gpu.field(RETIRED_SBE)),
            row("Double Bit ECC", "", lambda: gpu.field(RETIRED_DBE)),
            row("Pending Page Blacklist", "pending_blacklist", lambda: yes(gpu.number("RetiredPagesPendingStatus"))),
            row("", "pending_retirement", lambda: yes(gpu.number("RetiredPagesPendingStatus"))),
        ),
        row("Remapped Rows", "remapped_rows"),
        section(
            "Temperature",
            "temperature",
            row("GPU Current Temp", "gpu_temp", number("Temperature", 0), "C"),
            row("GPU Shutdown Temp", "gpu_temp_max_threshold", number("TemperatureThreshold", 0), "C"),
            row("GPU Slowdown Temp", "gpu_temp_slow_threshold", number("TemperatureThreshold", 1), "C"),
            row("GPU Max Operating Temp", "gpu_temp_max_gpu_threshold", number("TemperatureThreshold", 3), "C"),
            row("GPU Target Temperature", "gpu_target_temperature"),
            row("Memory Current Temp", "memory_temp", lambda: gpu.field(MEMORY_TEMPERATURE), "C"),
            row("Memory Max Operating Temp", "gpu_temp_max_mem_threshold", number("TemperatureThreshold", 2), "C"),
        ),
        section(
            "GPU Power Readings",
            "gpu_power_readings",
            row("", "power_state", lambda: f"P{gpu.number('PowerState')}"),
            power("Average Power Draw", "average_power_draw", "PowerUsage"),
            power("Instantaneous Power Draw", "instant_power_draw", "PowerUsage"),
            power("Current Power Limit", "current_power_limit", "EnforcedPowerLimit"),
            power("Requested Power Limit", "requested_power_limit", "PowerManagementLimit"),
            power("Default Power Limit", "default_power_limit", "PowerManagementDefaultLimit"),
            constraint("Min Power Limit", "min_power_limit", 0),
            constraint("Max Power Limit", "max_power_limit", 1),
        ),
        clocks("Clocks", "clocks", "ClockInfo"),
        clocks("Max Clocks", "max_clocks", "MaxClockInfo"),
        row("Processes", "", "None"),
    )


def text_lines(nodes: Iterable[Node], depth: int = 1) -> Iterable[str]:
    """The lines of -q; the colons stand in one column."""
    for node in nodes:
        if node.label:
            label = " " * 4 * depth + node.label
            yield label if node.value is None else f"{label:<55}: {node.value}"
            yield from text_lines(node.nodes, depth + 1)


def xml_lines(nodes: Iterable[Node], depth: int = 2) -> Iterable[str]:
    """The elements of -q -x, indented by tabs."""
    tabs = "\t" * depth
    for node in nodes:
        if node.tag and node.value is None:
            yield f"{tabs}<{node.tag}>"
            yield from xml_lines(node.nodes, depth + 1)
            yield f"{tabs}</{node.tag}>"
        elif node.tag:
            yield f"{tabs}<{node.tag}>{escape(node.value or '')}</{node.tag}>"


def query_text(nvml: Nvml, gpus: list[Gpu]) -> None:
    heads = {
        "Timestamp": time.strftime("%a %b %e %H:%M:%S %Y"),
        "Driver Version": nvml.text("nvmlSystemGetDriverVersion"),
        "CUDA Version": nvml.cuda(),
        "": "",
        "Attached GPUs": str(nvml.number("nvmlDeviceGetCount_v2")),
    }
    print("\n==============NVSMI LOG==============\n(" + MARKER + ")\n")
    for label, value in heads.items():
        print(f"{label:<55}: {value}" if label else "")
    for gpu in gpus:
        print(f"GPU {gpu.bus_id}")
        print("\n".join(text_lines(full_report(gpu))) + "\n")


def query_xml(nvml: Nvml, gpus: list[Gpu]) -> None:
    print('<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">')
    print(f"<!-- {MARKER} -->\n<nvidia_smi_log>")
    print(f"\t<timestamp>{time.strftime('%a %b %e %H:%M:%S %Y')}</timestamp>")
    print(f"\t<driver_version>{nvml.text('nvmlSystemGetDriverVersion')}</driver_version>")
    print(f"\t<cuda_version>{nvml.cuda()}</cuda_version>")
    print(f"\t<attached_gpus>{nvml.number('nvmlDeviceGetCount_v2')}</attached_gpus>")
    for gpu in gpus:
        print(f'\t<gpu id="{gpu.bus_id}">')
        print("\n".join(xml_lines(full_report(gpu))))
        print("\t\t<processes>\n\t\t</processes>\n\t</gpu>")
    print("</nvidia_smi_log>")


# ---- the table ------------------------------------------------------------------------------------------------------


def table(nvml: Nvml, gpus: Iterable[Gpu]) -> None:
    """What nvidia-smi prints without arguments; what a card does not answer shows as ERR!, what it does not have as N/A."""
    version = nvml.text("nvmlSystemGetDriverVersion")
    rule = "+" + "-" * 41 + "+" + "-" * 24 + "+" + "-" * 22 + "+"
    wide_rule = "+" + "-" * 89 + "+"
    title = f" NVIDIA-SMI {version:<22} Driver Version: {version:<14} CUDA Version: {nvml.cuda()}"
    print(f"{time.strftime('%a %b %e %H:%M:%S %Y')}  ({MARKER})")
    print(f"{wide_rule}\n|{title:<89}|\n{rule}")
    print("| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |")
    print("| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |")
    print("|                                         |                        |               MIG M. |")
    print("|" + "=" * 41 + "+" + "=" * 24 + "+" + "=" * 22 + "|")
    for gpu in gpus:
        print("\n".join(_table_rows(gpu)))
        print(rule)
    print(f"\n{wide_rule}")
    for line in (
        " Processes:",
        "  GPU   GI   CI              PID   Type   Process name                        GPU Memory",
        "        ID   ID                                                               Usage",
    ):
        print(f"|{line:<89}|")
    print("|" + "=" * 89 + "|")
    print(f"|{'  No running processes found':<89}|\n{wide_rule}")


def _table_rows(gpu: Gpu) -> tuple[str, str, str]:
    def cell(read: Callable[[], object], unit: str = "") -> str:
        try:
            return f"{read()}{unit}"
        except NvmlError as error:
            return "N/A" if error.code == NOT_SUPPORTED else "ERR!"

    persistence = cell(lambda: "On" if gpu.number("PersistenceMode") else "Off")
    temperature, pstate = cell(lambda: gpu.number("Temperature", 0), "C"), cell(lambda: f"P{gpu.number('PerformanceState')}")
    usage = cell(lambda: gpu.number("PowerUsage") // 1000, "W")
    cap = cell(lambda: gpu.number("EnforcedPowerLimit") // 1000, "W")
    used = cell(lambda: gpu.memory_mib("MemoryInfo")[2], "MiB")
    total = cell(lambda: gpu.memory_mib("MemoryInfo")[0], "MiB")
    mode = cell(lambda: COMPUTE_MODES[gpu.number("ComputeMode")])
    ecc = cell(lambda: gpu.long("TotalEccErrors", UNCORRECTED, VOLATILE))
    fan = "ERR!" if pstate == "ERR!" else "N/A"
    first = f"{gpu.index:>4}  {cell(lambda: gpu.text('Name')):<31}{persistence:<4}"
    second = f"{fan:>4}  {temperature:>4}{pstate:>6}".ljust(25) + f"{usage:>7} / {cap:>5} "
    return (
        f"|{first}|   {gpu.bus_id} Off |{ecc:>21} |",
        f"|{second}|{used:>11} / {total:>9} |{cell(lambda: gpu.utilization()[0], '%'):>8} {mode:>12} |",
        f"|{'':41}|{'':24}|{'N/A':>21} |",
    )


# ---- changing settings ----------------------------------------------------------------------------------------------


def set_persistence(gpu: Gpu, mode: int) -> None:
    word = enabled(mode)
    if gpu.number("PersistenceMode") == mode:
        print(f"Persistence mode is already {word} for GPU {gpu.bus_id}.")
        return
    try:
        gpu.nvml.call("nvmlDeviceSetPersistenceMode", gpu.handle, ctypes.c_uint(mode))
    except NvmlError as error:
        raise Exit(
            error.code,
            f"Unable to set persistence mode for GPU {gpu.bus_id}: {error}\nTerminating early due to previous errors.",
        ) from None
    print(f"{word} persistence mode for GPU {gpu.bus_id}.")


def set_power_limit(gpu: Gpu, limit_w: float) -> None:
    low, high = gpu.numbers("PowerManagementLimitConstraints", 2)
    before = gpu.number("PowerManagementLimit")
    wanted = round(limit_w * 1000)
    if not low <= wanted <= high:
        raise Exit(
            2,
            f"Provided power limit {watts(wanted)} W is not a valid power limit which should be between "
            f"{watts(low)} W and {watts(high)} W for GPU {gpu.bus_id}\nTerminating early due to previous errors.",
        )
    try:
        gpu.nvml.call("nvmlDeviceSetPowerManagementLimit", gpu.handle, ctypes.c_uint(wanted))
    except NvmlError as error:
        raise Exit(
            error.code,
            f"Failed to set power management limit for GPU {gpu.bus_id}: {error}\nTerminating early due to previous errors.",
        ) from None
    print(f"Power limit for GPU {gpu.bus_id} was set to {watts(wanted)} W from {watts(before)} W.")
    if not gpu.number("PersistenceMode"):
        print(
            f"Warning: persistence mode is disabled on device {gpu.bus_id}. See the Known Issues section of the "
            "nvidia-smi(1) man page for more information."
        )


def set_clocks(gpu: Gpu, pair: str) -> None:
    try:
        memory, graphics = (int(part) for part in pair.split(","))
        gpu.nvml.call("nvmlDeviceSetApplicationsClocks", gpu.handle, ctypes.c_uint(memory), ctypes.c_uint(graphics))
    except (ValueError, NvmlError):
        raise Exit(
            2,
            f'Specified clock combination "(MEM {pair.partition(",")[0]}, SM {pair.partition(",")[2]})" is not supported for GPU '
            f"{gpu.bus_id}. Run 'nvidia-smi -q -d SUPPORTED_CLOCKS' to see list of supported clock combinations",
        ) from None
    print(f'Applications clocks set to "(MEM {memory}, SM {graphics})" for GPU {gpu.bus_id}')


def set_ecc(gpu: Gpu, mode: int) -> None:
    gpu.nvml.call("nvmlDeviceSetEccMode", gpu.handle, ctypes.c_uint(mode))
    print(f"{enabled(mode)} ECC support for GPU {gpu.bus_id}.")
    if gpu.numbers("EccMode", 2)[0] != mode:
        print("Reboot required.")


def set_compute_mode(gpu: Gpu, mode: int) -> None:
    gpu.nvml.call("nvmlDeviceSetComputeMode", gpu.handle, ctypes.c_uint(mode))
    print(f"Set compute mode to {COMPUTE_MODES[mode].upper()} for GPU {gpu.bus_id}.")


# ---- the command ----------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Exit(2, f"Invalid combination of input arguments ({message}). Please run 'nvidia-smi -h' for help.")


def parser() -> Parser:
    made = Parser(prog="nvidia-smi", description=f"nvidia-smi, {MARKER}", allow_abbrev=False, add_help=False)
    made.add_argument("-h", "--help", action="store_true")
    made.add_argument("--version", action="store_true")
    made.add_argument("-L", "--list-gpus", action="store_true", dest="list")
    made.add_argument("-q", "--query", action="store_true")
    made.add_argument("-x", "--xml-format", action="store_true", dest="xml")
    made.add_argument("-i", "--id", metavar="INDEX|UUID|BUS_ID[,...]")
    made.add_argument("--query-gpu", metavar="FIELD[,...]", help="fields of the real tool that the sandbox knows")
    made.add_argument("--format", metavar="csv[,noheader][,nounits]", default="")
    made.add_argument("-pm", "--persistence-mode", type=int, choices=(0, 1), dest="persistence")
    made.add_argument("-pl", "--power-limit", type=float, metavar="W", dest="power_limit_w")
    made.add_argument("-ac", "--applications-clocks", metavar="MEMORY,GRAPHICS", dest="clocks")
    made.add_argument("-e", "--ecc-config", type=int, choices=(0, 1), dest="ecc")
    made.add_argument("-c", "--compute-mode", type=int, choices=(0, 2, 3), dest="compute_mode")
    return made


def open_library() -> Nvml:
    nvml = Nvml()
    try:
        nvml.call("nvmlInitWithFlags", ctypes.c_uint(0))
    except NvmlError as error:
        if error.code == NO_DRIVER:
            words = (
                "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
                "Make sure that the latest NVIDIA driver is installed and running.\n"
            )
        else:
            words = f"Failed to initialize NVML: {error}\nNVML library version: {nvml.version()}"
        raise Exit(error.code, words) from None
    return nvml


def open_gpus(nvml: Nvml, wanted: str | None) -> tuple[list[Gpu], int]:
    """The cards that open, and the exit status: 15 when one did not (said on standard error, the others keep their index)."""
    gpus, status = [], 0
    for index in range(nvml.number("nvmlDeviceGetCount_v2")):
        handle = ctypes.c_void_p()
        code = nvml.library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
        gpu = Gpu(nvml, index, handle)
        names = {str(index), gpu.bus_id, gpu.bus_id[4:].lower()}
        if wanted is not None and not names & {part.strip() for part in wanted.split(",")}:
            try:
                if gpu.text("UUID") not in wanted.split(","):
                    continue
            except NvmlError:
                continue
        if code:
            words = nvml.library.nvmlErrorString(code).decode()
            advice = ".  Reboot the system to recover this GPU" if code == LOST else ""
            where = f"GPU{index}: {gpu.bus_id[4:]}"
            print(f"Unable to determine the device handle for {where}: {words}{advice}", file=sys.stderr)
            status = code
        else:
            gpus.append(gpu)
    if not gpus and not status:
        raise Exit(NOT_FOUND, "No devices were found")
    return gpus, status


def run(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    if options.help:
        print(f"NVIDIA-SMI, {MARKER}: no NVIDIA software, no GPU\n")
        print(parser().format_help())
        return 0
    nvml = open_library()
    if options.version:
        version = nvml.text("nvmlSystemGetDriverVersion")
        print(f"{MARKER}\nNVIDIA-SMI version  : {version}\nNVML version        : {nvml.version()}")
        print(f"DRIVER version      : {version}\nCUDA Version        : {nvml.cuda()}")
        return 0
    gpus, status = open_gpus(nvml, options.id)
    changes = _changes(options)
    if options.list:
        for gpu in gpus:
            print(f"GPU {gpu.index}: {_list_value(gpu, 'Name')} (UUID: {_list_value(gpu, 'UUID')})")
    elif any(value is not None for value, _ in changes):
        for gpu in gpus:
            for value, change in changes:
                if value is not None:
                    change(gpu, value)
        print("All done.")
    elif options.query_gpu is not None:
        query_gpu(gpus, [name.strip() for name in options.query_gpu.split(",")], options.format.split(","))
    elif options.query:
        (query_xml if options.xml else query_text)(nvml, gpus)
    elif gpus:
        table(nvml, gpus)
    return status


def _changes(options: argparse.Namespace) -> tuple[tuple[Any, Callable[[Gpu, Any], None]], ...]:
    """What is to be changed (None: nothing), and how."""
    return (
        (options.persistence, set_persistence),
        (options.power_limit_w, set_power_limit),
        (options.clocks, set_clocks),
        (options.ecc, set_ecc),
        (options.compute_mode, set_compute_mode),
    )


def _list_value(gpu: Gpu, what: str) -> str:
    try:
        return gpu.text(what)
    except NvmlError as error:
        return str(error)


def main() -> int:
    try:
        return run(sys.argv[1:])
    except Exit as stop:
        print(stop)
        return stop.status
    except NvmlError as error:
        print(f"Terminating early due to previous errors: {error}")
        return error.code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
