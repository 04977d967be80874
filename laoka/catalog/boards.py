"""Boards by DMI baseboard name: where their BIOS keeps Above 4G Decoding, MMIO sizes and CSM."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from laoka.catalog.load import Row, load


@dataclass(frozen=True, kw_only=True)
class Board(Row):
    """One kind of board. Menu fields are paths as its BIOS writes them; None where the source does not say."""

    vendor: str
    match: str
    """The beginning of the DMI baseboard Product Name, without case."""
    above_4g: str | None = None
    above_4g_default: str | None = None
    has_above_4g: bool = True
    """False where a report says that the BIOS has no such option, or none that works."""
    mmio_high_base: str | None = None
    mmio_high_size: str | None = None
    csm: str | None = None
    notes: str = ""


@cache
def boards() -> tuple[Board, ...]:
    """Every board of the catalogue. Errors: CatalogError."""
    return load("boards.toml", "board", Board)


def by_name(board_name: str | None) -> Board | None:
    """The row of a DMI baseboard Product Name, the longest match first; None when it is not known."""
    if not board_name:
        return None
    fitting = [board for board in boards() if board_name.strip().lower().startswith(board.match.lower())]
    return max(fitting, key=lambda board: len(board.match), default=None)


# Where AMI's Aptio, which nearly all X99 and X10 boards use, puts them unless the maker moved them.
USUAL_MENU = "Advanced > PCI Subsystem Settings > Above 4G Decoding: [Enabled]"


def menu_path(board_name: str | None) -> str:
    """What to set where, for this board, or the usual place."""
    board = by_name(board_name)
    if board is None or not board.above_4g:
        return USUAL_MENU
    parts = [f"{board.above_4g}: [Enabled]"]
    if board.mmio_high_base:
        parts.append(board.mmio_high_base)
    if board.mmio_high_size:
        parts.append(board.mmio_high_size)
    if board.csm:
        parts.append(f"{board.csm}: [Disabled]")
    return "; ".join(parts)
