"""Wrapping of --help for a script whose characters take two cells of a terminal and have no spaces between them.

click counts characters and breaks at spaces: a Chinese paragraph is one word to it, cut where it likes and twice as wide as told.
"""

from __future__ import annotations

import re
import textwrap
from unicodedata import east_asian_width

from click import unstyle

NO_LINE_BEGINS_WITH = "，。；：！？、）】》”’…"
# A space, a word of other scripts, or one wide character; each with what may not begin the next line.
PIECE = re.compile(rf"\s+|(?:[\x21-\u2fff]+|[^\s\x21-\u2fff（【《“‘]|[（【《“‘]+\S?)[{NO_LINE_BEGINS_WITH}]*")


def cells(text: str) -> int:
    """How many cells of a terminal a text takes: two for a wide character."""
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in unstyle(text))


def filled(text: str, width: int, first: str, other: str) -> str:
    """One paragraph, wrapped to `width` cells; `first` and `other` begin its lines."""
    lines, line = [], first
    for piece in PIECE.findall(" ".join(text.split())):
        if cells(line + piece.rstrip()) > width and line.strip():
            lines.append(line.rstrip())
            line = other + piece.lstrip()
        else:
            line += piece
    return "\n".join([*lines, line.rstrip()])


def wrap_text(
    text: str, width: int = 78, initial_indent: str = "", subsequent_indent: str = "", preserve_paragraphs: bool = False
) -> str:
    """As click's function of this name: paragraphs are wrapped, one that begins with a backspace of its own line is not."""
    if not preserve_paragraphs:
        return filled(text, width, initial_indent, subsequent_indent)
    parts = []
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        lines = paragraph.splitlines()
        indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())] if lines else ""
        if lines and lines[0].strip() == "\b":
            parts.append(textwrap.indent("\n".join(lines[1:]), subsequent_indent))
        else:
            parts.append(filled(paragraph, width, initial_indent + indent, subsequent_indent + indent))
    return "\n\n".join(parts)
