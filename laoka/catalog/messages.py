"""What laoka says to an operator, in English and Chinese: one catalogue, one lookup."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Literal

from laoka.catalog import toml

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")


COLON: dict[Language, str] = {"en": ": ", "zh": "："}
SEMICOLON: dict[Language, str] = {"en": "; ", "zh": "；"}
"""What stands between a word and what is said of it, and between things that are told in one line."""


class UnknownMessage(KeyError):
    """A message key that the catalogue does not have: a fault of ours, found by the tests."""


@cache
def catalogue() -> Mapping[str, Mapping[Language, str]]:
    """Every message by key; keys are `area.name`, the area being the file in catalog/messages/."""
    found: dict[str, Mapping[Language, str]] = {}
    for entry in sorted((resources.files("laoka.catalog") / "messages").iterdir(), key=lambda item: item.name):
        if not entry.name.endswith(".toml"):
            continue
        name_of_area = entry.name.removesuffix(".toml")
        found |= {f"{name_of_area}.{name}": texts for name, texts in area(name_of_area).items()}
    return found


@cache
def area(name: str) -> Mapping[str, Mapping[Language, str]]:
    """The messages of one area by their name in it."""
    file = resources.files("laoka.catalog") / "messages" / f"{name}.toml"
    return toml.loads(file.read_text(encoding="utf-8"), file.name)


def text(key: str, lang: Language, **values: object) -> str:
    """The message `key` in `lang`, its `{placeholders}` filled from `values`. Errors: UnknownMessage."""
    try:
        template = catalogue()[key][lang]
    except KeyError:
        raise UnknownMessage(f"{key} [{lang}]") from None
    return template.format(**values)


def language(wanted: str | None = None, env: Mapping[str, str] | None = None) -> Language:
    """The language to speak: `wanted` (of --lang) first, then LC_ALL, LC_MESSAGES, LANG; English otherwise."""
    env = os.environ if env is None else env
    for value in (wanted, env.get("LC_ALL"), env.get("LC_MESSAGES"), env.get("LANG")):
        if value:
            return "zh" if value.lower().startswith("zh") else "en"
    return "en"
