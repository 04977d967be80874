"""Advisories: releases to stay away from and hazards to act on, with what is known and what is not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from laoka.catalog.engines import engines
from laoka.catalog.load import CatalogError, Row, load

FILE = "advisories.toml"


@dataclass(frozen=True, kw_only=True)
class Advisory(Row):
    """One advisory. `versions` is a version specifier such as "<0.24"."""

    engine: str
    versions: str
    action: Literal["refuse", "act", "advise"]
    """refuse: never resolved to; act: the resolver or the plan does something about it; advise: said, no more."""
    title: str
    known: str
    title_zh: str = ""
    """Of what is refused."""
    known_zh: str = ""
    """Of what is said."""
    unknown: str = ""
    done: str = ""
    """What laoka does about it."""
    min_tensor_parallel: int = 1
    links: tuple[str, ...] = ()


@cache
def advisories() -> tuple[Advisory, ...]:
    """Every advisory. Errors: CatalogError."""
    rows = load(FILE, "advisory", Advisory)
    names = {engine.name for engine in engines()}
    for row in rows:
        if row.engine not in names:
            raise CatalogError(f"{FILE}: {row.id}: engine names {row.engine}, which the catalogue does not have")
        if row.action == "act" and not row.done:
            raise CatalogError(f"{FILE}: {row.id}: says that laoka acts, but not how (done)")
        if (row.action == "refuse" and not row.title_zh) or (row.action == "advise" and not row.known_zh):
            raise CatalogError(f"{FILE}: {row.id}: its Chinese is missing (title_zh of what is refused, known_zh of what is said)")
    return rows
