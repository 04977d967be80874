"""click's own messages (usage errors, headings of --help) in the reader's language, out of laoka's one catalogue.

click hands its messages to gettext, which takes translations only from a compiled file that the environment's language chooses;
laoka has a catalogue and --lang. So the two functions that click's modules hold are replaced by ours, and for Chinese those that
measure and wrap a text.
"""

from __future__ import annotations

from collections.abc import Sequence

import click.core
import click.decorators
import click.exceptions
import click.formatting
import click.parser
import click.termui
import click.types

from laoka.catalog.messages import Language, area
from laoka.cli import wide_text

MODULES = (click.core, click.decorators, click.exceptions, click.formatting, click.parser, click.termui, click.types)
# click's own name is "integer range", in errors ("'two' is not a valid integer range") and in help.
click.types.IntRange.name, click.types.FloatRange.name = "integer", "number"
OF_CLICK = {name: vars(click.formatting)[name] for name in ("term_len", "wrap_text")}


def speak(lang: Language) -> None:
    """Have click speak `lang` from now on. A message that the catalogue lacks (another release of click) stays English."""
    # English is what click says by itself: the catalogue is not read for it, so that --help stays fast.
    words = {} if lang == "en" else {texts["en"]: texts[lang] for texts in area("click").values()}

    def one(message: str) -> str:
        return words.get(message, message)

    def one_or_many(singular: str, plural: str, count: int) -> str:
        return one(singular if count == 1 else plural)

    for module in MODULES:
        for name, function in (("_", one), ("ngettext", one_or_many)):
            if hasattr(module, name):
                setattr(module, name, function)
    vars(click.formatting).update({"term_len": wide_text.cells, "wrap_text": wide_text.wrap_text} if lang == "zh" else OF_CLICK)


def wanted_language(words: Sequence[str]) -> str | None:
    """What --lang before the command says, without judging it: a usage error must be told before click has read the options."""
    for number, word in enumerate(words):
        if not word.startswith("-"):
            break
        if word.startswith("--lang="):
            return word.partition("=")[2]
        if word == "--lang":
            return words[number + 1] if number + 1 < len(words) else None
    return None
