"""Chinese for texts whose English stands in code (the help of commands, the docstrings of inventory keys), found by that English.

The tests hold each file against the code: an English text that was changed has no Chinese until somebody wrote it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from importlib import resources

from laoka.catalog import toml


@cache
def translations(name: str) -> Mapping[str, str]:
    """English text -> Chinese text of one file of this folder: help or keys. Errors: TomlError."""
    file = resources.files("laoka.catalog.translations") / f"{name}.toml"
    return {row["en"].strip("\n"): row["zh"].strip("\n") for row in toml.loads(file.read_text(encoding="utf-8"), file.name)["text"]}


def chinese(name: str, english: str) -> str:
    """The Chinese of a text of code, indented there as it may be; the English where there is none."""
    return translations(name).get(inspect.cleandoc(english), english)
