"""Platform: is this a machine that laoka can provision at all."""

from __future__ import annotations

from collections.abc import Iterator

from laoka.checks.finding import Outcome
from laoka.checks.registry import Wanted, check, fail, info, ok, unread, warn
from laoka.host.report import HostReport
from laoka.host.unread import Unread


@check("platform.kind", gate=True, source="uname, systemd-detect-virt, DMI, CPUID's hypervisor bit")
def kind(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Bare metal, or a VM with the card passed through; not WSL2 nor Windows; a container must hold a card."""
    what = report.platform
    if isinstance(what.kind, Unread):
        yield unread(what.kind)
    elif what.kind in ("wsl", "windows"):
        yield fail(what.kind, f"platform: {what.technology}")
    elif what.kind == "container":
        gpus = report.gpus
        if isinstance(gpus, Unread):
            yield unread(gpus, f"container: {what.technology}")
        elif not gpus:
            yield fail("container-without-card", f"container: {what.technology}", technology=what.technology)
        else:
            yield info("container", f"container: {what.technology}", f"cards: {len(gpus)}", technology=what.technology)
    elif what.kind == "vm":
        yield info("vm", f"hypervisor: {what.technology}", technology=what.technology)
    else:
        yield ok("bare metal")


@check("platform.simulated", source="the marker file of a laoka sandbox host")
def simulated(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """A sandbox's card is said to be simulated wherever it shows up."""
    if report.probe.simulated:
        yield info("simulated", "/srv/laoka-sandbox/simulated exists")


@check("platform.root", source="the probe's user id")
def root(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """A plain user can't read addresses, links and logs: what is missing then is missing for that reason."""
    if isinstance(report.probe.is_root, Unread):
        if report.probe.source == "probe":
            yield unread(report.probe.is_root)
    elif report.probe.is_root:
        yield ok("the probe ran as root")
    else:
        yield warn("user", "the probe ran as a plain user")


@check("platform.probe-complete", source="the probe's last mark")
def probe_complete(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """A probe that was cut off may have missed anything."""
    if not report.probe.complete:
        yield unread(Unread("the probe's text ends before its last mark"))
