"""What cards and host may draw against what the power supply gives. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laoka.catalog.messages import Language, text
from laoka.stack.request import Card


@dataclass(frozen=True)
class Budget:
    """The sum: `cards_w` what each card may draw, None where neither a cap nor the catalogue says."""

    cards_w: tuple[int | None, ...]
    host_w: int | None
    rating_w: int | None

    @property
    def total_w(self) -> int | None:
        """What all may draw together; None when a part of it is not known."""
        if self.host_w is None or any(watts is None for watts in self.cards_w):
            return None
        return self.host_w + sum(watts for watts in self.cards_w if watts is not None)

    @property
    def exceeded(self) -> bool:
        """Whether it is known to be more than the supply gives."""
        known = sum(watts for watts in self.cards_w if watts is not None) + (self.host_w or 0)
        return self.rating_w is not None and known > self.rating_w


def budget_of(cards: Sequence[Card], cap_w: int | None, host_w: int | None, rating_w: int | None) -> Budget:
    """The budget of a host: each card draws its cap, or without one its own maximum of the catalogue."""
    draws = tuple(cap_w if cap_w is not None else card.gpu.power_limit_max_w if card.gpu else None for card in cards)
    return Budget(draws, host_w, rating_w)


def told(budget: Budget, lang: Language) -> tuple[bool, str]:
    """(whether it must stop the run, the line for the operator)."""
    parts = " + ".join("?" if watts is None else f"{watts} W" for watts in budget.cards_w)
    host = "?" if budget.host_w is None else f"{budget.host_w} W"
    rating = "?" if budget.rating_w is None else f"{budget.rating_w} W"
    key = "over" if budget.exceeded else "unknown" if budget.total_w is None or budget.rating_w is None else "fits"
    return budget.exceeded, text(f"driver.psu_{key}", lang, cards=parts or "0 W", host=host, rating=rating)
