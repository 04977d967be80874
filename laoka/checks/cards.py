"""Cards: are they all there, do they answer, and does the driver see the same ones as the PCI bus."""

from __future__ import annotations

from collections.abc import Iterator

from laoka.checks.finding import Outcome
from laoka.checks.registry import Wanted, check, fail, ok, unread
from laoka.host.report import HostReport
from laoka.host.unread import Unread


@check("cards.present", gate=True, source="PCI vendor id 10de and class 03xx; gpud's expected count")
def present(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """As many NVIDIA cards on the PCI bus as the inventory says, and at least one."""
    gpus = report.gpus
    if isinstance(gpus, Unread):
        yield unread(gpus)
        return
    evidence = tuple(f"{gpu.address} {gpu.id_text}" for gpu in gpus) or ("no NVIDIA display or 3D controller on PCI",)
    expected = wanted.expected_gpus
    if not report.pci_complete and len(gpus) < (expected or 1):
        yield unread(Unread("the input does not list every PCI device"), *evidence)
        return
    if not gpus:
        yield fail("none", *evidence, expected="" if expected is None else expected)
    elif expected is not None and len(gpus) < expected:
        yield fail("missing", *evidence, found=len(gpus), expected=expected)
    elif expected is not None and len(gpus) > expected:
        yield fail("surplus", *evidence, found=len(gpus), expected=expected)
    else:
        yield ok(*evidence, found=len(gpus))


@check(
    "cards.answer",
    gate=True,
    source="configuration space of all ones: PCI Express base specification, Linux kernel practice",
)
def answer(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """A card whose configuration space reads all ones has left the bus, though sysfs still lists it."""
    gpus = report.gpus
    for gpu in () if isinstance(gpus, Unread) else gpus:
        if gpu.answers is False:
            yield fail("dead", f"{gpu.address} configuration space reads ff throughout", subject=gpu.address)
        elif gpu.answers is True:
            yield ok(f"{gpu.address} answers", subject=gpu.address)
