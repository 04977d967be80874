"""GPUs by PCI id: what a card is, has and stands. A name is never trusted; the PCI id is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from laoka.catalog.load import CatalogError, Row, load, parse, unique

FILE = "gpus.toml"

Flavour = Literal["proprietary", "open"]
Family = Literal["maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell"]


@dataclass(frozen=True, kw_only=True)
class Gpu(Row):
    """One kind of card. A figure that has no source is None: unknown, not zero."""

    name: str
    device_ids: tuple[str, ...]
    """PCI ids, "10de:1db6"."""
    family: Family
    sm: int
    """Compute capability times ten: 70 for Volta."""
    form: Literal["pcie", "sxm2", "sxm3", "sxm4", "sxm5", "mezzanine"]
    module_flavours: tuple[Flavour, ...]
    """Kernel modules that drive it: open ones need a GSP (Turing and later), and Blackwell has open ones only."""
    memory_mib: int | None = None
    """Memory as the driver shows it (with ECC on where the card has it)."""
    bar0_mib: int | None = None
    bar1_mib: int | None = None
    bar3_mib: int | None = None
    memory_bandwidth_gb_s: float | None = None
    """Peak memory bandwidth, 10^9 bytes a second."""
    fp16_tensor_tflops: float | None = None
    """Peak of FP16 matrix products without sparsity, FP32 accumulation; None where the card has no tensor cores or no figure."""
    power_limit_min_w: int | None = None
    power_limit_max_w: int | None = None
    power_limit_default_w: int | None = None
    gpu_max_operating_c: int | None = None
    gpu_slowdown_c: int | None = None
    gpu_shutdown_c: int | None = None
    memory_max_operating_c: int | None = None
    first_driver_branch: int | None = None
    last_driver_branch: int | None = None
    """The last driver branch that drives it; None when none has dropped it."""
    passive: bool | None = None
    """True when the card has no fan of its own."""
    notes: str = ""

    @property
    def module_flavour(self) -> Flavour | Literal["either"]:
        """The kernel module that it needs: "proprietary", "open", or "either"."""
        return "either" if len(self.module_flavours) > 1 else self.module_flavours[0]


def check(rows: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """What the types alone don't say. Errors: CatalogError."""
    unique(rows, "device_ids", FILE)
    for row in rows:
        for device_id in row.device_ids:
            if not re.fullmatch(r"10de:[0-9a-f]{4}", device_id):
                raise CatalogError(f"{FILE}: {row.id}: device id {device_id!r} is not like 10de:1db6")
        if not row.module_flavours:
            raise CatalogError(f"{FILE}: {row.id}: module_flavours is empty")
        low, high = row.power_limit_min_w, row.power_limit_max_w
        if low is not None and high is not None and low > high:
            raise CatalogError(f"{FILE}: {row.id}: power_limit_min_w {low} is above power_limit_max_w {high}")
    return rows


def parse_gpus(text: str, name: str = FILE) -> tuple[Gpu, ...]:
    """GPUs of a TOML text. Errors: CatalogError."""
    return check(parse(text, name, "gpu", Gpu))


@cache
def gpus() -> tuple[Gpu, ...]:
    """Every GPU of the catalogue. Errors: CatalogError."""
    return check(load(FILE, "gpu", Gpu))


def by_device_id(device_id: str) -> Gpu | None:
    """The card with this PCI id ("10de:1db6", any case, with or without 0x), or None when the catalogue lacks it."""
    wanted = device_id.strip().lower().replace("0x", "")
    wanted = wanted if ":" in wanted else f"10de:{wanted}"
    return next((gpu for gpu in gpus() if wanted in gpu.device_ids), None)


def by_name(name: str) -> Gpu | None:
    """The card of a catalogue id, or of the beginning of only one: "v100-pcie-32gb", "H200", "4080", "GeForce RTX 4080".

    Case, spaces and the maker's words don't matter. None for a name that is not known, or could be several cards ("v100").
    """
    wanted = re.sub(r"[\s_]+", "-", name.strip().lower())
    wanted = re.sub(r"^(nvidia-|tesla-|geforce-)+", "", wanted)
    for text in (wanted, f"rtx-{wanted}"):
        found = [gpu for gpu in gpus() if gpu.id == text] or [gpu for gpu in gpus() if gpu.id.startswith(f"{text}-")]
        if len(found) == 1:
            return found[0]
    return None
