"""A fact that could not be read, with the reason: never a default, never an empty list that looks like "none"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Unread:
    """Stands where a value would be; `reason` is one line for the operator (English)."""

    reason: str

    def __bool__(self) -> bool:
        """Never true, so that `if fact:` can't take an unread fact for a yes."""
        return False


Maybe: TypeAlias = T | Unread
