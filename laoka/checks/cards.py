"""Cards: are they all there, do they answer, and does the driver see the same ones as the PCI bus."""

from __future__ import annotations

from collections.abc import Iterator

from laoka.checks.expected import card
from laoka.checks.facts import cards, catalogue_cards, events, listed_cards, name_of
from laoka.checks.finding import Outcome
from laoka.checks.registry import Wanted, check, fail, info, ok, unread, warn
from laoka.host.kernel_log import DeviceLine, RmInitFailure
from laoka.host.pci import DISPLAY_CLASS, NVIDIA
from laoka.host.report import HostReport
from laoka.host.unread import Unread

# NV_STATUS values that RmInitAdapter was seen with (nvstatuscodes.h); the case names pick the wording.
RM_STATUS = {
    0x0F: "gpu-is-lost",
    0x1A: "insufficient-resources",
    0x1C: "insufficient-power",
    0x26: "invalid-device",
    0x40: "invalid-state",
    0x56: "not-supported",
    0x62: "reset-required",
    0x65: "timeout",
}


@check("cards.present", gate=True, source="PCI vendor id 10de and class 03xx; the inventory's count")
def present(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """As many NVIDIA cards on the PCI bus as the inventory says, and at least one."""
    gpus = report.gpus
    if isinstance(gpus, Unread):
        yield unread(gpus)
        return
    evidence = tuple(f"{gpu.address} {gpu.id_text}" for gpu in gpus) or ("no NVIDIA display or 3D controller on PCI",)
    expected, gone = wanted.expected_gpus, _gone(report)
    if not report.pci_complete and len(gpus) < (expected or 1):
        yield unread(Unread("the input does not list every PCI device"), *evidence)
    elif not gpus:
        yield fail("none", *evidence, *gone)
    elif expected is not None and len(gpus) < expected:
        yield fail("missing", *evidence, *gone, found=len(gpus), expected=expected)
    elif expected is not None and len(gpus) > expected:
        yield fail("surplus", *evidence, found=len(gpus), expected=expected)
    elif expected is None and gone:
        yield fail("gone", *evidence, *gone, found=len(gpus), gone=len(gone))
    else:
        yield ok(*evidence, found=len(gpus))


def _gone(report: HostReport) -> tuple[str, ...]:
    """Cards that this boot's kernel found and that sysfs lists no longer: pulled out, or removed and not found again."""
    listed = {gpu.address for gpu in cards(report)}
    found = {
        event.address: f"{event.address} {event.vendor_id:04x}:{event.device_id:04x} was found since boot, and is gone"
        for event in events(report, DeviceLine)
        if event.vendor_id == NVIDIA and event.class_code >> 16 == DISPLAY_CLASS
    }
    return tuple(text for address, text in found.items() if address not in listed) if report.pci_complete else ()


@check("cards.answer", gate=True, source="a configuration space of all ones: nothing answers at that address")
def answer(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """A card whose configuration space reads all ones has left the bus, though sysfs still lists it."""
    for gpu in cards(report):
        if gpu.answers is False:
            yield fail("dead", f"{gpu.address}: configuration space reads ff throughout", subject=gpu.address)
        elif gpu.answers is True:
            yield ok(f"{gpu.address} answers", subject=gpu.address)


@check("cards.known", source="the catalogue's PCI ids; a card sold as V100 PCIe 32GB is 10de:1df0 and calls itself PG500-216")
def known(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Which card each one really is, by its PCI id."""
    for gpu in cards(report):
        row = card(gpu)
        if row:
            yield ok(f"{gpu.address} {gpu.id_text}: {row.name}", subject=gpu.address, card=row.name)
        elif isinstance(gpu.device_id, Unread):
            yield unread(gpu.device_id, subject=gpu.address)
        else:
            yield info("not-in-catalogue", f"{gpu.address} {gpu.id_text}", subject=gpu.address, pci_id=gpu.id_text)


@check("cards.one-module", source="Volta needs the proprietary kernel module, Blackwell the open one; only one can be loaded")
def one_module(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """No mix of cards that need different kernel modules or driver branches."""
    rows = catalogue_cards(report)
    flavours = [set(row.module_flavours) for row in rows]
    if rows and not set.intersection(*flavours):
        yield fail("mixed", *(f"{row.name}: {', '.join(row.module_flavours)}" for row in rows))
    elif len(rows) > 1:
        yield ok(*(f"{row.name}: {', '.join(row.module_flavours)}" for row in rows))


@check("cards.nvidia-smi", source="one wedged card blocks NVML for all: every nvidia-smi hangs in D state")
def nvidia_smi(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """nvidia-smi answers, and completely."""
    listing, trouble = report.nvidia.listing, report.nvidia.trouble
    if report.nvidia.hung:
        yield fail("hung", listing.reason if isinstance(listing, Unread) else "nvidia-smi hung")
    elif trouble.no_devices:
        yield fail("no-devices", "nvidia-smi: No devices were found")
    elif trouble.cannot_reach_driver:
        yield fail("no-driver", "nvidia-smi couldn't communicate with the NVIDIA driver")
    elif trouble.error_cells:
        yield fail("errors", f"nvidia-smi shows ERR! in {trouble.error_cells} places")
    elif isinstance(listing, Unread):
        yield unread(listing)
    else:
        yield ok(f"{len(listing.gpus)} cards listed")


@check("cards.listed", source="PCI addresses of sysfs and of nvidia-smi")
def listed(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """nvidia-smi lists the cards that the bus has."""
    shown = listed_cards(report)
    if isinstance(shown, Unread) or isinstance(report.gpus, Unread) or not report.pci_complete:
        return
    bus, tool = {gpu.address for gpu in report.gpus}, {name_of(gpu) for gpu in shown}
    missing, ghosts = sorted(bus - tool), sorted(tool - bus)
    if missing:
        yield fail("not-listed", *(f"{address} is on the bus, not in nvidia-smi" for address in missing))
    if ghosts:
        yield fail("not-on-bus", *(f"{address} is in nvidia-smi, not on the bus" for address in ghosts))
    if not missing and not ghosts:
        yield ok(*sorted(bus))


@check("cards.handles", source="`Unable to determine the device handle`, in its six spellings")
def handles(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """nvidia-smi can open every card; it may say so on stderr and still end with status 0."""
    for lost in report.nvidia.trouble.lost:
        where = lost.address or (f"GPU {lost.index}" if lost.index is not None else "a GPU")
        yield fail("lost", f"no handle for {where}: {lost.reason}", subject=where)


@check("cards.initialised", source="RmInitAdapter failed! (init:rm:line); rm is an NV_STATUS of nvstatuscodes.h")
def initialised(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """The driver could start each card; if not, its status code says why."""
    seen = False
    for address, status in dict.fromkeys((event.address, event.rm_status) for event in events(report, RmInitFailure)):
        seen = True
        evidence = f"{address or 'a card'}: RmInitAdapter failed, status {status:#04x}"
        yield fail(RM_STATUS.get(status, "other"), evidence, subject=address or "", status=f"{status:#04x}")
    if not seen and cards(report) and not isinstance(report.kernel_log.boot, Unread):
        yield ok("no RmInitAdapter failure in the kernel log")


@check("cards.links-between", source="nvidia-smi nvlink -s; on an SXM2 adapter six inactive links are normal")
def nvlinks(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """NVLinks, where they were listed."""
    links = report.nvidia.links
    for index in dict.fromkeys(link.gpu_index for link in (() if isinstance(links, Unread) else links)):
        own = [link for link in (() if isinstance(links, Unread) else links) if link.gpu_index == index]
        active = sum(link.speed_gb_s is not None for link in own)
        evidence = f"GPU {index}: {active} of {len(own)} links active"
        if active in (0, len(own)):
            yield ok(evidence, subject=f"GPU {index}")
        else:
            yield warn("some", evidence, subject=f"GPU {index}", active=active, all=len(own))
