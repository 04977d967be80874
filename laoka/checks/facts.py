"""Small questions that several checks ask of a report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from laoka.catalog.gpus import Gpu
from laoka.checks.expected import card
from laoka.host.kernel_log import Event
from laoka.host.nvidia_smi import SmiGpu
from laoka.host.pci import PciDevice
from laoka.host.report import HostReport
from laoka.host.unread import Maybe, Unread

E = TypeVar("E")


def cards(report: HostReport) -> tuple[PciDevice, ...]:
    """NVIDIA's cards on PCI; none where PCI is unread: cards.present says that."""
    return () if isinstance(report.gpus, Unread) else report.gpus


def catalogue_cards(report: HostReport) -> tuple[Gpu, ...]:
    """The catalogue's rows of the cards that it knows."""
    return tuple(known for gpu in cards(report) if (known := card(gpu)))


def has_volta_or_older(report: HostReport) -> bool:
    """True when a card is one that only the proprietary module drives."""
    return any(known.module_flavour == "proprietary" for known in catalogue_cards(report))


def listed_cards(report: HostReport) -> Maybe[tuple[SmiGpu, ...]]:
    """nvidia-smi's cards."""
    listing = report.nvidia.listing
    return listing if isinstance(listing, Unread) else listing.gpus


def name_of(gpu: SmiGpu) -> str:
    """The PCI address of a card of nvidia-smi, the subject of findings about it."""
    return gpu.address or "?"


def events(report: HostReport, kind: type[E]) -> Iterator[E]:
    """Events of one kind of this boot's kernel log."""
    log: Maybe[tuple[Event, ...]] = report.kernel_log.boot
    for event in () if isinstance(log, Unread) else log:
        if isinstance(event, kind):
            yield event


def bound_in_gib(size_bytes: int) -> str:
    """`20.6 GiB`."""
    return f"{size_bytes / (1 << 30):.1f} GiB"
