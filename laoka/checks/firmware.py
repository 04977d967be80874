"""Firmware: can this board give the cards their BARs, and what in its settings makes that likely or not."""

from __future__ import annotations

from collections.abc import Iterator

from laoka.catalog.boards import menu_path
from laoka.checks.above_4g import climb, without_card
from laoka.checks.finding import Outcome
from laoka.checks.registry import Wanted, check, fail, info, ok, outcome, unread
from laoka.host.report import HostReport
from laoka.host.unread import Unread


@check(
    "firmware.above-4g",
    gate=True,
    source="sysfs resource files, /proc/iomem, boot messages; ReBarUEFI issues 11, 329, 395",
)
def above_4g(report: HostReport, wanted: Wanted) -> Iterator[Outcome]:
    """Every card's BAR1 has its full size at an address; if not, the rung of the ladder that says why."""
    menu = _menu(report)
    gpus = report.gpus
    if isinstance(gpus, Unread) or not gpus:
        # Without a card nothing can prove it; the missing card itself is the business of cards.present.
        ladder = without_card(report)
        if ladder.state == "unread":
            yield unread(gpus if isinstance(gpus, Unread) else Unread("no card and no window"), *ladder.evidence)
        elif ladder.state in ("too-small", "no-room"):
            yield fail(f"no-card-{ladder.state}", *ladder.evidence, rung=ladder.rung, menu=menu)
        else:
            yield info(f"no-card-{ladder.state}", *ladder.evidence, rung=ladder.rung, menu=menu)
        return
    for gpu in gpus:
        ladder = climb(report, gpu)
        evidence = (*ladder.evidence, f"rung {ladder.rung}")
        if ladder.state == "on":
            yield ok(*evidence, subject=gpu.address, rung=ladder.rung)
        elif ladder.state == "unknown":
            yield outcome("unknown", "undecided", *evidence, subject=gpu.address, rung=ladder.rung, menu=menu)
        else:
            yield fail(ladder.state, *evidence, subject=gpu.address, rung=ladder.rung, menu=menu)


def _menu(report: HostReport) -> str:
    """The BIOS menu path of this board, or the usual one."""
    name = report.firmware.board_name
    return menu_path(None if isinstance(name, Unread) else name)
