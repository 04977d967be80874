"""Boards by DMI baseboard name: where their BIOS keeps Above 4G Decoding, MMIO sizes and CSM."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

from laoka.catalog import toml


@dataclass(frozen=True)
class Board:
    """One row. `match` is the beginning of the DMI baseboard Product Name, without case.
    Menu fields are paths as the BIOS writes them, empty where the source does not say or there is none.
    """

    vendor: str
    match: str
    above_4g: str
    above_4g_default: str
    mmio_high_base: str
    mmio_high_size: str
    csm: str
    note: str
    source: str
    checked: str


@cache
def boards() -> tuple[Board, ...]:
    """Every row of boards.toml. Errors: TypeError for a row with a field too many or too few (found by the tests)."""
    text = (resources.files("laoka.catalog") / "boards.toml").read_text(encoding="utf-8")
    return tuple(Board(**row) for row in toml.loads(text, "boards.toml")["board"])


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
