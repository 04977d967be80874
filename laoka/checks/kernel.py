"""Kernel: which one runs, which one the next boot takes, and whether a driver module is ready for it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from laoka.checks.finding import Outcome
from laoka.checks.registry import Wanted, check, fail, info, ok, unread, warn
from laoka.host.report import HostReport
from laoka.host.unread import Unread

# Packages that pull in the newest kernel: on Ubuntu and Debian, with their HWE and flavour variants.
_META = re.compile(r"linux(-image|-headers|-modules-extra)?-(generic|lowlatency|server|amd64|cloud-amd64|virtual)(-hwe-[\w.]+)?$")


@check("kernel.next-boot", source="grub.cfg, GRUB_DEFAULT, grubenv")
def next_boot(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """A reboot that silently changes the kernel is how a driver gets lost."""
    if report.platform.kind == "container":
        return  # the board and its kernels are not the container's
    coming, running = report.kernel.next_boot, report.kernel.release
    if isinstance(coming, Unread) or isinstance(running, Unread):
        yield unread(coming if isinstance(coming, Unread) else Unread(str(running)))
        return
    evidence = (f"running: {running}", f"next boot: {coming}")
    installed = report.kernel.installed
    if not isinstance(installed, Unread) and coming not in installed:
        yield fail("gone", *evidence, f"installed: {', '.join(installed)}", coming=coming)
    elif coming != running:
        yield warn("other", *evidence, coming=coming, running=running)
    else:
        yield ok(*evidence)


@check("kernel.default", source="GRUB_DEFAULT=saved with grub-set-default keeps a kernel; 0 takes the newest")
def default(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Whether GRUB keeps the kernel that was chosen, or takes the newest installed."""
    if report.platform.kind == "container":
        return  # the board and its kernels are not the container's
    setting, saved = report.kernel.grub_default, report.kernel.grub_saved_entry
    if isinstance(setting, Unread):
        yield unread(setting)
    elif setting == "saved" and isinstance(saved, str):
        yield ok(f"GRUB_DEFAULT=saved, saved_entry={saved}")
    elif setting is not None and setting not in ("0", "saved"):
        yield ok(f"GRUB_DEFAULT={setting}")
    else:
        yield warn("newest", f"GRUB_DEFAULT={setting}")


@check("kernel.held", source="dpkg holds; an upgraded kernel metapackage brings a kernel without a driver module")
def held(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """The packages that bring new kernels are on hold."""
    packages, holds = report.packages.installed, report.packages.holds
    if isinstance(packages, Unread) or isinstance(holds, Unread):
        yield unread(packages if isinstance(packages, Unread) else Unread(str(holds)))
        return
    metas = sorted({package.name for package in packages if package.name.startswith("linux-") and _META.fullmatch(package.name)})
    loose = [name for name in metas if name not in holds]
    if loose:
        yield warn("loose", *(f"{name} is not on hold" for name in loose), names=", ".join(loose))
    elif metas:
        yield ok(*(f"{name} is on hold" for name in metas))
    else:
        yield ok("no kernel metapackage is installed")


@check("kernel.fallback", source="/lib/modules")
def fallback(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """At least one other kernel to go back to."""
    if report.platform.kind == "container":
        return  # the board and its kernels are not the container's
    installed = report.kernel.installed
    if isinstance(installed, Unread):
        yield unread(installed)
    elif not installed:
        yield unread(Unread("no kernel in /lib/modules"))
    elif len(installed) == 1:
        yield info("only-one", f"installed: {installed[0]}")
    else:
        yield ok(f"installed: {', '.join(installed)}")


@check("kernel.headers", source="/lib/modules/*/build")
def headers(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """DKMS can't build for a kernel without its headers."""
    dkms, with_headers = report.driver.dkms, report.kernel.with_headers
    if isinstance(dkms, Unread) or not any(entry.module.startswith("nvidia") for entry in dkms):
        return
    coming = report.kernel.next_boot
    target = report.kernel.release if isinstance(coming, Unread) else coming
    if isinstance(with_headers, Unread) or isinstance(target, Unread):
        yield unread(with_headers if isinstance(with_headers, Unread) else Unread(str(target)))
    elif target in with_headers:
        yield ok(f"headers of {target} are installed")
    else:
        yield fail("missing", f"no headers of {target}", kernel=target)


@check("kernel.module-ready", source="modinfo -k of every installed kernel; dkms status")
def module_ready(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """The nvidia module exists for the kernel that the next boot takes, in the version of the running one."""
    on_disk, coming = report.driver.on_disk, report.kernel.next_boot
    target = report.kernel.release if isinstance(coming, Unread) else coming
    if isinstance(on_disk, Unread) or isinstance(target, Unread):
        yield unread(on_disk if isinstance(on_disk, Unread) else Unread(str(target)))
        return
    versions = {module.kernel: module.version for module in on_disk}
    if not any(versions.values()):
        return  # no driver on this host at all: driver.loaded says so
    evidence = tuple(f"{kernel}: {version or 'no nvidia module'}" for kernel, version in versions.items())
    if versions.get(target) is None:
        yield fail("missing", *evidence, kernel=target)
    elif len({version for version in versions.values() if version}) > 1:
        yield warn("differs", *evidence, kernel=target)
    else:
        yield ok(*evidence, kernel=target)


@check("kernel.dkms", source="dkms status: `added` is not built")
def dkms(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Modules that DKMS knows of but has not built."""
    entries = report.driver.dkms
    if isinstance(entries, Unread):
        return  # no DKMS: prebuilt modules, or none; kernel.module-ready looks at the result
    ours = [entry for entry in entries if entry.module.startswith("nvidia")]
    built = [entry for entry in ours if entry.state == "installed"]
    evidence = tuple(f"{entry.module}/{entry.version} {entry.kernel or ''} {entry.state}".replace("  ", " ") for entry in ours)
    if ours and not built:
        yield fail("not-built", *evidence)
    elif any("WARNING" in entry.note for entry in ours):
        yield warn("differs", *evidence)
    elif ours:
        yield ok(*evidence)


@check("kernel.dkms-failures", source="`Bad return status for module build on kernel`: seen with 470 on 6.14 and 580.119 on 6.17.9")
def dkms_failures(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Builds that failed, above all for a kernel that is installed."""
    failures = report.driver.dkms_failures
    if isinstance(failures, Unread) or not failures:
        return
    on_disk = report.driver.on_disk
    built = {} if isinstance(on_disk, Unread) else {module.kernel: module.version for module in on_disk}
    for failure in dict.fromkeys(failures):
        evidence = f"build of {failure.version or 'nvidia'} for {failure.kernel} failed"
        if built.get(failure.kernel):
            yield info("past", evidence, "a module for it is there now", kernel=failure.kernel)
        else:
            yield fail("failed", evidence, kernel=failure.kernel, version=failure.version or "?")
