"""What NVIDIA's own tool said: the listing, whether it hung, and every complaint it made on the way."""

from __future__ import annotations

import re
from dataclasses import dataclass

from laoka.host import nvidia_smi
from laoka.host.nvidia_smi import NvLink, Smi, TableRow, Trouble
from laoka.host.sections import Sections
from laoka.host.unread import Maybe, Unread


@dataclass(frozen=True)
class Nvidia:
    """`hung`: nvidia-smi did not end, or one was hanging before us. `rows`: the plain table, where that was given."""

    listing: Maybe[Smi]
    trouble: Trouble
    hung: bool
    rows: Maybe[tuple[TableRow, ...]]
    links: Maybe[tuple[NvLink, ...]]
    settings_in_bios: Maybe[tuple[tuple[str, str], ...]]


def read_nvidia(sections: Sections) -> Nvidia:
    """From nvidia-smi-xml or nvidia-smi-q, and from the smaller outputs nvidia-smi, nvlink and bios-menu."""
    xml, listed = sections.section("nvidia-smi-xml"), sections.output("nvidia-smi-q")
    plain, links, menu = sections.output("nvidia-smi"), sections.output("nvlink"), sections.output("bios-menu")
    hung, words = False, ""
    listing: Maybe[Smi]
    if isinstance(xml, Unread):
        hung = "already hangs" in xml.reason
        listing = xml
    elif xml.timed_out:
        hung, listing, words = True, Unread("nvidia-smi did not answer before its deadline"), xml.stdout + xml.stderr
    else:
        listing, words = nvidia_smi.read_xml(xml.stdout, xml.stderr), xml.stdout[-4000:] + "\n" + xml.stderr
    if isinstance(listing, Unread) and not isinstance(listed, Unread):
        listing, words = nvidia_smi.read_q(listed), listed
    if not isinstance(plain, Unread):
        words += "\n" + plain
    return Nvidia(
        listing,
        nvidia_smi.read_trouble(words),
        hung,
        plain if isinstance(plain, Unread) else nvidia_smi.read_table(plain),
        links if isinstance(links, Unread) else nvidia_smi.read_nvlink(links),
        menu if isinstance(menu, Unread) else read_bios_menu(menu),
    )


def read_bios_menu(text: str) -> tuple[tuple[str, str], ...]:
    """`Setting: [Value]` pairs, as people write BIOS menus down."""
    found = re.findall(r"([^>;:\[\]\n]+): \[([^\]\n]*)\]", text)
    return tuple((name.strip(), value.strip()) for name, value in found)
