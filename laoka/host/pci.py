"""PCI devices of a host: identity, BARs, bridge windows, link, errors; from sysfs, lspci, lshw or the kernel log."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from laoka.host import pci_address
from laoka.host.kernel_log import BarLine, DeviceLine, Event, InvalidBar
from laoka.host.unread import Maybe, Unread

NVIDIA = 0x10DE
DISPLAY_CLASS = 0x03
FOUR_GIB = 1 << 32
# A device whose address the text does not say (a few lines quoted in a forum).
UNKNOWN_ADDRESS = "unknown"

# include/linux/ioport.h
_IORESOURCE_MEM, _IORESOURCE_PREFETCH, _IORESOURCE_MEM_64 = 0x200, 0x2000, 0x100000
_IORESOURCE_WINDOW, _IORESOURCE_UNSET = 0x200000, 0x20000000
# Documentation/PCI/sysfs-pci.rst: six BARs, then the ROM; class 0604 is a PCI-to-PCI bridge
_ROM_LINE, _BRIDGE_CLASS = 6, 0x0604

NOT_SHOWN = Unread("not in the input")


@dataclass(frozen=True)
class Bar:
    """One base address register. `size_bytes` 0: not known. `start` 0 with state `assigned` never happens."""

    index: int
    start: int
    size_bytes: int
    is_64bit: bool
    prefetchable: bool
    state: Literal["assigned", "unassigned", "ignored"] = "assigned"


@dataclass(frozen=True)
class Window:
    """A window of a bridge. `is_64bit` says what the bridge decodes, not where the window lies."""

    start: int
    end: int
    is_64bit: bool
    prefetchable: bool

    @property
    def size_bytes(self) -> int:
        return self.end - self.start + 1


@dataclass(frozen=True)
class Link:
    """A PCIe link as one end sees it: speeds in GT/s, widths in lanes."""

    speed_gt_s: Maybe[float] = NOT_SHOWN
    width: Maybe[int] = NOT_SHOWN
    max_speed_gt_s: Maybe[float] = NOT_SHOWN
    max_width: Maybe[int] = NOT_SHOWN


@dataclass(frozen=True)
class Aer:
    """Totals of the kernel's AER counters since boot."""

    corrected: int
    nonfatal: int
    fatal: int


@dataclass(frozen=True)
class PciDevice:
    """One PCI function. `driver` None: no driver is bound. `path` lists the bridges above it, root port first."""

    address: str
    vendor_id: Maybe[int] = NOT_SHOWN
    device_id: Maybe[int] = NOT_SHOWN
    class_code: Maybe[int] = NOT_SHOWN
    subsystem_id: Maybe[int] = NOT_SHOWN
    name: Maybe[str] = NOT_SHOWN
    bars: Maybe[tuple[Bar, ...]] = NOT_SHOWN
    windows: Maybe[tuple[Window, ...]] = NOT_SHOWN
    path: Maybe[tuple[str, ...]] = NOT_SHOWN
    root_bus: Maybe[str] = NOT_SHOWN
    link: Link = Link()
    aspm: Maybe[str] = NOT_SHOWN
    driver: Maybe[str | None] = NOT_SHOWN
    aer: Maybe[Aer] = NOT_SHOWN
    config: Maybe[bytes] = NOT_SHOWN
    numa_node: Maybe[int] = NOT_SHOWN
    power_state: Maybe[str] = NOT_SHOWN
    enabled: Maybe[bool] = NOT_SHOWN

    @property
    def is_nvidia_gpu(self) -> bool:
        """A display or 3D controller with NVIDIA's vendor id: names are never asked."""
        return self.vendor_id == NVIDIA and isinstance(self.class_code, int) and self.class_code >> 16 == DISPLAY_CLASS

    @property
    def is_bridge(self) -> bool:
        return isinstance(self.class_code, int) and self.class_code >> 8 == _BRIDGE_CLASS

    def bar(self, index: int) -> Maybe[Bar | None]:
        """The BAR with this index; None when the device shows none; Unread when its BARs could not be read."""
        if isinstance(self.bars, Unread):
            return self.bars
        return next((bar for bar in self.bars if bar.index == index), None)

    @property
    def bar1(self) -> Maybe[Bar | None]:
        """What NVIDIA calls BAR1 (the card's memory): register 1 after a 32-bit BAR0, register 2 after a 64-bit one."""
        first = self.bar(0)
        return self.bar(2 if isinstance(first, Bar) and first.is_64bit else 1)

    @property
    def answers(self) -> Maybe[bool]:
        """False when every byte of its configuration space reads 0xff: the link is dead though sysfs still lists it."""
        if isinstance(self.config, Unread):
            return self.config
        return not self.config or any(byte != 0xFF for byte in self.config)

    @property
    def id_text(self) -> str:
        """`10de:1db6`, with ???? for what is not known."""
        return ":".join("????" if isinstance(part, Unread) else f"{part:04x}" for part in (self.vendor_id, self.device_id))


# ---------------------------------------------------------------------------------------------------- sysfs

_SYSFS = re.compile(r"/sys/bus/pci/devices/([0-9a-f:.]+)/([a-z0-9_/]+):(.*)$")
_LINK_LINE = re.compile(r"(?:/sys/bus/pci/devices/)?([0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])(/driver)?(?: -> (\S+))?$")
_CONFIG_LINE = re.compile(r"([0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) ((?: ?[0-9a-f]{2})+)$")


def read_sysfs(attributes: str, links: str = "", config: str = "") -> tuple[PciDevice, ...]:
    """Devices from the probe's three sections.

    Arguments: `attributes` lines `/sys/bus/pci/devices/BDF/FILE:CONTENT` (grep's form, one line per line of the file);
    `links` the long listing of the device folder and of its driver links; `config` lines `BDF 86 80 ...` of hex bytes.
    """
    files: dict[str, dict[str, list[str]]] = {}
    for line in attributes.splitlines():
        if found := _SYSFS.match(line):
            files.setdefault(found[1], {}).setdefault(found[2], []).append(found[3].strip())
    targets: dict[str, str] = {}
    drivers: dict[str, str] = {}
    listed: set[str] = set()
    for line in links.splitlines():
        if not (found := _LINK_LINE.search(line)):
            continue
        if not found[2]:
            listed.add(found[1])
        if found[3]:
            (drivers if found[2] else targets)[found[1]] = found[3]
    bytes_of: dict[str, bytes] = {}
    for line in config.splitlines():
        if found := _CONFIG_LINE.match(line.strip()):
            bytes_of[found[1]] = bytes.fromhex(found[2])
    return tuple(
        _sysfs_device(address, files.get(address, {}), targets.get(address), drivers, bytes_of.get(address), bool(links))
        for address in sorted(set(files) | listed)
    )


def _sysfs_device(
    address: str,
    files: Mapping[str, list[str]],
    target: str | None,
    drivers: Mapping[str, str],
    config: bytes | None,
    links_known: bool,
) -> PciDevice:
    class_code = _number(files, "class")
    bars, windows = _resources(files.get("resource"), isinstance(class_code, int) and class_code >> 8 == _BRIDGE_CLASS)
    path, root = _path(target)
    vendor, device = _number(files, "subsystem_vendor"), _number(files, "subsystem_device")
    driver: Maybe[str | None] = drivers[address].rsplit("/", 1)[-1] if address in drivers else None
    if not links_known:
        driver = NOT_SHOWN
    state = files.get("power_state") or files.get("power/runtime_status")
    enabled = _number(files, "enable")
    node = _number(files, "numa_node")
    return PciDevice(
        address=address,
        vendor_id=_number(files, "vendor"),
        device_id=_number(files, "device"),
        class_code=class_code,
        subsystem_id=device if isinstance(vendor, Unread) or isinstance(device, Unread) else vendor << 16 | device,
        bars=bars,
        windows=windows,
        path=path,
        root_bus=root,
        link=Link(
            _speed(files, "current_link_speed"),
            _lanes(files, "current_link_width"),
            _speed(files, "max_link_speed"),
            _lanes(files, "max_link_width"),
        ),
        aspm=_aspm(files),
        driver=driver,
        aer=_aer(files),
        config=config if config is not None else Unread("configuration space was not read"),
        numa_node=node,
        power_state=state[0] if state else NOT_SHOWN,
        enabled=enabled if isinstance(enabled, Unread) else enabled > 0,
    )


def _number(files: Mapping[str, list[str]], name: str) -> Maybe[int]:
    lines = files.get(name)
    if not lines:
        return Unread(f"sysfs shows no {name}")
    try:
        return int(lines[0], 0)
    except ValueError:
        return Unread(f"sysfs {name}: {lines[0][:40]!r} is not a number")


def _speed(files: Mapping[str, list[str]], name: str) -> Maybe[float]:
    lines = files.get(name)
    if not lines:
        return Unread(f"sysfs shows no {name}")
    found = re.match(r"(\d+(?:\.\d+)?) GT/s", lines[0])
    return float(found[1]) if found else Unread(f"sysfs {name}: {lines[0][:40]}")


def _lanes(files: Mapping[str, list[str]], name: str) -> Maybe[int]:
    lanes = _number(files, name)
    # 0, 63 and 255 are what a port without a link or a dead device shows.
    return Unread(f"sysfs {name}: no link ({lanes})") if isinstance(lanes, int) and lanes in (0, 63, 255) else lanes


def _aspm(files: Mapping[str, list[str]]) -> Maybe[str]:
    states = [name.upper() for name in ("l0s", "l1") if files.get(f"link/{name}_aspm", ["0"])[0] == "1"]
    if not any(name.startswith("link/") for name in files):
        return NOT_SHOWN
    return " ".join(states) or "Disabled"


def _aer(files: Mapping[str, list[str]]) -> Maybe[Aer]:
    totals = []
    for name in ("aer_dev_correctable", "aer_dev_nonfatal", "aer_dev_fatal"):
        lines = files.get(name)
        if lines is None:
            return Unread("sysfs shows no AER counters")
        total = next((line.split()[-1] for line in lines if line.startswith("TOTAL")), "")
        counts = [line.split()[-1] for line in lines if not line.startswith("TOTAL") and len(line.split()) > 1]
        if total.isdecimal():
            totals.append(int(total))
        elif counts and all(count.isdecimal() for count in counts):
            totals.append(sum(map(int, counts)))
        else:
            return Unread(f"sysfs {name} is not in a known form")
    return Aer(*totals)


def _resources(lines: list[str] | None, is_bridge: bool) -> tuple[Maybe[tuple[Bar, ...]], Maybe[tuple[Window, ...]]]:
    """BARs and bridge windows of a `resource` file: `start end flags` per line.

    Lines 1 to 6 are the BARs, line 7 the ROM. A bridge's windows come last: their flag IORESOURCE_WINDOW is shown by some
    kernels only (a 6.1 shows 0x200 and 0x102201), so it is the place in the file that tells them.
    """
    if not lines:
        nothing = Unread("sysfs shows no resource file")
        return nothing, nothing
    bars: list[Bar] = []
    windows: list[Window] = []
    for index, line in enumerate(lines):
        try:
            start, end, flags = (int(part, 16) for part in line.split())
        except ValueError:
            bad = Unread(f"resource line {index + 1} is not in a known form: {line[:60]!r}")
            return bad, bad
        if not flags & _IORESOURCE_MEM:
            continue
        wide, pref = bool(flags & _IORESOURCE_MEM_64), bool(flags & _IORESOURCE_PREFETCH)
        if flags & _IORESOURCE_WINDOW or (is_bridge and index > _ROM_LINE):
            windows.append(Window(start, end, wide, pref))
        elif index < 6:
            unset = start == 0 or bool(flags & _IORESOURCE_UNSET)
            bars.append(Bar(index, start, end - start + 1, wide, pref, "unassigned" if unset else "assigned"))
    return tuple(bars), tuple(windows)


def _path(target: str | None) -> tuple[Maybe[tuple[str, ...]], Maybe[str]]:
    """Bridges above a device and its root bus, out of the target of its sysfs link."""
    if target is None:
        nothing = Unread("sysfs shows no path to the device")
        return nothing, nothing
    parts = target.split("/")
    root = next((part[3:] for part in parts if re.fullmatch(r"pci[0-9a-f]{4,}:[0-9a-f]{2}", part)), None)
    above = tuple(part for part in parts[:-1] if pci_address.normal(part))
    return above, root or Unread("the path names no root bus")


# ---------------------------------------------------------------------------------------------------- lspci

_LSPCI_HEAD = re.compile(
    r"(?:IOMMU Group \d+ |=== )?(?P<address>(?:[0-9a-f]{4,}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])"
    r"(?: (?P<what>[^\[:]+?)(?: \[(?P<class>[0-9a-f]{4})\])?: (?P<name>.*))?$"
)
_LSPCI_IDS = re.compile(r"\[([0-9a-f]{4}):([0-9a-f]{4})\]")
_LSPCI_ASKED = re.compile(r"lspci .*-s (\S+)")
_CLASS_BY_WORDS = {
    "3D controller": 0x030200,
    "VGA compatible controller": 0x030000,
    "PCI bridge": 0x060400,
    "Host bridge": 0x060000,
}
_REGION = re.compile(
    r"(?:Region (?P<index>\d): )?Memory at (?P<start><\S+>|[0-9a-f]+) "
    r"\((?P<width>32|64)-bit, (?P<non>non-)?prefetchable\)(?: \[\w+\])*(?: \[size=(?P<size>\d+)(?P<unit>[KMGT]?)\])?"
)
_BEHIND = re.compile(r"(Prefetchable m|M)emory behind bridge: (?:([0-9a-f]+)-([0-9a-f]+)|(\[disabled\]|None))(.*)$")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def read_lspci(text: str) -> tuple[PciDevice, ...]:
    """Devices of `lspci`, `-nn`, `-v`, `-vv`, `-vvv`, with or without domains, or of pieces of it quoted somewhere."""
    devices: list[PciDevice] = []
    current: PciDevice | None = None
    for line in text.splitlines():
        asked = _LSPCI_ASKED.search(line) if line.startswith("$ ") else None
        if asked and (address := pci_address.normal(asked[1])):
            current = _kept(devices, current, PciDevice(address))
        elif head := _LSPCI_HEAD.match(line.rstrip()):
            current = _kept(devices, current, _lspci_head(head))
        elif line.startswith(("#", "$")) or not line.strip():
            continue
        else:
            detail = _lspci_detail(current or PciDevice(UNKNOWN_ADDRESS), line.strip())
            if detail is not None:
                current = detail
    _kept(devices, current, None)
    return tuple(devices)


def _kept(devices: list[PciDevice], current: PciDevice | None, following: PciDevice | None) -> PciDevice | None:
    if current is not None:
        devices.append(current)
    return following


def _lspci_head(head: re.Match[str]) -> PciDevice:
    address = pci_address.normal(head["address"]) or UNKNOWN_ADDRESS
    if head["what"] is None:
        return PciDevice(address)
    ids = _LSPCI_IDS.findall(head["name"])
    words = _CLASS_BY_WORDS.get(head["what"].strip())
    class_code: Maybe[int] = int(head["class"], 16) << 8 if head["class"] else (words if words else NOT_SHOWN)
    return PciDevice(
        address,
        # NVIDIA's name in the vendor column comes from the vendor id; the card's own name is not trusted for its id.
        vendor_id=int(ids[-1][0], 16) if ids else NVIDIA if head["name"].startswith("NVIDIA Corporation") else NOT_SHOWN,
        device_id=int(ids[-1][1], 16) if ids else Unread("lspci was not asked for ids (-nn)"),
        class_code=class_code,
        name=re.sub(r"\s*\(rev \w+\)$", "", head["name"]).strip(),
    )


def _lspci_detail(device: PciDevice, line: str) -> PciDevice | None:
    """The device with what this line adds, or None when the line says nothing of interest."""
    if region := _REGION.match(line):
        bars = () if isinstance(device.bars, Unread) else device.bars
        index = int(region["index"]) if region["index"] else _next_index(bars)
        start = 0 if region["start"].startswith("<") else int(region["start"], 16)
        size = int(region["size"] or 0) * _UNITS[region["unit"] or ""]
        state: Literal["assigned", "unassigned", "ignored"] = "assigned" if start else "unassigned"
        if region["start"] == "<ignored>":
            state = "ignored"
        bar = Bar(index, start, size, region["width"] == "64", not region["non"], state)
        return dataclasses.replace(device, bars=(*bars, bar))
    if behind := _BEHIND.match(line):
        windows = () if isinstance(device.windows, Unread) else device.windows
        if behind[4]:
            return dataclasses.replace(device, windows=windows)
        wide = "[64-bit]" in behind[5] or int(behind[3], 16) >= FOUR_GIB
        window = Window(int(behind[2], 16), int(behind[3], 16), wide, behind[1].startswith("P"))
        return dataclasses.replace(device, windows=(*windows, window))
    if found := re.match(r"LnkCap:.*?Speed ([\d.]+)GT/s, Width x(\d+)", line):
        link = dataclasses.replace(device.link, max_speed_gt_s=float(found[1]), max_width=int(found[2]))
        return dataclasses.replace(device, link=link)
    if found := re.match(r"LnkSta:\s*Speed ([\d.]+)GT/s(?: \([a-z]+\))?, Width x(\d+)", line):
        link = dataclasses.replace(device.link, speed_gt_s=float(found[1]), width=int(found[2]))
        return dataclasses.replace(device, link=link)
    if found := re.match(r"LnkCtl:\s*ASPM ([^;]+);", line):
        return dataclasses.replace(device, aspm=found[1].replace(" Enabled", ""))
    if found := re.match(r"Kernel driver in use: (\S+)", line):
        return dataclasses.replace(device, driver=found[1])
    if "<access denied>" in line:
        denied = Unread("lspci needs root to show the link")
        return dataclasses.replace(device, link=Link(denied, denied, denied, denied), aspm=denied)
    return None


def _next_index(bars: tuple[Bar, ...]) -> int:
    """`lspci -v` prints no BAR numbers: a 64-bit BAR takes two of them."""
    return bars[-1].index + (2 if bars[-1].is_64bit else 1) if bars else 0


# ------------------------------------------------------------------------------------------- lshw, kernel log


def read_lshw(text: str) -> tuple[PciDevice, ...]:
    """Display devices of `lshw -C display -numeric`: their ids, driver and memory ranges."""
    devices: list[PciDevice] = []
    for block in re.split(r"^\s*\*-display.*$", text, flags=re.MULTILINE)[1:]:
        fields = dict(re.findall(r"^\s+([a-z ]+): (.*)$", block, flags=re.MULTILINE))
        address = pci_address.normal(fields.get("bus info", "").removeprefix("pci@"))
        if not address:
            continue
        ids = re.search(r"\[([0-9A-F]{4}):([0-9A-F]{4})\]", fields.get("product", ""), re.IGNORECASE)
        ranges = [(int(a, 16), int(b, 16)) for a, b in re.findall(r"\bmemory:([0-9a-f]+)-([0-9a-f]+)", block)]
        bars, index = [], 0
        for start, end in ranges:
            # lshw prints no widths. NVIDIA's BAR0 is the one 32-bit BAR; those after it are 64-bit (two numbers each).
            wide = index > 0
            bars.append(Bar(index, start, end - start + 1, wide, wide))
            index += 2 if wide else 1
        driver = re.search(r"driver=(\S+)", fields.get("configuration", ""))
        devices.append(
            PciDevice(
                address,
                vendor_id=int(ids[1], 16) if ids else NOT_SHOWN,
                device_id=int(ids[2], 16) if ids else NOT_SHOWN,
                class_code=0x030200 if "3D controller" in fields.get("description", "") else 0x030000,
                name=fields.get("product", "").split(" [")[0] or NOT_SHOWN,
                bars=tuple(bars) if bars else NOT_SHOWN,
                driver=driver[1] if driver else NOT_SHOWN,
            )
        )
    return tuple(devices)


def from_events(events: Iterable[Event]) -> tuple[PciDevice, ...]:
    """Devices as the kernel log tells them: ids, and BARs where the last word on each counts.

    A card that NVIDIA's driver complains about is NVIDIA's, also where the line with its ids is gone.
    """
    ids: dict[str, DeviceLine] = {}
    bars: dict[str, dict[int, Bar]] = {}
    refused: dict[str, None] = {}
    for event in events:
        if isinstance(event, DeviceLine):
            ids[event.address] = event
        elif isinstance(event, BarLine):
            size = event.end - event.start + 1
            state: Literal["assigned", "unassigned"] = "assigned" if event.start else "unassigned"
            bars.setdefault(event.address, {})[event.bar] = Bar(
                event.bar, event.start, size, event.is_64bit, event.prefetchable, state
            )
        elif isinstance(event, InvalidBar):
            refused[event.address] = None
    found = [
        PciDevice(
            address,
            vendor_id=line.vendor_id,
            device_id=line.device_id,
            class_code=line.class_code,
            bars=_placed(tuple(bars.get(address, {}).values())),
        )
        for address, line in ids.items()
    ]
    found += [PciDevice(address, vendor_id=NVIDIA, class_code=0x030000) for address in refused if address not in ids]
    return tuple(found)


def _placed(bars: tuple[Bar, ...]) -> Maybe[tuple[Bar, ...]]:
    """BARs of a log; those that the firmware left at 0 may have got their address later, without a line about it."""
    if not bars:
        return NOT_SHOWN
    if any(bar.state == "unassigned" for bar in bars):
        return Unread("the log shows its BARs before the kernel gave them addresses")
    return bars


# ---------------------------------------------------------------------------------------------------- merging

V = TypeVar("V")


def merge(*sources: Iterable[PciDevice]) -> tuple[PciDevice, ...]:
    """One list of devices by address; for each field the first source that has a value wins."""
    merged: dict[str, PciDevice] = {}
    for source in sources:
        for device in source:
            known = merged.get(device.address)
            merged[device.address] = device if known is None else _merged(known, device)
    return tuple(merged[address] for address in sorted(merged))


def _merged(first: PciDevice, second: PciDevice) -> PciDevice:
    changes = {
        item.name: getattr(second, item.name)
        for item in dataclasses.fields(PciDevice)
        if isinstance(getattr(first, item.name), Unread) and not isinstance(getattr(second, item.name), Unread)
    }
    link = Link(*(_first(getattr(first.link, item.name), getattr(second.link, item.name)) for item in dataclasses.fields(Link)))
    return dataclasses.replace(first, **changes, link=link)


def _first(first: Maybe[V], second: Maybe[V]) -> Maybe[V]:
    return second if isinstance(first, Unread) else first
