"""What a card should show on the PCI bus, by device id."""

from __future__ import annotations

GIB = 1 << 30
# lshw and lspci dumps of V100 PCIe 32GB (10de:1db6), SXM2 16GB (1db1), P100 16GB (kata docs), M40 24GB (ReBarUEFI#11)
_BAR1_GIB = {
    0x1DB0: 16, 0x1DB1: 16, 0x1DB2: 16, 0x1DB3: 16, 0x1DB4: 16, 0x1DF5: 16, 0x15F8: 16, 0x15F9: 16,
    0x1DB5: 32, 0x1DB6: 32, 0x1DB7: 32, 0x1DB8: 32, 0x1DF0: 32, 0x1DF6: 32, 0x1B38: 32, 0x17FD: 32,
}  # fmt: skip


def bar1_bytes(device_id: int) -> int | None:
    """Size of BAR1 in bytes, or None for a card that is not known here."""
    size = _BAR1_GIB.get(device_id)
    return None if size is None else size * GIB
