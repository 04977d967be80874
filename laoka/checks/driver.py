"""Driver: loaded, right branch and flavour, one version everywhere, and nothing that apt could do to it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from laoka.catalog.drivers import branches
from laoka.checks.facts import cards, catalogue_cards, events, has_volta_or_older, listed_cards, name_of
from laoka.checks.finding import Outcome
from laoka.checks.registry import Wanted, check, fail, info, ok, unread, warn
from laoka.host.kernel_log import ApiMismatch, CardIgnored, OpenModuleRefused
from laoka.host.packages import Package
from laoka.host.report import HostReport
from laoka.host.unread import Maybe, Unread

# Metapackages that follow the newest branch: on Debian cuda-drivers-580 pulled 590 and 595.
TRAPS = re.compile(r"(cuda|cuda-\d[\d-]*|cuda-runtime-[\d-]+|cuda-drivers(-\d+)?|nvidia-open(-\d+)?)$")
DRIVER_PACKAGE = re.compile(
    r"(lib)?nvidia-(driver|dkms|kernel|headless|compute|utils|firmware|modprobe|persistenced|cfg|gl|decode|encode|extra|fbc1|ml|smi|cuda)"
    r"|linux-(modules|objects|signatures)-nvidia|libcuda1|nvidia-smi"
)


def branch_of(version: str) -> int:
    """580 of 580.173.02."""
    return int(version.split(".")[0])


def driver_packages(report: HostReport) -> Maybe[tuple[Package, ...]]:
    """Installed packages that belong to the driver."""
    packages = report.packages.installed
    if isinstance(packages, Unread):
        return packages
    return tuple(package for package in packages if DRIVER_PACKAGE.match(package.name))


def version_in_use(report: HostReport) -> Maybe[str | None]:
    """The loaded module's version, or nvidia-smi's where that is all there is; None: no module is loaded."""
    loaded = report.driver.loaded
    if not isinstance(loaded, Unread):
        return loaded.version if loaded else None
    listing = report.nvidia.listing
    return loaded if isinstance(listing, Unread) else listing.driver_version


@check("driver.loaded", source="/proc/driver/nvidia/version")
def loaded(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """The nvidia module is loaded."""
    version = version_in_use(report)
    if isinstance(version, Unread):
        yield unread(version)
    elif version:
        yield ok(f"nvidia {version} is loaded", version=version)
    else:
        on_disk = report.driver.on_disk
        there = [m for m in (() if isinstance(on_disk, Unread) else on_disk) if m.version]
        if there:
            yield fail("not-loaded", *(f"{m.kernel}: {m.version} on disk" for m in there))
        else:
            yield fail("absent", "no nvidia module is loaded, none is on disk")


@check("driver.branch", source="NVIDIA: 590 and later drop Maxwell, Pascal and Volta; the catalogue's last branch of each card")
def branch(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """The branch drives every card that is here."""
    version = version_in_use(report)
    if isinstance(version, Unread) or not version:
        return
    limits = [(known.name, known.last_driver_branch) for known in catalogue_cards(report) if known.last_driver_branch]
    evidence = f"driver {version}"
    over = [f"{name}: last branch {last}" for name, last in limits if last < branch_of(version)]
    if over:
        yield fail("too-new", evidence, *dict.fromkeys(over), version=version, last=min(last for _, last in limits))
    else:
        yield ok(evidence, *dict.fromkeys(f"{name}: up to {last}" for name, last in limits))


@check("driver.end-of-life", source="NVIDIA data-center driver documentation, as in the catalogue's driver branches")
def end_of_life(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """The branch still gets fixes."""
    version = version_in_use(report)
    if isinstance(version, Unread) or not version:
        return
    row = next((row for row in branches() if row.number == branch_of(version)), None)
    if row is None:
        yield info("not-known", f"driver {version}", version=version)
    elif row.ended:
        yield warn("ended", f"driver {version}", f"branch {row.id}: ended {row.eol or '(date not published)'}", branch=row.id)
    else:
        yield ok(f"driver {version}", f"branch {row.id}: until {row.eol or 'no date published'}")


@check("driver.flavour", source="NVIDIA's source: the open module needs a GSP, which comes with Turing")
def flavour(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """A V100 needs the proprietary kernel module."""
    module = report.driver.loaded
    refused = list(events(report, OpenModuleRefused))
    if refused:
        yield fail("open", "NVRM: not supported by open nvidia.ko: no GSP")
    elif not isinstance(module, Unread) and module and has_volta_or_older(report):
        evidence = f"{module.version}: {module.flavour} kernel module"
        yield fail("open", evidence) if module.flavour == "open" else ok(evidence)
    elif not isinstance(module, Unread) and module:
        yield info("flavour", f"{module.version}: {module.flavour} kernel module", flavour=module.flavour)


@check("driver.open-packages", source="NVIDIA's package names; the -open ones hold a module that no Volta card works with")
def open_packages(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """No package of the open module where a card needs the proprietary one."""
    packages = driver_packages(report)
    if isinstance(packages, Unread) or not has_volta_or_older(report):
        return
    wrong = [package for package in packages if "-open" in package.name]
    if wrong:
        yield fail("installed", *(f"{package.name} {package.version}" for package in wrong))
    elif packages:
        yield ok("no -open package is installed")


@check(
    "driver.versions-agree", source="/proc/driver/nvidia/version, modinfo, library file names; a mismatch breaks every CUDA start"
)
def versions_agree(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Module loaded, module on disk for the running kernel, and userspace have one version."""
    now, running = report.driver.loaded, report.kernel.release
    if isinstance(now, Unread) or now is None:
        return
    seen = {"loaded": now.version}
    on_disk = report.driver.on_disk
    for module in () if isinstance(on_disk, Unread) else on_disk:
        if module.kernel == running and module.version:
            seen["on disk"] = module.version
    libraries = report.driver.userspace
    for number, version in enumerate(() if isinstance(libraries, Unread) else libraries):
        seen[f"userspace{'' if number == 0 else f' {number + 1}'}"] = version
    evidence = tuple(f"{name}: {version}" for name, version in seen.items())
    if len(set(seen.values())) > 1:
        yield fail("differ", *evidence)
    elif len(seen) == 1:
        yield unread(Unread("neither the module on disk nor the libraries could be read"), *evidence)
    else:
        yield ok(*evidence)


@check("driver.api-mismatch", source="NVRM: API mismatch; one host logged 31,300 such lines a day for two months unseen")
def api_mismatch(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """The kernel module turned a client of another version away."""
    pairs = {(event.client_version, event.module_version) for event in events(report, ApiMismatch)}
    if report.nvidia.trouble.version_mismatch and not pairs:
        yield fail("mismatch", "nvidia-smi: Driver/library version mismatch", client="?", module="?")
    for client, module in sorted(pairs):
        yield fail("mismatch", f"client {client}, kernel module {module}", client=client, module=module)


@check("driver.ignores-card", source="the wording of 595 for legacy cards: `will ignore this GPU`")
def ignores_card(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """The driver loads, says nothing else, and leaves the card alone."""
    for event in events(report, CardIgnored):
        words = f"NVRM: {event.card}: legacy branch {event.last_branch}, driver {event.driver_version} ignores it"
        yield fail("ignored", words, card=event.card, branch=event.last_branch or "580")


@check("driver.metapackages", source="forum 353805 and NVIDIA's Recent Updates: metapackages follow the newest branch")
def metapackages(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """No package that drags the driver to a newer branch."""
    packages = report.packages.installed
    if isinstance(packages, Unread):
        return
    wrong = [package for package in packages if TRAPS.match(package.name)]
    yield fail("installed", *(f"{p.name} {p.version}" for p in wrong)) if wrong else ok("none is installed")


@check("driver.one-branch", source="dpkg; packages of two branches overwrite each other's files")
def one_branch(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """All driver packages are of one version."""
    packages = driver_packages(report)
    if isinstance(packages, Unread) or not packages:
        return
    versions: dict[str, list[str]] = {}
    for package in packages:
        found = re.search(r"(\d{3}\.\d+(?:\.\d+)?)", package.version)
        if found and not package.name.startswith(("nvidia-firmware", "linux-")):
            versions.setdefault(found[1], []).append(package.name)
    evidence = tuple(f"{version}: {', '.join(names[:4])}" for version, names in sorted(versions.items()))
    yield warn("mixed", *evidence) if len(versions) > 1 else ok(*evidence)


@check("driver.half-installed", source="dpkg's status letters")
def half_installed(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """dpkg finished with every driver and kernel package."""
    packages = report.packages.installed
    if isinstance(packages, Unread):
        yield unread(packages)
        return
    broken = [package for package in packages if package.broken]
    yield fail("broken", *(f"{p.name} {p.version}: {p.status}" for p in broken)) if broken else ok("none")


@check("driver.held", source="dpkg holds: one of the three locks that keep apt off a driver")
def held(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Every driver package is on hold."""
    packages, holds = driver_packages(report), report.packages.holds
    if isinstance(packages, Unread) or isinstance(holds, Unread) or not packages:
        return
    loose = [package.name for package in packages if package.name not in holds]
    if loose:
        yield warn("loose", f"not on hold: {', '.join(loose[:8])}", f"{len(loose)} of {len(packages)} packages")
    else:
        yield ok(f"{len(packages)} driver packages are on hold")


@check("driver.pinned", source="apt preferences; a pin by package name alone can still move the branch (transitional packages)")
def pinned(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """A preference of priority 1000 or more keeps the driver at a version glob."""
    packages, preferences = driver_packages(report), report.packages.preferences
    if isinstance(packages, Unread) or isinstance(preferences, Unread) or not packages:
        return
    pins = [
        preference
        for preference in preferences
        if preference.priority >= 1000 and preference.pin.startswith("version") and any("nvidia" in p for p in preference.packages)
    ]
    if pins:
        yield ok(*(f"{pin.file}: {pin.pin}, priority {pin.priority}" for pin in pins))
    else:
        yield warn("none", "no version pin of priority 1000 or more for nvidia packages")


@check(
    "driver.unattended-upgrades",
    source="apt-config dump; an unattended upgrade moved 580.159.03 to 580.173.02 under a running module",
)
def unattended(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Unattended upgrades leave the driver alone."""
    settings = report.packages.unattended
    if isinstance(settings, Unread):
        return
    if not settings.enabled or report.packages.version("unattended-upgrades") is None:
        yield ok("unattended upgrades are off")
    elif any("nvidia" in pattern for pattern in settings.blacklist):
        yield ok(f"blacklist: {', '.join(settings.blacklist)}")
    else:
        yield warn("open", f"enabled; blacklist: {', '.join(settings.blacklist) or 'empty'}")


@check("driver.unattended-reboot", source="apt-config dump: Unattended-Upgrade::Automatic-Reboot")
def unattended_reboot(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """No reboot that nobody asked for."""
    settings = report.packages.unattended
    if isinstance(settings, Unread):
        return
    yield warn("on", "Automatic-Reboot is true") if settings.reboots and settings.enabled else ok("Automatic-Reboot is off")


@check("driver.candidate", source="apt-cache policy")
def candidate(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """What the next `apt upgrade` would do to the driver."""
    candidates = report.packages.candidates
    if isinstance(candidates, Unread):
        return
    ours = [c for c in candidates if c.installed and "nvidia" in c.package]
    moving = [c for c in ours if c.candidate and c.candidate != c.installed]
    if moving:
        yield warn("moves", *(f"{c.package}: {c.installed} -> {c.candidate}" for c in moving))
    elif ours:
        yield ok(*(f"{c.package} stays at {c.installed}" for c in ours))


@check("driver.repository", source="cuda-repository-pin-600 raises NVIDIA's repository above the distribution's")
def repository(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """NVIDIA's own repository needs its pinning package, or it brings the newest branch."""
    preferences, packages = report.packages.preferences, report.packages.installed
    if isinstance(preferences, Unread) or isinstance(packages, Unread):
        return
    raised = [
        p for p in preferences if p.priority >= 600 and ("NVIDIA" in p.pin or "nvidia" in p.pin) and not p.pin.startswith("version")
    ]
    guard = [package.name for package in packages if package.name.startswith("nvidia-driver-pinning-")]
    if raised and not guard:
        yield warn("raised", *(f"{p.file}: {p.pin}, priority {p.priority}" for p in raised))
    elif raised:
        yield ok(*guard)


@check("driver.persistenced", source="systemd")
def persistenced(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """nvidia-persistenced keeps the cards initialised, and with that their limits."""
    unit = report.system.unit("nvidia-persistenced.service")
    version = version_in_use(report)
    if unit is None or isinstance(version, Unread) or not version:
        return
    evidence = f"nvidia-persistenced.service: {unit.active}, {unit.enabled or 'not enabled'}"
    yield ok(evidence) if unit.active == "active" else warn("inactive", evidence)


@check("driver.fabric-manager", source="NVIDIA: needed with NVSwitch only (SXM3, HGX); elsewhere it ends at once")
def fabric_manager(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Fabric manager has no business on PCIe and SXM2 cards."""
    unit = report.system.unit("nvidia-fabricmanager.service")
    if unit and unit.loaded and not any(known.form in ("sxm3", "sxm4", "sxm5") for known in catalogue_cards(report)):
        yield info("needless", f"nvidia-fabricmanager.service: {unit.active}")


@check("driver.recovery-action", source="nvidia-smi gpu_recovery_action: None, GPU Reset Required, Node Reboot Required, ...")
def recovery_action(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """The driver itself asks for a reset or a reboot."""
    listed = listed_cards(report)
    for gpu in () if isinstance(listed, Unread) else listed:
        if isinstance(gpu.recovery_action, Unread):
            continue
        evidence = f"{name_of(gpu)}: {gpu.recovery_action}"
        if gpu.recovery_action == "None":
            yield ok(evidence, subject=name_of(gpu))
        else:
            yield fail("wanted", evidence, subject=name_of(gpu), action=gpu.recovery_action)


@check("driver.bound", source="the driver link in sysfs")
def bound(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Each card is bound to the nvidia driver, not to nouveau or vfio-pci."""
    version = version_in_use(report)
    for gpu in cards(report):
        if isinstance(gpu.driver, Unread):
            continue
        evidence = f"{gpu.address}: {gpu.driver or 'no driver'}"
        if gpu.driver == "nvidia":
            yield ok(evidence, subject=gpu.address)
        elif gpu.driver in ("vfio-pci", "nouveau"):
            yield fail(gpu.driver, evidence, subject=gpu.address)
        elif gpu.driver is None and isinstance(version, str):
            yield fail("unbound", evidence, subject=gpu.address)


@check("driver.nouveau", source="/proc/modules, modprobe.d")
def nouveau(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """nouveau is not loaded, and can't be."""
    modules, lines = report.driver.modules, report.driver.config
    if not isinstance(modules, Unread) and "nouveau" in modules:
        yield fail("loaded", "nouveau is loaded")
        return
    if isinstance(lines, Unread) or isinstance(modules, Unread):
        yield unread(lines if isinstance(lines, Unread) else Unread(str(modules)))
        return
    found = [line for line in lines if re.match(r"(blacklist|alias|install) nouveau\b", line.text)]
    yield ok(*(f"{line.file}: {line.text}" for line in found)) if found else warn("not-blacklisted", "no line keeps nouveau out")


@check("driver.initramfs", source="file times: a blacklist works at boot only when the initramfs was rebuilt after it")
def initramfs(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """The initramfs is newer than the module settings."""
    files, coming = report.kernel.boot_files, report.kernel.next_boot
    target = report.kernel.release if isinstance(coming, Unread) else coming
    if isinstance(files, Unread) or isinstance(target, Unread):
        return
    settings = [f for f in files if f.path.startswith("/etc/modprobe.d/") and re.search(r"nouveau|nvidia|vfio", f.path)]
    images = [f for f in files if "/init" in f.path and target in f.path]
    if not settings or not images:
        return
    newest, image = max(settings, key=lambda f: f.changed_epoch_s), images[0]
    evidence = (f"{image.path}: {image.changed_epoch_s}", f"{newest.path}: {newest.changed_epoch_s}")
    if newest.changed_epoch_s > image.changed_epoch_s:
        yield warn("older", *evidence, file=newest.path)
    else:
        yield ok(*evidence)


@check("driver.vfio-ids", source="the kernel command line and modprobe.d: a leftover hides cards from the driver")
def vfio_ids(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """No vfio-pci setting claims NVIDIA's ids."""
    words = report.kernel.cmdline
    lines = report.driver.config
    found = [word for word in (() if isinstance(words, Unread) else words) if "vfio-pci.ids" in word and "10de:" in word]
    found += [
        f"{line.file}: {line.text}"
        for line in (() if isinstance(lines, Unread) else lines)
        if re.match(r"options vfio-pci .*ids=\S*10de:", line.text)
    ]
    if found:
        yield fail("claimed", *found)
    elif isinstance(words, Unread):
        yield unread(words)
    else:
        yield ok("no vfio-pci setting claims an NVIDIA card")


@check("driver.secure-boot", source="mokutil, modinfo signer: an unsigned module is refused")
def secure_boot(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """With Secure Boot on, the module has to be signed."""
    state, on_disk = report.firmware.secure_boot, report.driver.on_disk
    if isinstance(state, Unread):
        yield unread(state)
    elif not state:
        yield ok("Secure Boot is off")
    elif isinstance(on_disk, Unread):
        yield unread(on_disk, "Secure Boot is on")
    else:
        unsigned = [module for module in on_disk if module.version and not module.signed]
        if unsigned:
            yield fail("unsigned", *(f"{m.kernel}: nvidia {m.version} is not signed" for m in unsigned))
        else:
            yield info("on", "Secure Boot is on")
