"""Driver branches, distribution releases, their package names, and which driver version is known to build on which kernel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from laoka.catalog.gpus import Flavour
from laoka.catalog.load import CatalogError, Row, by_id, load, references, unique

FILE = "drivers.toml"


@dataclass(frozen=True, kw_only=True)
class DriverBranch(Row):
    """A driver branch; its id is the number as text."""

    kind: Literal["LTS", "PB", "NFB", "unknown"]
    eol: str | None = None
    """Month of its end of life, "2028-06"; None when no date is published or known."""
    ended: bool = False
    """The vendor lists it as ended, with or without a date."""
    cuda_max: str | None = None
    """Newest CUDA that its libcuda speaks, "13.x" for the whole major version."""
    sm_min: int | None = None
    """Lowest compute capability that it still drives."""
    flavours: tuple[Flavour, ...] = ("proprietary", "open")
    versions: tuple[str, ...] = ()
    """Versions seen, oldest first."""
    validated: tuple[str, ...] = ()
    """Versions that somebody ran a V100 engine on."""
    notes: str = ""

    @property
    def number(self) -> int:
        """The branch as a number."""
        return int(self.id)


@dataclass(frozen=True, kw_only=True)
class OsRelease(Row):
    """A distribution release and what it brings; its driver packages are told by PackageSource."""

    name: str
    family: Literal["debian", "rhel"] = "debian"
    also: tuple[str, ...] = ()
    """Rebuilds of it that count as it, "rocky-9"; a minor version after a dot is ignored."""
    glibc: str | None = None
    python: str | None = None
    """The release's own python3."""
    kernel_series: tuple[str, ...] = ()
    """Kernel series that it ships or offers, the usual one first."""
    toolkit_package: str | None = None
    """`{dashed}` stands for the version, 12-8."""
    notes: str = ""


@dataclass(frozen=True, kw_only=True)
class PackageSource(Row):
    """An archive that has driver packages, and what they are called there.

    In names `{branch}` stands for the driver branch and `{kernel}` for the release of the pinned kernel, 6.8.0-124-generic.
    """

    name: str
    releases: tuple[str, ...]
    """Ids of the releases that it is for."""
    system: Literal["apt", "dnf"] = "apt"
    branches: tuple[str, ...] = ()
    """Branches that it offers; empty: whichever."""
    repository: str = ""
    """What has to be switched on for it, in words."""
    first: tuple[str, ...] = ()
    """Packages that have to be there before all others: NVIDIA's pinning package."""
    prebuilt: tuple[str, ...] = ()
    """Module packages that the archive built, and signed, for one kernel."""
    dkms: tuple[str, ...] = ()
    userspace: tuple[str, ...] = ()
    open_prebuilt: tuple[str, ...] = ()
    open_dkms: tuple[str, ...] = ()
    open_userspace: tuple[str, ...] = ()
    versioned: tuple[str, ...] = ()
    """Globs of packages whose version begins with the driver's."""
    own_versions: Mapping[str, str] = field(default_factory=dict)
    """Packages that it has in a later branch's version, and the glob of that: they come with the driver all the same."""
    kernel_modules: tuple[str, ...] = ()
    """Names of packages of the driver that carry the kernel's version instead."""
    verified: bool = False
    """Whether the names were looked up, or only follow the vendor's scheme."""
    notes: str = ""

    def offers(self, release: str, branch: str) -> bool:
        """Whether it has packages of a branch for a release."""
        return release in self.releases and (not self.branches or branch in self.branches)

    def modules(self, flavour: Flavour, *, built: bool) -> tuple[str, ...]:
        """Names of the module packages of a flavour: `built` ones, or those that DKMS builds from."""
        if flavour == "open":
            return self.open_prebuilt if built else self.open_dkms
        return self.prebuilt if built else self.dkms

    def libraries(self, flavour: Flavour) -> tuple[str, ...]:
        """Names of the packages of libraries and tools that go with a flavour's module."""
        return self.open_userspace if flavour == "open" else self.userspace


@dataclass(frozen=True, kw_only=True)
class KernelPackages(Row):
    """What a kernel consists of on some releases; `{kernel}` stands for its release."""

    releases: tuple[str, ...]
    packages: tuple[str, ...]
    optional: tuple[str, ...] = ()
    """Installed where the archive has them."""
    metas: tuple[str, ...] = ()
    """Globs of the metapackages that follow the newest kernel."""


@dataclass(frozen=True, kw_only=True)
class KernelFact(Row):
    """A driver version that is known to build and load on a kernel series, or known not to."""

    driver: str
    """A version ("580.119.02") or a branch ("580")."""
    kernel: str
    """A kernel version or series: "6.17.9", "6.8"."""
    works: bool
    how: Literal["dkms", "prebuilt"] = "dkms"


def check(
    branches: tuple[DriverBranch, ...],
    releases: tuple[OsRelease, ...],
    facts: tuple[KernelFact, ...],
    sources: tuple[PackageSource, ...] = (),
    kernels: tuple[KernelPackages, ...] = (),
) -> None:
    """What the types alone don't say. Errors: CatalogError."""
    for branch in branches:
        if not re.fullmatch(r"\d{3}", branch.id):
            raise CatalogError(f"{FILE}: branch {branch.id!r} is not a number of three digits")
        if branch.eol is not None and not re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", branch.eol):
            raise CatalogError(f"{FILE}: branch {branch.id}: eol {branch.eol!r} is not like 2028-06")
        for version in (*branch.versions, *branch.validated):
            if not version.startswith(f"{branch.id}."):
                raise CatalogError(f"{FILE}: branch {branch.id}: version {version} is of another branch")
    for source in sources:
        for package in (*source.prebuilt, *source.dkms, *source.userspace):
            if "-open" in package:
                raise CatalogError(f"{FILE}: {source.id}: {package} is an open module among the proprietary packages")
        if not source.dkms or not source.userspace or (source.system == "apt" and not source.versioned):
            raise CatalogError(f"{FILE}: {source.id}: dkms, userspace and (for apt) versioned can't be empty")
    known = {branch.id for branch in branches}
    names = {release.id for release in releases}
    references(sources, "branches", known, FILE)
    references(sources, "releases", names, FILE)
    references(kernels, "releases", names, FILE)
    unique(kernels, "releases", FILE)
    unique(releases, "also", FILE)
    for fact in facts:
        if fact.driver.split(".")[0] not in known:
            raise CatalogError(f"{FILE}: {fact.id}: driver {fact.driver} is of a branch that the catalogue does not have")


@cache
def branches() -> tuple[DriverBranch, ...]:
    """Every driver branch, oldest first. Errors: CatalogError."""
    rows = load(FILE, "branch", DriverBranch)
    check(
        rows, load(FILE, "release", OsRelease), load(FILE, "kernel_fact", KernelFact),
        load(FILE, "package_source", PackageSource), load(FILE, "kernel_packages", KernelPackages),
    )  # fmt: skip
    return tuple(sorted(rows, key=lambda row: row.number))


@cache
def releases() -> tuple[OsRelease, ...]:
    """Every distribution release. Errors: CatalogError."""
    return load(FILE, "release", OsRelease)


@cache
def kernel_facts() -> tuple[KernelFact, ...]:
    """Every known pairing of driver and kernel. Errors: CatalogError."""
    return load(FILE, "kernel_fact", KernelFact)


def release(name: str) -> OsRelease | None:
    """A distribution release by its id ("ubuntu-24.04") or that of a rebuild of it ("rocky-9.4"), or None."""
    found = by_id(releases()).get(name)
    major = name.split(".")[0]
    return found or next((row for row in releases() if row.family == "rhel" and major in (row.id, *row.also)), None)


@cache
def package_sources() -> tuple[PackageSource, ...]:
    """Every source of driver packages, the preferred ones of a release first. Errors: CatalogError."""
    branches()  # checks them all
    return load(FILE, "package_source", PackageSource)


def package_source(release_id: str, branch: str, source_id: str | None = None) -> PackageSource | None:
    """The preferred source of a branch for a release, or the named one if it offers the branch; None when there is none."""
    if source_id is not None:
        named = by_id(package_sources()).get(source_id)
        return named if named is not None and (not named.branches or branch in named.branches) else None
    return next((source for source in package_sources() if source.offers(release_id, branch)), None)


@cache
def all_kernel_packages() -> tuple[KernelPackages, ...]:
    """What kernels consist of, everywhere. Errors: CatalogError."""
    return load(FILE, "kernel_packages", KernelPackages)


def kernel_packages(release_id: str) -> KernelPackages | None:
    """What a kernel consists of on a release, or None."""
    return next((row for row in all_kernel_packages() if release_id in row.releases), None)
