"""PCI addresses as the kernel, the driver, lspci and nvidia-smi spell them, in one form: dddd:bb:dd.f, lower case."""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?", re.IGNORECASE)


def normal(text: str) -> str | None:
    """The address in the form 0000:01:00.0, or None when `text` is not one.

    Accepts `00000000:1C:00.0` (nvidia-smi), `0000:01:00` (Xid lines have no function digit) and `1c:00.0` (lspci).
    """
    found = _ADDRESS.fullmatch(text.strip())
    if not found:
        return None
    domain, bus, device, function = found.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function or '0'}".lower()


def root_bus(address: str) -> str:
    """`0000:01` of 0000:01:00.0: the domain and bus, as in `pci_bus 0000:01`."""
    return address.rsplit(":", 1)[0]
