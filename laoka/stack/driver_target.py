"""What driver a host is to have: branch, version, kernel and package names, by the catalogue; the pins that keep it so. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from laoka.catalog import drivers as catalogue
from laoka.catalog.drivers import KernelPackages, PackageSource
from laoka.catalog.gpus import Flavour
from laoka.stack.request import Card, DriverWish

PIN_WANTED, PIN_PLAIN, PIN_NEVER = 1001, 500, -1
# Globs are few on purpose. apt tries each on every name of its archives at every start: fifty of them over Debian's 60,000 names
# cost it 2 s on a slow host, and regular expressions, which it compiles each time, half a minute. Plain names cost nothing.
# Metapackages that follow the newest branch (`cuda-drivers-580` pulled 590 and later), and modules that a card without a GSP
# does not work with (twins with `-open` in their names stand beside every module package).
TRAPS = ("cuda", "cuda-[0-9]*", "cuda-drivers*")
OPEN = ("nvidia-open", "nvidia-open-*", "nvidia-*-open", "nvidia-*-open-*")
PROPRIETARY = ("nvidia-dkms-*-server", "nvidia-kernel-dkms")
# Whatever the driver's packages are called in any archive; what has a version of its own (nvidia-container-toolkit 1.17)
# is told apart by that version.
DRIVER_NAMES = ("nvidia-*", "libnvidia-*", "libcuda1", "libcudadebugger1", "xserver-xorg-video-nvidia", "firmware-nvidia-gsp")
KERNEL_MODULES = ("linux-modules-nvidia-*", "linux-objects-nvidia-*", "linux-signatures-nvidia-*")
# Objects and signatures come only as dependencies of these.
BUILT_MODULES = ("linux-modules-nvidia-*",)


class TargetError(ValueError):
    """What is asked for can't be installed by any source; the message is one line: what, why, what to do."""


@dataclass(frozen=True)
class DriverTarget:
    """The driver that a host is to have.

    `version` None: whichever version of the branch the archive has. `kernel` the release of the kernel that it is for,
    6.8.0-124-generic; `kernel_named` says that somebody asked for it, so that its packages are installed where they are not.
    """

    source: PackageSource
    branch: str
    version: str | None
    flavour: Flavour
    kernel: str
    kernel_named: bool = False

    @property
    def version_glob(self) -> str:
        """What versions of its packages look like to apt."""
        return f"{self.branch}.*" if self.version is None else f"{self.version}*"

    def fits(self, driver_version: str | None) -> bool:
        """Whether a driver version (580.173.02, or a package's 580.173.02-0ubuntu1) is the wanted one."""
        if driver_version is None:
            return False
        bare = upstream_version(driver_version)
        return bare == self.version if self.version is not None else bare.split(".")[0] == self.branch

    def packages(self, *, built: bool) -> tuple[str, ...]:
        """Names to install, with modules that the archive built or with those that DKMS builds."""
        modules = self.source.modules(self.flavour, built=built)
        return _named((*modules, *self.source.libraries(self.flavour)), self.branch, self.kernel)

    def versions(self, name: str) -> bool:
        """Whether a package of this source carries the driver's version."""
        return any(fnmatchcase(name, glob) for glob in _named(self.source.versioned, self.branch, self.kernel))

    @property
    def first(self) -> tuple[str, ...]:
        """Names that have to be installed before."""
        return _named(self.source.first, self.branch, self.kernel)

    def kernel_packages(self, running: str, installed: Collection[str], *, built: bool) -> tuple[str, ...]:
        """Names of the kernel's packages that have to be there.

        All of it when the kernel was asked for, with what the running one has beyond that; else its headers where DKMS builds.
        """
        row = kernel_row(self.source)
        if not self.kernel_named:
            return () if built else tuple(name for name in _named(row.packages, "", self.kernel) if "-headers-" in name)
        more = [
            new
            for new, old in zip(_named(row.optional, "", self.kernel), _named(row.optional, "", running), strict=True)
            if old in installed
        ]
        return (*_named(row.packages, "", self.kernel), *more)

    @property
    def built_modules(self) -> tuple[str, ...]:
        """Names of module packages that the archive may have built for the kernel; none when it builds none."""
        return _named(self.source.modules(self.flavour, built=True), self.branch, self.kernel)


@dataclass(frozen=True)
class Pin:
    """One stanza of apt's preferences; `why` is its explanation."""

    why: str
    packages: tuple[str, ...]
    pin: str
    priority: int


def kernel_row(source: PackageSource) -> KernelPackages:
    """What a kernel is called where a source's packages come from."""
    found = next((row for release in source.releases if (row := catalogue.kernel_packages(release)) is not None), None)
    if found is None:
        raise TargetError(f"the catalogue names no kernel packages for {source.id}")
    return found


def package_names(source: PackageSource, branch: str, flavour: Flavour, kernel: str | None) -> tuple[str, ...]:
    """Names that a source has for a branch, its built modules first; `{kernel}` stays where the kernel is not known."""
    modules = source.modules(flavour, built=True) or source.modules(flavour, built=False)
    return _named((*source.first, *modules, *source.libraries(flavour)), branch, kernel)


def _named(names: Iterable[str], branch: str, kernel: str | None) -> tuple[str, ...]:
    return tuple(name.format(branch=branch, kernel=kernel or "{kernel}") for name in names)


def is_versioned(name: str, branch: str) -> bool:
    """Whether a package of a branch carries the driver's version in any archive."""
    sources = (source for source in catalogue.package_sources() if source.system == "apt")
    return any(fnmatchcase(name, glob.format(branch=branch, kernel="*")) for source in sources for glob in source.versioned)


def upstream_version(version: str) -> str:
    """580.173.02 of 580.173.02-0ubuntu0.24.04.1 (and of 1:580.173.02-1)."""
    return version.partition(":")[2 if ":" in version else 0].partition("-")[0].partition("+")[0].partition("~")[0]


def target_of(
    release_id: str,
    branch: str,
    version: str | None,
    flavour: Flavour,
    kernel: str,
    source_id: str | None = None,
    *,
    kernel_named: bool = False,
) -> DriverTarget:
    """The target for a host.

    Arguments: `release_id` ubuntu-24.04; `source_id` a package source to take instead of the release's preferred one.
    Errors: TargetError for a source that is unknown, none that offers the branch, or one that no role installs from (dnf).
    """
    if source_id is None:
        source = catalogue.package_source(release_id, branch)
        if source is None:
            row = catalogue.release(release_id)
            known = sorted({b for s in catalogue.package_sources() if release_id in s.releases for b in s.branches})
            if row is None or not any(row.id in s.releases for s in catalogue.package_sources()):
                raise TargetError(
                    f"no driver packages are known for {release_id}: Ubuntu 22.04 to 26.04 and Debian 12 and 13 have them"
                )
            if row.id != release_id:
                return target_of(row.id, branch, version, flavour, kernel, kernel_named=kernel_named)
            raise TargetError(
                f"no archive for {release_id} offers driver branch {branch} (known: {', '.join(known)}): set driver_branch"
            )
    else:
        found = next((row for row in catalogue.package_sources() if row.id == source_id), None)
        if found is None:
            names = ", ".join(row.id for row in catalogue.package_sources() if row.system == "apt")
            raise TargetError(f"driver_source {source_id!r} is not in the catalogue; there are: {names}")
        if found.branches and branch not in found.branches:
            raise TargetError(f"driver_source {source_id} offers branches {', '.join(found.branches)}, not {branch}")
        source = found
    if source.system != "apt":
        names = ", ".join(package_names(source, branch, flavour, kernel))
        raise TargetError(
            f"laoka installs drivers with apt only: {source.name} is for the RHEL family ({names} by name). "
            "Install and lock it by hand (dnf versionlock), or reinstall the host with Ubuntu 24.04"
        )
    if version is not None and not version.startswith(f"{branch}."):
        raise TargetError(f"driver version {version} is not of branch {branch}")
    return DriverTarget(source, branch, version, flavour, kernel, kernel_named)


def target_from_lock(
    stack: Mapping[str, Any], release_id: str, kernel: str, source_id: str | None = None, *, kernel_named: bool = False
) -> DriverTarget | None:
    """The target that a lock fixes for a host; None when its stack has no driver (an engine for CPU).

    Arguments: `release_id` and `kernel` what the host runs (or is to run). Errors: TargetError, also when the lock is for another
    release than the host has.
    """
    if "driver_branch" not in stack:
        return None
    row = catalogue.release(release_id)
    if source_id is None and (row.id if row else release_id) != stack.get("os_release"):
        raise TargetError(f"the host is {release_id}, its lock is for {stack.get('os_release')}: correct os_release and lock again")
    source = source_id or stack.get("driver_source")
    branch, version, flavour = stack["driver_branch"], stack.get("driver_version"), stack["module_flavour"]
    return target_of(release_id, branch, version, flavour, kernel, source, kernel_named=kernel_named)


def wished_driver(cards: Sequence[Card], wish: DriverWish | None) -> tuple[str, str | None, Flavour]:
    """(branch, version, flavour) for a host without a lock: what was wished for, or the newest maintained branch for its cards.

    Errors: TargetError when the branch does not drive a card, or the cards need different modules.
    """
    gpus = [card.gpu for card in cards if card.gpu is not None]
    flavours = set.intersection(*(set(gpu.module_flavours) for gpu in gpus)) if gpus else {"proprietary"}
    if not flavours:
        raise TargetError("these cards need different kernel modules, and a host runs one: put them into different hosts")
    last = min((gpu.last_driver_branch for gpu in gpus if gpu.last_driver_branch is not None), default=None)
    first = max((gpu.first_driver_branch for gpu in gpus if gpu.first_driver_branch is not None), default=None)
    branch = wish.branch if wish is not None else None
    if wish is not None and branch is None:
        raise TargetError(f"driver {wish.text!r} names no branch: write 580")
    rows = [row for row in catalogue.branches() if not row.ended and row.validated]
    fitting = [row for row in rows if (last is None or row.number <= last) and (first is None or row.number >= first)]
    if branch is None:
        if not fitting:
            raise TargetError("no maintained driver branch drives all cards of this host")
        branch = max(fitting, key=lambda row: (row.kind == "LTS", row.number)).id
    if last is not None and int(branch) > last:
        name = next(gpu.name for gpu in gpus if gpu.last_driver_branch == last)
        raise TargetError(f"driver branch {branch} does not drive {name}: {last} is the last one that does")
    if first is not None and int(branch) < first:
        name = next(gpu.name for gpu in gpus if gpu.first_driver_branch == first)
        raise TargetError(f"driver branch {branch} is older than {name}: {first} is the first one that drives it")
    opened = wish is not None and wish.open
    if opened and "open" not in flavours:
        raise TargetError("an open kernel module does not drive these cards: they have no GSP")
    flavour: Flavour = "open" if opened or flavours == {"open"} else "proprietary"
    return branch, wish.version if wish is not None else None, flavour


def newer_branches(branch: str) -> str:
    """A regular expression, as apt takes it, for versions of every branch after this one.

    580 -> /^(58[1-9]|5[9-9][0-9]|[6-9][0-9][0-9])\\./ It has to be one: apt knows no character classes in a version's
    glob, and takes that for a prefix.
    """
    hundreds, tens, ones = (int(digit) for digit in (branch[0], branch[1], branch[2]))
    found = [f"{hundreds}{tens}[{ones + 1}-9]"] if ones < 9 else []
    found += [f"{hundreds}[{tens + 1}-9][0-9]"] if tens < 9 else []
    found += [f"[{hundreds + 1}-9][0-9][0-9]"] if hundreds < 9 else []
    return f"/^({'|'.join(found)})\\./" if found else "/^$/"


def driver_pins(target: DriverTarget) -> tuple[Pin, ...]:
    """Stanzas that keep a driver where it is; apt takes the first one that fits a package's version."""
    versioned = _named(target.source.versioned, target.branch, target.kernel)
    forbidden = OPEN if target.flavour == "proprietary" else PROPRIETARY
    wanted = tuple(name for name in versioned if target.flavour == "open" or not any(fnmatchcase(name, glob) for glob in OPEN))
    by_kernel = _named(target.source.kernel_modules, target.branch, target.kernel)
    # NVIDIA's pinning package has a version of its own, 580-1, under a name that the globs below have too.
    pins = [Pin("what has to be there first", target.first, "release *", PIN_PLAIN)] if target.first else []
    pins += [
        Pin(
            "what never comes: metapackages that follow the newest branch, modules that do not drive the card",
            TRAPS,
            "release *",
            PIN_NEVER,
        )
    ]
    pins.append(Pin("modules of the other kind", forbidden, "release *", PIN_NEVER))
    pins.append(Pin("the wanted driver, by version, from whatever archive", wanted, f"version {target.version_glob}", PIN_WANTED))
    pins.append(
        Pin(
            "every other version of these (a transitional package moves the branch behind its name)", wanted, "release *", PIN_NEVER
        )
    )
    pins += [
        Pin("what this archive has in a version of its own", (name,), f"version {glob}", PIN_PLAIN)
        for name, glob in target.source.own_versions.items()
    ]
    later = f"version {newer_branches(target.branch)}"
    pins.append(Pin("later branches, under any name that they have or will have", DRIVER_NAMES, later, PIN_NEVER))
    if by_kernel:
        kept = tuple(name for name in by_kernel if "-open-" not in name or target.flavour == "open")
        pins.append(Pin("modules built for the pinned kernel", kept, "release *", PIN_PLAIN))
    pins.append(Pin("modules for other kernels, and names that follow the newest kernel", BUILT_MODULES, "release *", PIN_NEVER))
    return tuple(pins)


def kernel_pins() -> tuple[Pin, ...]:
    """Stanzas that keep names away which follow the newest kernel, those of every distribution."""
    metas = tuple(dict.fromkeys(name for row in catalogue.all_kernel_packages() for name in row.metas))
    return (Pin("names that follow the newest kernel: it moves by a deploy only", metas, "release *", PIN_NEVER),)


def preferences(pins: Iterable[Pin], what: str = "") -> str:
    """Pins as a file of apt's preferences; `what` says in its first line what it keeps."""
    head = f"# laoka: {what}. Do not edit: laoka rewrites it.\n\n" if what else ""
    return head + "\n".join(
        f"Explanation: {pin.why}\nPackage: {' '.join(pin.packages)}\nPin: {pin.pin}\nPin-Priority: {pin.priority}\n" for pin in pins
    )


def kernel_names(row: KernelPackages, kernel: str) -> tuple[str, ...]:
    """Names of all packages that a kernel may have."""
    return _named((*row.packages, *row.optional), "", kernel)


# unattended-upgrades reads regular expressions that match from the start of a name.
BLACKLIST = (
    "nvidia", "libnvidia", "libcuda", "cuda", "xserver-xorg-video-nvidia", "firmware-nvidia", "linux-image", "linux-headers",
    "linux-modules", "linux-objects", "linux-signatures", "linux-generic", "linux-virtual", "linux-lowlatency",
)  # fmt: skip


def upgrade_blacklist(target: DriverTarget) -> str:
    """unattended-upgrades settings that keep it off the driver and the kernel, and from rebooting."""
    lines = "".join(f'  "{pattern}";\n' for pattern in BLACKLIST)
    return (
        f"// laoka: driver branch {target.branch} and its kernel move only by a deploy. Do not edit: laoka rewrites it.\n"
        f"Unattended-Upgrade::Package-Blacklist {{\n{lines}}};\n"
        'Unattended-Upgrade::Automatic-Reboot "false";\n'
    )


def belongs(name: str) -> bool:
    """Whether a package is of a driver or its modules, by its name: what is held, and kept for the way back."""
    driver = r"(lib)?nvidia-(?!container|cuda-(?:toolkit|dev|gdb))|libcuda|xserver-xorg-video-nvidia|firmware-nvidia-"
    modules = r"linux-(modules|objects|signatures)-nvidia-"
    return re.match(f"{driver}|{modules}", name) is not None
