"""A finding: what one check saw on one host, how bad it is, why it matters and what to do; worded in two languages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from laoka.catalog.messages import Language, UnknownMessage, catalogue, text

Severity = Literal["ok", "info", "warn", "unknown", "fail"]
# From harmless to worst: "could not read" is worse than a warning, because anything may hide behind it.
SEVERITIES: tuple[Severity, ...] = ("ok", "info", "warn", "unknown", "fail")


@dataclass(frozen=True)
class Outcome:
    """What a check function yields; the runner adds the check's id and area. `case` picks the wording."""

    severity: Severity
    case: str
    evidence: tuple[str, ...] = ()
    subject: str | None = None
    values: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Finding:
    """One check's result. `subject` is the card or device it is about (a PCI address), None for the host as a whole."""

    id: str
    area: str
    severity: Severity
    case: str
    evidence: tuple[str, ...] = ()
    subject: str | None = None
    values: tuple[tuple[str, str], ...] = ()
    accepted: str | None = None

    def title(self, lang: Language) -> str:
        """One line: what was found."""
        return self._say("", lang) or ""

    def why(self, lang: Language) -> str:
        """Why it matters; empty for what is as it should be."""
        return "" if self.severity == "ok" else self._say(".why", lang) or ""

    def next(self, lang: Language) -> str:
        """What to do now; empty for what is as it should be."""
        return "" if self.severity == "ok" else self._say(".next", lang) or ""

    def _say(self, part: str, lang: Language) -> str | None:
        """The wording of this case, of this check (but for what was not read), or of this kind of result in general."""
        values = {**dict(self.values), "label": label(self.id, lang), "subject": self.subject or ""}
        of_check = (f"checks.{self.id}{part}",) if part and self.case != "unread" else ()
        for key in (f"checks.{self.id}.{self.case}{part}", *of_check, f"checks.{self.case}{part}"):
            if key in catalogue():
                return text(key, lang, **values)
        if part:
            return None
        raise UnknownMessage(f"checks.{self.id}.{self.case}")


def label(check_id: str, lang: Language) -> str:
    """What a check looks at, in a few words."""
    return text(f"checks.{check_id}", lang)


def worst(severities: tuple[Severity, ...]) -> Severity:
    """The worst of them; `unknown` when there are none: nothing was checked."""
    return max(severities, key=SEVERITIES.index) if severities else "unknown"
