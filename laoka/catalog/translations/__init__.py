"""Chinese for texts whose English stands in code (help of commands, docstrings of inventory keys, errors), found by that English.

The tests hold each file against the code: an English text that was changed has no Chinese until somebody wrote it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from importlib import resources

from laoka.catalog import toml
from laoka.catalog.messages import COLON, SEMICOLON, Language

VALUE = re.compile(r"\{\d+\}")
MAX_DEPTH = 6  # errors inside of errors; a log that somebody put into a message is not read to its end
MAX_CHARS = 2000


@cache
def translations(name: str) -> Mapping[str, str]:
    """English text -> Chinese text of one file of this folder: help, keys or errors. Errors: TomlError."""
    file = resources.files("laoka.catalog.translations") / f"{name}.toml"
    return {row["en"].strip("\n"): row["zh"].strip("\n") for row in toml.loads(file.read_text(encoding="utf-8"), file.name)["text"]}


def chinese(name: str, english: str) -> str:
    """The Chinese of a text of code, indented there as it may be; the English where there is none."""
    return translations(name).get(inspect.cleandoc(english), english)


def error_text(message: str, lang: Language) -> str:
    """What an error says, in `lang`: errors are raised in English wherever they arise, and get a language where they are printed.

    An error inside of another (`FILE: host NAME: ...`) is told in that language too; what is not ours (a library's words) stays.
    """
    return message if lang == "en" else _told(message)[0]


@cache
def _error_patterns() -> tuple[tuple[int, re.Pattern[str], str], ...]:
    """Of every error's text: how many characters are its own, the pattern with its values, and its Chinese."""
    found = []
    for english, told in translations("errors").items():
        words = VALUE.split(english)
        found.append((sum(map(len, words)), re.compile("(.*?)".join(map(re.escape, words)), re.DOTALL), told))
    return tuple(found)


@lru_cache(maxsize=1000)
def _told(message: str, depth: int = 0) -> tuple[str, int]:
    """A message in Chinese and how many characters of it were known: of all readings the one that knows most is taken."""
    best = message, 0
    if depth == MAX_DEPTH or len(message) > MAX_CHARS:
        return best
    for own, pattern, told in _error_patterns():
        if found := pattern.fullmatch(message):
            values = [_told(value, depth + 1) for value in found.groups()]
            known = own + sum(inner for _, inner in values)
            if known > best[1]:
                best = _filled(told, [text for text, _ in values]), known
    for between in (SEMICOLON, COLON):
        first, separator, rest = message.partition(between["en"])
        if separator:
            (before, known_before), (after, known_after) = _told(first, depth + 1), _told(rest, depth + 1)
            if known_before + known_after > best[1]:
                best = before + between["zh"] + after, known_before + known_after
    return best


def _filled(template: str, values: Sequence[str]) -> str:
    """A text with its numbered values."""
    return VALUE.sub(lambda number: values[int(number[0][1:-1])], template)
