"""Where a bench result comes from: host, cards, driver, engine, flags, lock. What was not read is None, never guessed. Pure."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from laoka import __version__
from laoka.catalog.models import model
from laoka.host.nvidia_smi import Smi
from laoka.host.report import HostReport
from laoka.host.unread import Unread
from laoka.serving.bench import cards
from laoka.serving.bench.client import ServerFacts

TINY = "tiny-qwen3"
"""The catalogue's id of the sandbox's model of random weights."""


def provenance(
    url: str,
    facts: ServerFacts,
    *,
    report: HostReport | None = None,
    flags: Mapping[str, Any] | None = None,
    lock: bytes | None = None,
    samples: Sequence[Smi] = (),
) -> dict[str, Any]:
    """The provenance of a run. Arguments: `flags` of the served model by name; `lock` the content of stack.lock.toml."""
    found: dict[str, Any] = {
        "laoka": __version__,
        "url": url,
        "model": facts.model,
        "weights": facts.root,
        "engine_version": facts.version,
        "max_model_len": facts.max_model_len,
        "serve_flags": None if flags is None else dict(flags),
        "lock_sha256": None if lock is None else hashlib.sha256(lock).hexdigest(),
        "client": f"laoka {__version__}, Python {platform.python_version()}",
        "host": None, "os": None, "kernel": None, "driver": None, "cards": None,
        "simulated": True if is_tiny(facts) else None,
        "cards_during": cards.table(samples),
    }  # fmt: skip
    if report is not None:
        system, release = report.system.os, report.kernel.release
        listing = report.nvidia.listing
        found |= {
            "host": _or_none(report.hostname),
            "os": None if isinstance(system, Unread) else f"{system.id}-{system.version_id}",
            "kernel": _or_none(release),
            "driver": None if isinstance(listing, Unread) else _or_none(listing.driver_version),
            "cards": None if isinstance(report.gpus, Unread) else [f"{gpu.id_text} at {gpu.address}" for gpu in report.gpus],
            "simulated": report.probe.simulated or is_tiny(facts),
        }
    return found


def is_tiny(facts: ServerFacts) -> bool:
    """Whether the server has the sandbox's model of random weights, by its name or by where its weights lie."""
    row = model(TINY)
    names = (TINY, *((row.repo,) if row is not None else ()))
    return facts.model == TINY or any(name in (facts.root or "") for name in names)


def _or_none(value: Any) -> Any:
    return None if isinstance(value, Unread) else value
