"""Xids by number, as they stand for a Tesla V100: what each means, its class of incident, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from laoka.catalog.load import CatalogError, Row, load, parse

FILE = "xids.toml"

XidClass = Literal["off_bus", "ecc", "link", "power", "xid_application", "xid_other"]
XidAction = Literal[
    "check_link",
    "check_power",
    "check_power_heat_link",
    "cold_cycle",
    "follow_previous",
    "inspect",
    "reboot",
    "reload_driver",
    "replace",
    "reset",
    "restart_app",
    "watch",
    "wrong_table",
]
Severity = Literal["notice", "warning", "critical"]


@dataclass(frozen=True, kw_only=True)
class XidRow(Row):
    """One Xid. Class, action and severity are laoka's reading for Volta, `bucket` is NVIDIA's for newer cards."""

    number: int
    name: str
    name_zh: str
    bucket: str
    incident_class: XidClass
    action: XidAction
    """What to do, by name; `wrong_table` means that a V100 is not expected to print it, so the card is not what it seems."""
    severity: Severity
    volta: bool
    notes: str = ""


def check(rows: tuple[XidRow, ...]) -> tuple[XidRow, ...]:
    """What the types alone don't say. Errors: CatalogError."""
    for row in rows:
        if row.id != f"xid-{row.number}":
            raise CatalogError(f"{FILE}: {row.id}: number is {row.number}")
        if (row.action == "wrong_table") and row.volta:
            raise CatalogError(f"{FILE}: {row.id}: is expected on Volta, so its action can't be wrong_table")
    return rows


def parse_xids(text: str, name: str = FILE) -> tuple[XidRow, ...]:
    """Xids of a TOML text. Errors: CatalogError."""
    return check(parse(text, name, "xid", XidRow))


@cache
def xids() -> tuple[XidRow, ...]:
    """Every Xid of the catalogue. Errors: CatalogError."""
    return check(load(FILE, "xid", XidRow))


def by_number(number: int) -> XidRow | None:
    """The row of an Xid, or None when the catalogue lacks it: unknown, not harmless."""
    return next((row for row in xids() if row.number == number), None)
