"""What the catalogue says of a card on the PCI bus: by its PCI id, never by its name."""

from __future__ import annotations

from laoka.catalog.gpus import Gpu, by_device_id
from laoka.host.pci import PciDevice
from laoka.host.unread import Unread

MIB = 1 << 20


def card(device: PciDevice) -> Gpu | None:
    """The catalogue's row of a card; None when its id is unread or the catalogue lacks it."""
    return None if isinstance(device.device_id, Unread) else by_device_id(f"{device.device_id:04x}")


def bar1_bytes(device: PciDevice) -> int | None:
    """Size of BAR1 in bytes; None where the catalogue does not know it."""
    known = card(device)
    return known.bar1_mib * MIB if known and known.bar1_mib else None
