"""The Xid table: every number that Volta hosts were seen to print is there, and says what the field's sources say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from laoka.catalog import xids
from laoka.catalog.load import CatalogError
from laoka.catalog.messages import catalogue

CAPTURES = Path(__file__).resolve().parents[2] / "data" / "captures"


def test_every_xid_of_the_captures_of_volta_and_older_is_known() -> None:
    text = "".join(path.read_text() for path in sorted(CAPTURES.glob("*.txt")))
    numbers = {int(number) for number in re.findall(r"Xid \(PCI:[^)]*\): (\d+)", text)}
    assert {13, 32, 38, 43, 62, 63, 69, 74, 79, 94, 95, 109, 119, 144, 149, 150} <= numbers
    assert {number for number in numbers if xids.by_number(number) is None} == set()


@pytest.mark.parametrize(
    ("number", "name", "incident_class", "action", "volta"),
    [
        (79, "fallen off the bus", "off_bus", "check_power_heat_link", True),
        (45, "cleanup", "xid_application", "follow_previous", True),
        (63, "retirement recorded", "ecc", "reload_driver", True),
        (64, "retirement failed", "ecc", "replace", True),
        (48, "Double-bit ECC", "ecc", "reset", True),
        (13, "exception", "xid_application", "restart_app", True),
        (54, "power is not connected", "power", "check_power", True),
        (119, "GSP", "xid_other", "wrong_table", False),  # Volta has no GSP
        (145, "NVLink 5", "link", "wrong_table", False),
    ],
)
def test_rows(number: int, name: str, incident_class: str, action: str, volta: bool) -> None:
    row = xids.by_number(number)
    assert row is not None
    assert name in row.name
    assert (row.incident_class, row.action, row.volta) == (incident_class, action, volta)
    assert re.search(r"[\u4e00-\u9fff]", row.name_zh)


def test_every_action_has_words() -> None:
    assert {f"watchdog.action.{row.action}" for row in xids.xids()} <= set(catalogue())


def test_an_unknown_xid_is_unknown() -> None:
    assert xids.by_number(9999) is None


ROW = """
[[xid]]
id = "xid-{id}"
number = 79
name = "n"
name_zh = "n"
bucket = "b"
incident_class = "off_bus"
action = "{action}"
severity = "critical"
volta = true
source = "s"
checked = 2026-12-01
"""


@pytest.mark.parametrize(("id", "action", "words"), [("78", "reset", "number is 79"), ("79", "wrong_table", "expected on Volta")])
def test_rows_that_contradict_themselves(id: str, action: str, words: str) -> None:
    with pytest.raises(CatalogError, match=words):
        xids.parse_xids(ROW.format(id=id, action=action))
