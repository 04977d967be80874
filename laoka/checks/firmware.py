"""Firmware: can this board give the cards their BARs, and what in its settings makes that likely or not."""

from __future__ import annotations

from collections.abc import Iterator

from laoka.catalog.boards import by_name, menu_path
from laoka.checks.above_4g import climb, size_text, window_needed_bytes, windows_above_4g, without_card
from laoka.checks.facts import cards, listed_cards, name_of
from laoka.checks.finding import Outcome
from laoka.checks.registry import Wanted, check, fail, info, ok, outcome, unread, warn
from laoka.host.pci import Bar
from laoka.host.report import HostReport
from laoka.host.unread import Unread


@check(
    "firmware.above-4g",
    gate=True,
    source="sysfs resource files, /proc/iomem, boot messages; ReBarUEFI issues 11, 329, 395",
)
def above_4g(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Every card's BAR1 has its full size at an address; if not, the rung of the ladder that says why."""
    menu = _menu(report)
    gpus = report.gpus
    if isinstance(gpus, Unread) or not gpus:
        # Without a card nothing can prove it; the missing card itself is the business of cards.present.
        ladder = without_card(report)
        if ladder.state == "unread":
            yield unread(gpus if isinstance(gpus, Unread) else Unread("no card and no window"), *ladder.evidence)
        elif ladder.state in ("too-small", "no-room"):
            yield fail(f"no-card-{ladder.state}", *ladder.evidence, rung=ladder.rung, menu=menu)
        else:
            yield info(f"no-card-{ladder.state}", *ladder.evidence, rung=ladder.rung, menu=menu)
        return
    for gpu in gpus:
        ladder = climb(report, gpu)
        evidence = (*ladder.evidence, f"rung {ladder.rung}")
        if ladder.state == "on":
            yield ok(*evidence, subject=gpu.address, rung=ladder.rung)
        elif ladder.state == "fits-below":
            yield info("fits-below", *evidence, subject=gpu.address, rung=ladder.rung)
        elif ladder.state == "unknown":
            yield outcome("unknown", "undecided", *evidence, subject=gpu.address, rung=ladder.rung, menu=menu)
        else:
            yield fail(ladder.state, *evidence, subject=gpu.address, rung=ladder.rung, menu=menu)


@check("firmware.window", source="the kernel asked 48 GiB for a 32 GiB BAR1 and a 32 MiB BAR3 (ReBarUEFI issue 395)")
def window(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """The window of each root bus has room for all cards behind it, also for the one that is out for repair."""
    if report.platform.kind in ("vm", "container"):
        return  # a guest's windows are the hypervisor's
    buses = {gpu.root_bus for gpu in cards(report) if isinstance(gpu.root_bus, str)}
    for bus in sorted(buses):
        windows = windows_above_4g(report, bus)
        needed = window_needed_bytes(report, bus)
        if isinstance(windows, Unread):
            yield unread(windows, subject=bus)
            continue
        largest = max((end - start + 1 for start, end in windows), default=0)
        evidence = f"root bus {bus}: largest window above 4 GiB {size_text(largest)}, cards need about {size_text(needed)}"
        if not needed:
            continue
        yield ok(evidence, subject=bus) if largest >= needed else info("tight", evidence, subject=bus)


@check("firmware.bar1-agrees", source="nvidia-smi BAR1 total must equal the PCI BAR")
def bar1_agrees(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """The driver uses the whole BAR1 that PCI shows."""
    listed = listed_cards(report)
    for gpu in () if isinstance(listed, Unread) else listed:
        device = report.device(name_of(gpu))
        bar = device.bar1 if device else None
        if not isinstance(gpu.bar1_total_mib, int) or not isinstance(bar, Bar) or not bar.size_bytes:
            continue
        evidence = f"{name_of(gpu)}: PCI {size_text(bar.size_bytes)}, nvidia-smi {gpu.bar1_total_mib} MiB"
        same = gpu.bar1_total_mib << 20 == bar.size_bytes
        yield ok(evidence, subject=name_of(gpu)) if same else warn("differs", evidence, subject=name_of(gpu))


@check("firmware.boot-mode", source="/sys/firmware/efi; CSM and legacy video make 32-bit bridge windows more likely")
def boot_mode(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """UEFI boot; a legacy (CSM) boot is a weak sign against large BARs."""
    efi = report.firmware.efi_boot
    if report.platform.kind in ("vm", "container"):
        return
    if isinstance(efi, Unread):
        yield unread(efi)
    elif efi:
        yield ok("booted by UEFI")
    else:
        yield info("legacy", "no /sys/firmware/efi: a legacy (CSM) boot", menu=_menu(report))


@check("firmware.pci-options", source="pci=realloc can't grow a root window past ACPI's; pci=nocrs ignores the firmware's windows")
def pci_options(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """pci= options on the kernel command line, which change what the other checks see."""
    words = report.kernel.cmdline
    if isinstance(words, Unread):
        yield unread(words)
        return
    found = [word for word in words if word.startswith(("pci=", "pcie_aspm", "pcie_ports"))]
    if any("nocrs" in word for word in found):
        yield warn("nocrs", *found)
    elif found:
        yield info("there", *found, options=" ".join(found))
    else:
        yield ok("no pci= option on the kernel command line")


@check("firmware.board", source="DMI baseboard name; the catalogue's boards, each with its source")
def board(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Which board this is, and what is known of it."""
    if report.platform.kind == "container":
        return  # the board and its kernels are not the container's
    name, date = report.firmware.board_name, report.firmware.bios_date
    if isinstance(name, Unread):
        yield unread(name)
        return
    evidence = f"board: {report.firmware.board_vendor} {name}, BIOS of {date}" if name else "DMI names no board"
    row = by_name(name)
    if row is None:
        yield info("not-in-catalogue", evidence, name=name or "?")
    elif not row.has_above_4g:
        yield warn("no-option", evidence, row.notes, f"source: {row.source}", name=name or "?")
    else:
        yield info("known", evidence, f"source: {row.source}", name=name or "?", menu=_menu(report))


@check("firmware.settings", source="a BIOS menu written down; factory settings of X99 boards are Above 4G off, CSM on")
def settings(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """BIOS settings, where somebody wrote them down (--file bios-menu=F)."""
    told = report.nvidia.settings_in_bios
    if isinstance(told, Unread):
        return
    values = {name.lower(): value for name, value in told}
    wrong = [
        f"{name}: [{value}]"
        for name, value in told
        if (name.lower() == "above 4g decoding" and value.lower() == "disabled")
        or (name.lower() == "csm support" and value.lower() == "enabled")
    ]
    if wrong:
        yield fail("wrong", *wrong, settings="; ".join(wrong))
    elif values.get("above 4g decoding", "").lower() == "enabled":
        yield ok("Above 4G Decoding: [Enabled]")
    else:
        yield unread(Unread("the menu does not show Above 4G Decoding"))


@check("firmware.memory", source="DMI type 17")
def memory_modules(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Memory modules: one alone, or different sizes, cost bandwidth when weights are loaded."""
    modules = report.firmware.memory_modules
    if isinstance(modules, Unread):
        return
    filled = [module for module in modules if module.size_bytes]
    evidence = tuple(f"{m.locator}: {size_text(m.size_bytes)} at {m.speed_mt_s or '?'} MT/s" for m in filled)
    if len(filled) == 1:
        yield info("single", *evidence)
    elif len({module.size_bytes for module in filled}) > 1:
        yield info("mixed", *evidence)
    elif filled:
        yield ok(*evidence)


def _menu(report: HostReport) -> str:
    """The BIOS menu path of this board, or the usual one."""
    name = report.firmware.board_name
    return menu_path(None if isinstance(name, Unread) else name)
