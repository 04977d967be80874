"""What is asked of the resolver: cards, system, model and wishes; and how people write them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from laoka.catalog import gpus
from laoka.catalog.engines import engines
from laoka.catalog.gpus import Gpu
from laoka.catalog.models import Architecture, Model
from laoka.stack.weights import Weights

DEFAULT_OS = "ubuntu-24.04"
DEFAULT_MODEL = "qwen3.8-27b-quasar-nvfp4"
DEFAULT_CONTEXT_TOKENS = 32768
DEFAULT_STREAMS = 1
MAX_CARDS = 64

SpeculativeWish = Literal["auto", "dflash2", "mtp", "none"]
SPECULATIVE_WISHES: tuple[SpeculativeWish, ...] = ("auto", "dflash2", "mtp", "none")
MEASURE = "measure"
"""A wish of inventories: what is possible is used as with auto, and which is fastest is to be measured on the host."""


class RequestError(ValueError):
    """A request that can't be understood; the message is one line: what, why, what to write instead."""


@dataclass(frozen=True)
class Card:
    """A card of the host. `gpu` is None when the catalogue does not have its PCI id."""

    device_id: str
    gpu: Gpu | None


@dataclass(frozen=True)
class Checkpoint:
    """What is to be served: a row of the catalogue or a folder."""

    name: str
    scheme: str
    weights: Weights
    architecture: Architecture
    model: Model | None = None


@dataclass(frozen=True)
class DriverWish:
    """A driver as somebody asked for it: a branch, a version, a package's name."""

    text: str
    branch: str | None
    version: str | None
    open: bool


@dataclass(frozen=True)
class Request:
    """All that a stack is resolved from. Without cards, an engine for CPU is meant."""

    cards: tuple[Card, ...]
    checkpoint: Checkpoint
    os_release: str = DEFAULT_OS
    kernel: str | None = None
    """The kernel that runs or is to run, "6.8.0-124-generic"; None takes the release's usual series."""
    glibc: str | None = None
    """glibc of the host, when it was read there; None takes the release's."""
    python: str | None = None
    context_tokens: int = DEFAULT_CONTEXT_TOKENS
    streams: int = DEFAULT_STREAMS
    speculative: SpeculativeWish = "auto"
    speculative_config: Mapping[str, Any] | None = None
    """A --speculative-config that somebody wrote himself: it is checked, never passed on unseen."""
    engine: str | None = None
    engine_version: str | None = None
    driver: DriverWish | None = None
    hashes: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 by "name==version", from releases' own SHA256SUMS."""
    driver_source: str | None = None
    """Id of a package source to take instead of the release's preferred one."""


def parse_gpu(text: str) -> tuple[Card, ...]:
    """Cards as people write them: "4xv100-sxm2-32gb", "4x v100-sxm2-32gb", "10de:1db6", "2x10de:1db6", "none".

    Errors: RequestError, with names that resemble it.
    """
    found = re.fullmatch(r"\s*(?:(\d{1,4})\s*[xX*×]\s*)?([\w.:+ -]+?)\s*", text)
    if not found:
        raise RequestError(f"--gpu {text!r}: write COUNTxCARD, such as 4xv100-sxm2-32gb, or a PCI id, such as 2x10de:1db6")
    count, name = int(found.group(1) or 1), found.group(2)
    if name.lower() == "none":
        return ()
    if not 1 <= count <= MAX_CARDS:
        raise RequestError(f"--gpu {text!r}: {count} cards: a host has 1 to {MAX_CARDS}")
    gpu = gpus.by_name(name)
    if gpu is None and re.fullmatch(r"(?i)(10de:)?(0x)?[0-9a-f]{4}", name):
        return (card_of(name),) * count
    if gpu is None:
        words = re.findall(r"[a-z]+\d+[a-z]?|\d+gb", name.lower())
        near = [row.id for row in gpus.gpus() if any(word in row.id for word in words)] or [row.id for row in gpus.gpus()]
        raise RequestError(
            f"--gpu {text!r}: no card of this name; known: {', '.join(near[:12])}; or write its PCI id (lspci -nn -d 10de:)"
        )
    return (Card(gpu.device_ids[0], gpu),) * count


def card_of(device_id: str) -> Card:
    """The card of a PCI id, "10de:1db6"; its `gpu` is None when the catalogue does not have it."""
    wanted = device_id.strip().lower().replace("0x", "")
    return Card(wanted if ":" in wanted else f"10de:{wanted}", gpus.by_device_id(wanted))


def parse_engine(text: str | None) -> tuple[str | None, str | None]:
    """(name, version) of "1cat-vllm", "1cat-vllm==1.5.1" or None. Errors: RequestError."""
    if text is None or not text.strip():
        return None, None
    found = re.fullmatch(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*?)\s*(?:==\s*([0-9][A-Za-z0-9.+!_-]*))?\s*", text)
    if not found:
        raise RequestError(f"engine {text!r}: write NAME or NAME==VERSION, such as 1cat-vllm==1.5.1")
    name = re.sub(r"[._]+", "-", found.group(1).lower())
    known = engine_names()
    if name not in known:
        raise RequestError(f"engine {text!r}: no engine of this name; known: {', '.join(known)}")
    return name, found.group(2)


def engine_names() -> tuple[str, ...]:
    """Names of the engines that can be installed, in order of preference."""
    return tuple(dict.fromkeys(engine.name for engine in engines() if engine.kind == "vllm"))


def parse_driver(text: str | None) -> DriverWish | None:
    """A driver wish: "580", "580.173.02", "nvidia-driver-580-server-open", "cuda-drivers". Errors: RequestError."""
    if text is None or not text.strip():
        return None
    wish = text.strip().lower()
    if not re.fullmatch(r"[a-z0-9.+:~_-]{1,80}", wish):
        raise RequestError(f"driver {text!r}: write a branch (580), a version (580.173.02) or a package's name")
    version = re.search(r"(?<![\d.])(\d{3})\.(\d{2,3})(?:\.(\d{2}))?(?![\d])", wish)
    branch = version.group(1) if version else None
    if branch is None and (number := re.search(r"(?<!\d)(\d{3})(?!\d)", wish)):
        branch = number.group(1)
    if branch is None and not re.search(r"[a-z]", wish):
        raise RequestError(f"driver {text!r}: write a branch (580), a version (580.173.02) or a package's name")
    return DriverWish(wish, branch, version.group(0) if version else None, bool(re.search(r"(^|[-_])open([-_]|$)", wish)))


def groups(cards: Iterable[Card]) -> tuple[tuple[Card, ...], ...]:
    """Cards of one kind together, the kind with most memory first."""
    found: dict[str, list[Card]] = {}
    for card in cards:
        found.setdefault(card.gpu.id if card.gpu else card.device_id, []).append(card)
    return tuple(sorted((tuple(group) for group in found.values()), key=_memory, reverse=True))


def _memory(group: tuple[Card, ...]) -> int:
    return sum((card.gpu.memory_mib or 0) if card.gpu else 0 for card in group)
