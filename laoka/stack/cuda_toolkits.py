"""Which CUDA packages of a host are not the wanted toolkit, and why that matters. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Packages that follow the newest toolkit, or bring a driver.
_METAS = re.compile(
    r"cuda(-\d+-\d+|-runtime-\d+-\d+|-drivers.*|-demo-suite-.*)?$|cuda-toolkit(-\d+)?$|cuda-(libraries|tools|compiler)$"
)
_VERSIONED = re.compile(r"(cuda|libcu\w*|libnv\w+|libnpp|gds|nsight)-?.*?-(\d+)-(\d+)$")
_DISTRIBUTION = re.compile(r"nvidia-cuda-(toolkit|dev|gdb|toolkit-doc|toolkit-gcc)$")


@dataclass(frozen=True)
class Accident:
    """CUDA packages that should not be there; `why` is 13, distribution, meta or other."""

    why: str
    names: tuple[str, ...]


def dashed(version: str) -> str:
    """12-8 of 12.8 and of 12-8."""
    return version.replace(".", "-")


def accidents(installed: Iterable[str], wanted: str | None) -> tuple[Accident, ...]:
    """What of the installed packages is not the wanted toolkit.

    Arguments: `installed` names; `wanted` "12-8", or None for none at all. Parts of the wanted toolkit (cuda-nvcc-12-8, and what
    has no version in its name, as cuda-toolkit-config-common) belong to it.
    """
    found: dict[str, list[str]] = {"13": [], "distribution": [], "meta": [], "other": []}
    for name in sorted(installed):
        versioned = _VERSIONED.match(name)
        if _DISTRIBUTION.match(name):
            found["distribution"].append(name)
        elif versioned and int(versioned[2]) >= 13:
            found["13"].append(name)
        elif _METAS.match(name):
            found["meta"].append(name)
        elif versioned and f"{versioned[2]}-{versioned[3]}" != wanted:
            found["other"].append(name)
    return tuple(Accident(why, tuple(names)) for why, names in found.items() if names)


def pattern_names() -> tuple[str, ...]:
    """dpkg globs that all of these fit."""
    return ("cuda", "cuda-*", "nvidia-cuda-*", "libcu*", "libnv*-[0-9]*", "libnpp*", "gds-tools*", "nsight-*")


def nvcc_release(lines: Mapping[str, str] | Iterable[str]) -> str | None:
    """12.8 out of `nvcc --version`."""
    found = re.search(r"release (\d+\.\d+)", "\n".join(lines))
    return found[1] if found else None
