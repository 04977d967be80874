"""Driver branches, distribution releases, and which driver version is known to build on which kernel."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from laoka.catalog.gpus import Flavour
from laoka.catalog.load import CatalogError, Row, by_id, load

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
    """A distribution release: what it brings, and what the driver packages are called there."""

    name: str
    glibc: str | None = None
    python: str | None = None
    """The release's own python3."""
    kernel_series: tuple[str, ...] = ()
    """Kernel series that it ships or offers, the usual one first."""
    driver_source: str = ""
    """Where the packages below come from, in words."""
    packages_proprietary: tuple[str, ...] = ()
    packages_open: tuple[str, ...] = ()
    packages_verified: bool = False
    """Whether the names were looked up, or only follow the vendor's scheme. `{branch}` stands for the branch."""
    toolkit_package: str | None = None
    """`{dashed}` stands for the version, 12-8."""
    notes: str = ""


@dataclass(frozen=True, kw_only=True)
class KernelFact(Row):
    """A driver version that is known to build and load on a kernel series, or known not to."""

    driver: str
    """A version ("580.119.02") or a branch ("580")."""
    kernel: str
    """A kernel version or series: "6.17.9", "6.8"."""
    works: bool
    how: Literal["dkms", "prebuilt"] = "dkms"


def check(branches: tuple[DriverBranch, ...], releases: tuple[OsRelease, ...], facts: tuple[KernelFact, ...]) -> None:
    """What the types alone don't say. Errors: CatalogError."""
    for branch in branches:
        if not re.fullmatch(r"\d{3}", branch.id):
            raise CatalogError(f"{FILE}: branch {branch.id!r} is not a number of three digits")
        if branch.eol is not None and not re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", branch.eol):
            raise CatalogError(f"{FILE}: branch {branch.id}: eol {branch.eol!r} is not like 2028-06")
        for version in (*branch.versions, *branch.validated):
            if not version.startswith(f"{branch.id}."):
                raise CatalogError(f"{FILE}: branch {branch.id}: version {version} is of another branch")
    for release in releases:
        for package in release.packages_proprietary:
            if "-open" in package:
                raise CatalogError(f"{FILE}: {release.id}: {package} is an open module among the proprietary packages")
    known = {branch.id for branch in branches}
    for fact in facts:
        if fact.driver.split(".")[0] not in known:
            raise CatalogError(f"{FILE}: {fact.id}: driver {fact.driver} is of a branch that the catalogue does not have")


@cache
def branches() -> tuple[DriverBranch, ...]:
    """Every driver branch, oldest first. Errors: CatalogError."""
    rows = load(FILE, "branch", DriverBranch)
    check(rows, load(FILE, "release", OsRelease), load(FILE, "kernel_fact", KernelFact))
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
    """A distribution release by its id ("ubuntu-24.04"), or None."""
    return by_id(releases()).get(name)
