"""Groups by kind of card, as pyinfra's own loader reads them."""

from __future__ import annotations

from pathlib import Path

from laoka.fleet.groups import by_card
from laoka.fleet.inventory import load_inventory

INVENTORY = """
from laoka.fleet.groups import by_card as _by_card

here = (
    [
        ("a", {"expected_gpus": [{"bdf": "0000:03:00.0", "device_id": "10de:1db6"}, {"device_id": "10de:1db1"}]}),
        ("b", {"power_limit_w": 150}),
        "c",
    ],
    {"expected_gpus": [{"bdf": "0000:05:00.0", "device_id": "10de:1db6"}], "power_limit_w": 175},
)
there = [("d", {"expected_gpus": [{"bdf": "0000:05:00.0", "device_id": "10de:9999"}]}), ("e", {})]
globals().update(_by_card(here, there))
"""


def test_a_host_is_in_the_group_of_each_of_its_kinds_and_keeps_its_data(tmp_path: Path) -> None:
    (tmp_path / "lab.py").write_text(INVENTORY)
    (tmp_path / "group_data").mkdir()
    (tmp_path / "group_data" / "v100_sxm2_16gb.py").write_text("watchdog_reboot = True\n")
    found = {entry.name: entry for entry in load_inventory(tmp_path / "lab.py")}
    kinds = {name: {group for group in entry.groups if group.startswith(("v100", "card"))} for name, entry in found.items()}
    pcie, sxm2 = "v100_pcie_32gb", "v100_sxm2_16gb"
    assert kinds == {"a": {pcie, sxm2}, "b": {pcie}, "c": {pcie}, "d": {"card_10de_9999"}, "e": set()}
    assert [found[name].data["power_limit_w"] for name in "abc"] == [175, 150, 175]
    assert [found[name].data.get("watchdog_reboot") for name in "ab"] == [True, None]


def test_what_is_of_another_form_is_left_to_the_deploys() -> None:
    assert by_card([("a", {"expected_gpus": ["0000:03:00.0", {"bdf": "x"}]}), "b"]) == {}
