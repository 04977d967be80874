"""The board and its firmware: DMI (sysfs or dmidecode), EFI, Secure Boot, slots, memory modules and power supplies."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from laoka.host.sections import Sections
from laoka.host.unread import Maybe, Unread

V = TypeVar("V")

# What board makers leave in a field that they did not fill.
_PLACEHOLDERS = re.compile(
    r"(default string|to be filled by o\.?e\.?m\.?|not (specified|available)|none|unknown|n/?a|o\.?e\.?m\.?|\W*)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Slot:
    """A slot as DMI type 9 tells it; clone boards invent the bus addresses."""

    designation: str
    kind: str
    usage: str
    bus_address: str | None


@dataclass(frozen=True)
class PowerSupply:
    """A power supply as DMI type 39 tells it (OEM boards only)."""

    name: str
    max_power_w: int | None


@dataclass(frozen=True)
class MemoryModule:
    """A memory slot of DMI type 17; size 0: empty."""

    locator: str
    size_bytes: int
    speed_mt_s: int | None


@dataclass(frozen=True)
class Firmware:
    """Names are None where the maker left a placeholder. `bios_version` says little on clones (5.11, the AMI core's):
    the board is known by `board_name` and `bios_date`.
    """

    bios_vendor: Maybe[str | None]
    bios_version: Maybe[str | None]
    bios_date: Maybe[str | None]
    board_vendor: Maybe[str | None]
    board_name: Maybe[str | None]
    board_version: Maybe[str | None]
    system_vendor: Maybe[str | None]
    product_name: Maybe[str | None]
    efi_boot: Maybe[bool]
    secure_boot: Maybe[bool]
    setup_variable_bytes: Maybe[tuple[int, ...]]
    slots: Maybe[tuple[Slot, ...]]
    power_supplies: Maybe[tuple[PowerSupply, ...]]
    memory_modules: Maybe[tuple[MemoryModule, ...]]


def read_firmware(sections: Sections) -> Firmware:
    """From the sections dmi, dmidecode, efi and secure-boot."""
    sysfs = _sysfs(sections.output("dmi"))
    blocks = sections.output("dmidecode")
    decoded = blocks if isinstance(blocks, Unread) else read_dmidecode(blocks)

    def name(sysfs_name: str, block_type: int, key: str) -> Maybe[str | None]:
        if not isinstance(sysfs, Unread) and sysfs_name in sysfs:
            return _meant(sysfs[sysfs_name])
        if not isinstance(decoded, Unread):
            for kind, fields in decoded:
                if kind == block_type and key in fields:
                    return _meant(fields[key])
        return sysfs if isinstance(sysfs, Unread) else Unread(f"DMI shows no {sysfs_name}")

    return Firmware(
        bios_vendor=name("bios_vendor", 0, "Vendor"),
        bios_version=name("bios_version", 0, "Version"),
        bios_date=name("bios_date", 0, "Release Date"),
        board_vendor=name("board_vendor", 2, "Manufacturer"),
        board_name=name("board_name", 2, "Product Name"),
        board_version=name("board_version", 2, "Version"),
        system_vendor=name("sys_vendor", 1, "Manufacturer"),
        product_name=name("product_name", 1, "Product Name"),
        efi_boot=_efi(sections.output("efi")),
        secure_boot=_secure_boot(sections.output("secure-boot"), sections.output("efi")),
        setup_variable_bytes=_setup_sizes(sections.output("efi")),
        slots=_of_type(decoded, 9, _slot),
        power_supplies=_of_type(decoded, 39, _power_supply),
        memory_modules=_of_type(decoded, 17, _memory_module),
    )


def _meant(text: str) -> str | None:
    text = text.strip()
    return None if _PLACEHOLDERS.fullmatch(text) else text


def _sysfs(output: Maybe[str]) -> Maybe[dict[str, str]]:
    if isinstance(output, Unread):
        return output
    found = dict(re.findall(r"^/sys/class/dmi/id/(\w+):(.*)$", output, re.MULTILINE))
    return found or Unread("sysfs shows no DMI names")


Block = tuple[int, dict[str, str]]


def read_dmidecode(text: str) -> tuple[Block, ...]:
    """(DMI type, fields) of each structure of `dmidecode`'s output, in its order."""
    blocks: list[Block] = []
    for part in re.split(r"^Handle 0x", text, flags=re.MULTILINE)[1:]:
        head = re.search(r"DMI type (\d+)", part.split("\n", 1)[0])
        if head:
            blocks.append((int(head[1]), dict(re.findall(r"^[ \t]+([A-Za-z /()-]+): ?(.*)$", part, re.MULTILINE))))
    return tuple(blocks)


def _of_type(blocks: Maybe[tuple[Block, ...]], kind: int, build: Callable[[dict[str, str]], V]) -> Maybe[tuple[V, ...]]:
    if isinstance(blocks, Unread):
        return blocks
    return tuple(build(fields) for block_kind, fields in blocks if block_kind == kind)


def _slot(fields: dict[str, str]) -> Slot:
    return Slot(
        fields.get("Designation", ""),
        fields.get("Type", ""),
        fields.get("Current Usage", ""),
        fields.get("Bus Address"),
    )


def _power_supply(fields: dict[str, str]) -> PowerSupply:
    watts = re.match(r"(\d+) W", fields.get("Max Power Capacity", ""))
    return PowerSupply(fields.get("Name", ""), int(watts[1]) if watts else None)


def _memory_module(fields: dict[str, str]) -> MemoryModule:
    size = re.match(r"(\d+) (MB|GB|TB)", fields.get("Size", ""))
    speed = re.match(r"(\d+) M", fields.get("Configured Memory Speed") or fields.get("Speed", ""))
    unit = {"MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
    return MemoryModule(fields.get("Locator", ""), int(size[1]) * unit[size[2]] if size else 0, int(speed[1]) if speed else None)


def _efi(output: Maybe[str]) -> Maybe[bool]:
    if isinstance(output, Unread):
        return output
    found = re.search(r"^efi=([01])$", output, re.MULTILINE)
    return found[1] == "1" if found else Unread("the probe printed no EFI line")


def _secure_boot(mokutil: Maybe[str], efi: Maybe[str]) -> Maybe[bool]:
    if not isinstance(mokutil, Unread):
        found = re.search(r"SecureBoot (enabled|disabled)", mokutil)
        if found:
            return found[1] == "enabled"
    if isinstance(efi, Unread):
        return efi
    variable = re.search(r"^secure_boot=(\d\d)$", efi, re.MULTILINE)
    if variable:
        return variable[1] == "01"
    if re.search(r"^efi=0$", efi, re.MULTILINE):
        return False  # a legacy boot has no Secure Boot
    return Unread("neither mokutil nor the EFI variable says it")


def _setup_sizes(efi: Maybe[str]) -> Maybe[tuple[int, ...]]:
    if isinstance(efi, Unread):
        return efi
    return tuple(int(size) for size in re.findall(r"^-\S+ +\d+ \S+ +\S+ +(\d+) .* Setup-", efi, re.MULTILINE))
