"""The whole catalogue checked at once: every file loads, every reference is there; and the hash that a lock remembers."""

from __future__ import annotations

import datetime
import hashlib
import importlib
from collections.abc import Callable, Sequence

from laoka.catalog import advisories, drivers, engines, failures, gpus, models, profiles
from laoka.catalog.load import CatalogError, Row, read_text

# What a stack is resolved from. Boards, Xids and failure signatures are left out: a new one must not make a lock stale.
STACK_FILES = (gpus.FILE, drivers.FILE, engines.FILE, models.FILE, profiles.FILE, advisories.FILE)

LOADERS: dict[str, Callable[[], Sequence[Row]]] = {
    gpus.FILE: gpus.gpus,
    drivers.FILE: drivers.branches,
    engines.FILE: engines.engines,
    models.FILE: models.models,
    profiles.FILE: profiles.profiles,
    failures.FILE: failures.failures,
    advisories.FILE: advisories.advisories,
}
# Kept by the checks and by the agent: (file, module, function).
OTHERS = (("boards.toml", "laoka.catalog.boards", "boards"), ("xids.toml", "laoka.catalog.xids", "xids"))


def check_all() -> dict[str, int]:
    """Load every file and check every reference. Returns rows by file. Errors: CatalogError, one line."""
    found = {name: len(read()) for name, read in LOADERS.items()}
    for name, module, function in OTHERS:
        found[name] = len(getattr(importlib.import_module(module), function)())
    known = {branch.number for branch in drivers.branches()}
    for gpu in gpus.gpus():
        for key in ("first_driver_branch", "last_driver_branch"):
            branch = getattr(gpu, key)
            if branch is not None and branch not in known:
                raise CatalogError(f"{gpus.FILE}: {gpu.id}: {key} names {branch}, which the catalogue does not have")
    schemes = {scheme for engine in engines.engines() for scheme in engine.quantisations}
    for model in models.models():
        for pin in model.validated_by:
            if pin not in {engine.name for engine in engines.engines()}:
                raise CatalogError(f"{models.FILE}: {model.id}: validated_by names {pin}, which the catalogue does not have")
        if model.scheme not in schemes and not model.scheme.endswith(":mixed"):
            raise CatalogError(f"{models.FILE}: {model.id}: no engine knows the scheme {model.scheme}")
    return found


def newest_check() -> datetime.date:
    """The day on which the newest fact of the catalogue was looked at. Errors: CatalogError."""
    return max(row.checked for read in LOADERS.values() for row in read())


def catalogue_hash() -> str:
    """SHA-256 over the files that a stack is resolved from."""
    digest = hashlib.sha256()
    for name in sorted(STACK_FILES):
        digest.update(name.encode() + b"\0" + read_text(name).encode() + b"\0")
    return f"sha256:{digest.hexdigest()}"
