"""PCI Express: width, speed, the slot's own limits, errors on the link, and what the kernel says about bandwidth."""

from __future__ import annotations

from collections.abc import Iterator

from laoka.checks.facts import cards, events, listed_cards, name_of
from laoka.checks.finding import Outcome
from laoka.checks.registry import Wanted, check, fail, info, ok, unread, warn
from laoka.host.kernel_log import AerError, BandwidthLimited
from laoka.host.pci import PciDevice
from laoka.host.report import HostReport
from laoka.host.unread import Unread

# A flooding root port of an X99 board logged several corrected errors a second; one a minute is already a sick link.
NOISY_PER_HOUR = 60


def _port(report: HostReport, gpu: PciDevice) -> PciDevice | None:
    """The port right above a card."""
    if isinstance(gpu.path, Unread) or not gpu.path:
        return None
    return report.device(gpu.path[-1])


@check("pcie.width", source="sysfs current_link_width and max_link_width; width does not change when idle")
def width(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Fewer lanes than the card has: the slot's own limit, or a link that trained down (contact, riser, adapter)."""
    for gpu in cards(report):
        now, most = gpu.link.width, gpu.link.max_width
        if isinstance(now, Unread) or isinstance(most, Unread):
            yield unread(now if isinstance(now, Unread) else Unread(f"{most}"), subject=gpu.address)
            continue
        evidence = f"{gpu.address} runs at x{now}, can do x{most}"
        port = _port(report, gpu)
        slot = port.link.max_width if port else Unread("no port known")
        if now >= most:
            yield ok(evidence, subject=gpu.address)
        elif not isinstance(slot, Unread) and slot <= now:
            yield info("slot", evidence, f"its port can do x{slot}", subject=gpu.address, now=now, most=most)
        else:
            yield warn("trained-down", evidence, subject=gpu.address, now=now, most=most)


@check("pcie.speed", source="sysfs current_link_speed; an idle V100 may lower it, so it is judged under load")
def speed(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """The link's generation against what card and port can do together."""
    listed = listed_cards(report)
    busy = {
        name_of(gpu)
        for gpu in (() if isinstance(listed, Unread) else listed)
        if isinstance(gpu.gpu_utilization_percent, int) and gpu.gpu_utilization_percent >= 10
    }
    for gpu in cards(report):
        now, most = gpu.link.speed_gt_s, gpu.link.max_speed_gt_s
        if isinstance(now, Unread) or isinstance(most, Unread):
            yield unread(now if isinstance(now, Unread) else Unread(f"{most}"), subject=gpu.address)
            continue
        port = _port(report, gpu)
        limit = port.link.max_speed_gt_s if port else most
        best = most if isinstance(limit, Unread) else min(most, limit)
        evidence = f"{gpu.address} runs at {now:g} GT/s, card and port can do {best:g} GT/s"
        if now >= best:
            yield ok(evidence, subject=gpu.address)
        elif gpu.address in busy:
            yield warn("slow-under-load", evidence, subject=gpu.address, now=f"{now:g}", best=f"{best:g}")
        else:
            yield info("idle", evidence, subject=gpu.address, now=f"{now:g}", best=f"{best:g}")


@check("pcie.port", source="sysfs max_link_width and max_link_speed of the port above the card")
def port_limits(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """A slot that is narrower or slower than the card (28-lane CPUs share lanes; some x16 slots are x8 inside)."""
    for gpu in cards(report):
        port = _port(report, gpu)
        if port is None:
            continue
        widths, speeds = (port.link.max_width, gpu.link.max_width), (port.link.max_speed_gt_s, gpu.link.max_speed_gt_s)
        if any(isinstance(value, Unread) for value in (*widths, *speeds)):
            continue
        evidence = f"port {port.address}: x{widths[0]} at {speeds[0]} GT/s; card {gpu.address}: x{widths[1]} at {speeds[1]} GT/s"
        if widths[0] < widths[1] or speeds[0] < speeds[1]:  # type: ignore[operator]
            yield info("limits", evidence, subject=gpu.address, port=port.address)
        else:
            yield ok(evidence, subject=gpu.address)


@check("pcie.bandwidth", source="the kernel's line `available PCIe bandwidth, limited by`")
def bandwidth(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """The kernel itself names the hop that limits a card."""
    ours = {gpu.address for gpu in cards(report)}
    for event in events(report, BandwidthLimited):
        if not ours or event.address in ours:
            yield warn(
                "limited",
                f"{event.address}: {event.available_gb_s:g} of {event.capable_gb_s:g} Gb/s, limited by {event.limited_by}",
                subject=event.address,
                available=f"{event.available_gb_s:g}",
                capable=f"{event.capable_gb_s:g}",
            )


@check("pcie.corrected-errors", source="AER counters in sysfs and AER lines; a report of an X99 Taichi whose log filled the disk")
def corrected(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Corrected link errors of a card or a port above it: harmless one by one, a sick link and a full disk in a flood."""
    told = {event.address for event in events(report, AerError) if event.severity == "corrected"}
    uptime = report.probe.uptime_s
    seen: set[str] = set()
    for gpu in cards(report):
        for address in (gpu.address, *(() if isinstance(gpu.path, Unread) else gpu.path)):
            device = report.device(address)
            if device is None or isinstance(device.aer, Unread) or address in seen:
                continue
            seen.add(address)
            count = device.aer.corrected
            evidence = f"{address}: {count} corrected errors since boot"
            if count == 0 or isinstance(uptime, Unread):
                continue
            per_hour = count / max(uptime / 3600, 0.1)
            make = warn if per_hour >= NOISY_PER_HOUR else info
            yield make("flood" if per_hour >= NOISY_PER_HOUR else "some", evidence, f"{per_hour:.0f} an hour", subject=address)
    for address in sorted(told - seen):
        yield warn("flood", f"{address}: corrected AER errors in the kernel log", subject=address)
    if cards(report) and not told and seen and all(_clean(report, address) for address in seen):
        yield ok(f"no corrected error on {', '.join(sorted(seen))}")


def _clean(report: HostReport, address: str) -> bool:
    device = report.device(address)
    return device is not None and not isinstance(device.aer, Unread) and device.aer.corrected == 0


@check("pcie.uncorrected-errors", source="AER counters and lines; Surprise Down came 100 s after replay timeouts on a real host")
def uncorrected(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Uncorrected link errors: a fatal one is how a card leaves the bus."""
    found = False
    for event in events(report, AerError):
        if event.severity != "corrected":
            found = True
            make = fail if event.severity == "fatal" else warn
            yield make(event.severity, f"{event.address}: {event.severity}, {event.layer}", subject=event.address)
    for gpu in cards(report):
        for address in (gpu.address, *(() if isinstance(gpu.path, Unread) else gpu.path)):
            device = report.device(address)
            if device is None or isinstance(device.aer, Unread):
                continue
            if device.aer.fatal and not found:
                yield fail("fatal", f"{address}: {device.aer.fatal} fatal errors since boot", subject=address)
            elif device.aer.nonfatal and not found:
                yield warn("nonfatal", f"{address}: {device.aer.nonfatal} non-fatal errors since boot", subject=address)
            elif not found and address == gpu.address:
                yield ok(f"{address}: no uncorrected error since boot", subject=address)


@check("pcie.aspm", source="LnkCtl of lspci, link/*_aspm of sysfs; pcie_aspm=off leaves the firmware's setting as it is")
def aspm(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Power saving on the link of a card: a known source of link errors on these boards."""
    for gpu in cards(report):
        if isinstance(gpu.aspm, Unread):
            continue
        if gpu.aspm.lower().startswith("disabled"):
            yield ok(f"{gpu.address} ASPM disabled", subject=gpu.address)
        else:
            yield info("on", f"{gpu.address} ASPM {gpu.aspm}", subject=gpu.address, state=gpu.aspm)


@check("pcie.replays", source="nvidia-smi: Replays Since Reset")
def replays(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Packets that had to be sent again."""
    listed = listed_cards(report)
    for gpu in () if isinstance(listed, Unread) else listed:
        if isinstance(gpu.replay_count, Unread):
            continue
        evidence = f"{name_of(gpu)}: {gpu.replay_count} replays since reset"
        yield info("some", evidence, subject=name_of(gpu)) if gpu.replay_count else ok(evidence, subject=name_of(gpu))


@check("pcie.same-socket", source="sysfs numa_node")
def same_socket(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Cards on two CPU sockets talk over the link between the CPUs."""
    nodes = {gpu.address: gpu.numa_node for gpu in cards(report) if isinstance(gpu.numa_node, int) and gpu.numa_node >= 0}
    if len(nodes) > 1:
        evidence = tuple(f"{address}: NUMA node {node}" for address, node in nodes.items())
        yield ok(*evidence) if len(set(nodes.values())) == 1 else info("two", *evidence)
