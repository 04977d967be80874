"""What the resolver has to say, as a key and values: the words come from the message catalogue, in the reader's language."""

from __future__ import annotations

from dataclasses import dataclass

from laoka.catalog.messages import Language, text


@dataclass(frozen=True)
class Message:
    """A message of catalog/messages/stack.toml and what fills it in."""

    key: str
    values: tuple[tuple[str, object], ...] = ()

    def say(self, lang: Language = "en") -> str:
        """The message in a language."""
        return text(f"stack.{self.key}", lang, **dict(self.values))


def message(key: str, **values: object) -> Message:
    """A message, its values by name."""
    return Message(key, tuple(sorted(values.items())))


@dataclass(frozen=True)
class Violation:
    """A constraint that is not met: which, what shows it, and a way out."""

    constraint: str
    evidence: Message
    way_out: Message
