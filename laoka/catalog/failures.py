"""Failure signatures: a piece of a log, what caused it, and what cures it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from laoka.catalog.load import CatalogError, Row, load

FILE = "failures.toml"

Step = Literal["input", "environment", "parameters", "tool"]
STEPS: tuple[Step, ...] = ("input", "environment", "parameters", "tool")
Role = Literal["cause", "symptom", "consequence"]


@dataclass(frozen=True, kw_only=True)
class Failure(Row):
    """One signature. Every text of `signature` has to be in the log, in any order; the first is the one to look for."""

    signature: tuple[str, ...]
    title: str
    title_zh: str
    cause: str
    cause_zh: str
    fix: str
    fix_zh: str
    step: Step
    """Where in the chain it sits: the model or request; driver, libraries and hardware; flags; the engine itself."""
    seen: Literal["v100-engine", "v100", "general"]
    """Seen with a V100 engine, with a V100 otherwise, or on any card."""
    role: Role = "cause"
    """symptom: says that something is wrong more than what; consequence: something before it went wrong."""
    forms: tuple[tuple[str, ...], ...] = ()
    """Its other wordings, each like `signature`."""
    cleared_by: tuple[str, ...] = ()
    """Texts that, when they come later, show that it was nothing."""
    benign: bool = False
    """True when it is only information."""

    @property
    def wordings(self) -> tuple[tuple[str, ...], ...]:
        """All wordings, `signature` first."""
        return (self.signature, *self.forms)

    def matches(self, text: str) -> bool:
        """Whether a text has it."""
        return any(all(words in text for words in wording) for wording in self.wordings) and not any(
            words in text for words in self.cleared_by
        )


@cache
def failures() -> tuple[Failure, ...]:
    """Every failure signature. Errors: CatalogError."""
    rows = load(FILE, "failure", Failure)
    for row in rows:
        if any(not wording or len(wording[0]) < 6 for wording in row.wordings):
            raise CatalogError(f"{FILE}: {row.id}: signature is empty or too short to mean anything")
    return rows
