"""The PCI sensor: is every expected card on the bus, the same one, and alive? Reads sysfs only, never the driver.

By plain system calls: it looks every second for ever, and pathlib costs three times what the files themselves do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from laoka.agent.config import ExpectedGpu
from laoka.agent.signals import Reading, Signal

HEADER_BYTES = 64
ATTRIBUTE_BYTES = 4096
NVIDIA = "10de"
# Classes 0300 (VGA controller) and 0302 (3D controller): the audio and USB functions of a card are not cards.
GPU_CLASSES = ("0x0300", "0x0302")


@dataclass(frozen=True)
class SeenDevice:
    """What sysfs shows of one device. `header` is the beginning of its configuration space; None: could not be read."""

    bdf: str
    device_id: str | None
    header: bytes | None
    fault: str = ""
    driver: str | None = None
    link_speed: str = ""
    link_width: str = ""
    max_link_width: str = ""

    @property
    def dead(self) -> bool:
        """True when every register reads all ones: the link is dead though the kernel still lists the card."""
        return bool(self.header) and set(self.header or b"") == {0xFF}

    @property
    def narrow(self) -> bool:
        """True when the link has fewer lanes than the card has. Speed falls when a card idles, width does not."""
        widths = (self.link_width, self.max_link_width)
        return all(width.isdecimal() for width in widths) and 0 < int(widths[0]) < int(widths[1])


def read_devices(sysfs_root: str, expected: Sequence[ExpectedGpu], kinds: dict[str, bool]) -> tuple[dict[str, SeenDevice], str]:
    """The NVIDIA display devices on the bus and whatever stands at the expected addresses, by address; and, where the
    bus itself can't be read, why (else an empty text).

    `kinds` remembers from look to look which device is an NVIDIA display device: a server has a hundred, asked every second.
    """
    folder = f"{sysfs_root}/bus/pci/devices"
    try:
        names = set(os.listdir(folder))  # noqa: PTH208
    except OSError as error:
        return {}, f"{folder}: {error.strerror}"
    for name in kinds.keys() - names:
        del kinds[name]
    wanted = {gpu.bdf for gpu in expected}
    found = {}
    for name in sorted(names):
        if name not in kinds:
            kinds[name] = _is_gpu(f"{folder}/{name}")
        if name in wanted or kinds[name]:
            device = _read_device(folder, name)
            if device is not None:
                found[name] = device
    return found, ""


def _is_gpu(device: str) -> bool:
    return _text(f"{device}/vendor") == f"0x{NVIDIA}" and _text(f"{device}/class").startswith(GPU_CLASSES)


def _read_device(folder: str, bdf: str) -> SeenDevice | None:
    device = f"{folder}/{bdf}"
    vendor, kind = _text(f"{device}/vendor"), _text(f"{device}/device")
    header: bytes | None = None
    fault = ""
    try:
        read = _bytes(f"{device}/config", HEADER_BYTES)
        if len(read) == HEADER_BYTES:
            header = read
        else:
            fault = f"config: only {len(read)} bytes"
    except OSError as error:
        fault = f"config: {error.strerror}"
        if not Path(device).exists():
            return None  # it went away while we looked
    try:
        driver = os.readlink(f"{device}/driver").rpartition("/")[2]  # noqa: PTH115
    except OSError:
        driver = None
    return SeenDevice(
        bdf=bdf,
        device_id=f"{vendor[2:]}:{kind[2:]}" if vendor and kind else None,
        header=header,
        fault=fault,
        driver=driver,
        link_speed=_text(f"{device}/current_link_speed"),
        link_width=_text(f"{device}/current_link_width"),
        max_link_width=_text(f"{device}/max_link_width"),
    )


def _bytes(path: str, most: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, most)
    finally:
        os.close(descriptor)


def _text(path: str) -> str:
    try:
        return _bytes(path, ATTRIBUTE_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return ""


def judge(expected: Sequence[ExpectedGpu], devices: dict[str, SeenDevice], bus_fault: str = "") -> Reading:
    """Compare what is there with what has to be there.

    Signals: card_gone (no device at the address), card_swapped (another device id), config_dead (all ones). A device whose
    files can't be read makes the verdict `unknown`, and so does having no card to expect.
    """
    if bus_fault:
        return Reading("pci", "unknown", detail=bus_fault)
    signals: list[Signal] = []
    unread: dict[str, str] = {}
    cards = []
    for gpu in expected:
        device = devices.get(gpu.bdf)
        state = "present"
        if device is None:
            state = "gone"
            signals.append(Signal("card_gone", "pci", gpu.bdf, seen=f"no device {gpu.bdf} on the PCI bus"))
        elif device.dead:
            state = "dead"
            signals.append(Signal("config_dead", "pci", gpu.bdf, seen=f"{gpu.bdf}: configuration space reads all 0xff"))
        elif device.device_id is not None and device.device_id != gpu.device_id:
            state = "swapped"
            values = {"found": device.device_id, "expected": gpu.device_id}
            seen = f"{gpu.bdf}: device id {device.device_id}, expected {gpu.device_id}"
            signals.append(Signal("card_swapped", "pci", gpu.bdf, seen=seen, values=values))
        elif device.driver is not None and device.driver != "nvidia":
            # No driver at all is NVML's to tell; another one (vfio-pci, nouveau) hides the card for good.
            other = {"driver": device.driver}
            seen = f"{gpu.bdf}: driver {device.driver}, expected nvidia"
            signals.append(Signal("driver_other", "pci", gpu.bdf, subject=device.driver, seen=seen, values=other))
        elif device.device_id is None or device.header is None:
            state = "unread"
            unread[gpu.bdf] = f"{gpu.bdf}: {device.fault or 'vendor and device can not be read'}"
        cards.append(
            {
                "bdf": gpu.bdf,
                "state": state,
                "device_id": device.device_id if device else None,
                "driver": device.driver if device else None,
                "link": f"{device.link_speed} x{device.link_width}" if device and state == "present" else "",
            }
        )
    known = {gpu.bdf for gpu in expected}
    extra = sorted(bdf for bdf, device in devices.items() if bdf not in known)
    seen_count = sum(card["state"] in ("present", "swapped") for card in cards) + sum(not devices[bdf].dead for bdf in extra)
    facts = {"expected": len(expected), "seen": seen_count, "cards": cards, "unexpected": extra}
    if signals:
        return Reading("pci", "bad", tuple(signals), detail=signals[0].seen, facts=facts, unread=frozenset(unread))
    if unread:
        return Reading("pci", "unknown", detail=next(iter(unread.values())), facts=facts, unread=frozenset(unread))
    if not expected:
        return Reading("pci", "unknown", detail="no card is expected: [[gpu]] is missing from the settings", facts=facts)
    return Reading("pci", "ok", detail=f"{len(expected)} of {len(expected)} cards on the bus", facts=facts)
