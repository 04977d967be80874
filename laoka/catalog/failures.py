"""Failure signatures: a piece of a log, what caused it, and what cures it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from laoka.catalog.load import CatalogError, Row, load

FILE = "failures.toml"


@dataclass(frozen=True, kw_only=True)
class Failure(Row):
    """One signature. Every text of `signature` has to be in the log, in any order."""

    signature: tuple[str, ...]
    cause: str
    fix: str
    step: Literal["input", "environment", "parameters", "tool"]
    """Where in the chain it sits: the model or request; driver, libraries and hardware; flags; the engine itself."""
    seen: Literal["v100-engine", "v100", "general"]
    """Seen with a V100 engine, with a V100 otherwise, or on any card."""
    benign: bool = False
    """True when it is only information."""


@cache
def failures() -> tuple[Failure, ...]:
    """Every failure signature. Errors: CatalogError."""
    rows = load(FILE, "failure", Failure)
    for row in rows:
        if not row.signature or any(len(text) < 6 for text in row.signature):
            raise CatalogError(f"{FILE}: {row.id}: signature is empty or too short to mean anything")
    return rows
