"""What the resolver has to say, as a key and values: the words come from the message catalogue, in the reader's language."""

from __future__ import annotations

from dataclasses import dataclass

from laoka.catalog.messages import Language, text


@dataclass(frozen=True)
class InBoth:
    """A text of a catalogue's row, in both languages."""

    en: str
    zh: str

    def say(self, lang: Language = "en") -> str:
        """The text in a language."""
        return self.zh if lang == "zh" else self.en


@dataclass(frozen=True)
class Message:
    """A message of catalog/messages/stack.toml (or, with its area before a dot, of another file) and what fills it in."""

    key: str
    values: tuple[tuple[str, object], ...] = ()

    def say(self, lang: Language = "en") -> str:
        """The message in a language."""
        # A message may carry others: they are said in the same language.
        values = {name: value.say(lang) if isinstance(value, (Message, InBoth)) else value for name, value in self.values}
        return text(self.key if "." in self.key else f"stack.{self.key}", lang, **values)


def message(key: str, **values: object) -> Message:
    """A message, its values by name."""
    return Message(key, tuple(sorted(values.items(), key=lambda item: item[0])))


@dataclass(frozen=True)
class Violation:
    """A constraint that is not met: which, what shows it, and a way out."""

    constraint: str
    evidence: Message
    way_out: Message
