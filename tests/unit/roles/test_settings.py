"""Inventories: a typo is told with file, line, key and a suggestion; the example loads and is right."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from laoka.fleet.keys import unknown_keys
from roles.registry import ALL_SETTINGS
from roles.settings import faults

ROOT = Path(__file__).resolve().parents[3]


def test_every_key_belongs_to_one_role() -> None:
    keys = [key for cls in ALL_SETTINGS for key in cls.model_fields]
    assert len(keys) == len(set(keys))


def test_unknown_keys_get_the_nearest_known_one() -> None:
    known = ["power_limit_w", "driver_branch"]
    data = {"power_limit": 1, "drvier_branch": 2, "zzz": 3, "ssh_user": "x", "_sudo": True}
    assert unknown_keys(data, known) == (("power_limit", "power_limit_w"), ("drvier_branch", "driver_branch"), ("zzz", None))


def test_a_typo_names_file_line_key_and_suggestion(tmp_path: Path) -> None:
    inventory = tmp_path / "lab.py"
    inventory.write_text('hosts = [\n  ("a", {\n    "power_limt_w": 175,\n  }),\n]\n')
    found = faults("a", {"power_limt_w": 175}, ALL_SETTINGS, [inventory])
    assert found == [f"{inventory}:3: host a: unknown key power_limt_w: did you mean power_limit_w?"]


def test_a_typo_in_group_data_is_found_there(tmp_path: Path) -> None:
    group = tmp_path / "all.py"
    group.write_text("_timeout = 900\ndriver_brnch = '580'\n")
    assert faults("a", {"driver_brnch": "580"}, ALL_SETTINGS, [group])[0].startswith(f"{group}:2: ")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("power_limit_w", "lots", "valid integer"),
        ("gate", "maybe", "'refuse' or 'skip'"),
        ("expected_gpus", [{"bdf": 3, "device_id": "10de:1db6"}], "valid string"),
        ("expected_gpus", [{"bdf": "03:00.0", "device_id": "10de:1db6"}], "match pattern"),
        ("expected_gpus", [{"bdf": "0000:03:00.0"}], "required"),
        ("expected_gpus", [{"bdf": "0000:03:00.0", "device_id": "10de:1db6", "slto": "1"}], "did you mean slot?"),
        ("serve_flags", {"max-model-len": [1]}, "valid"),
    ],
)
def test_a_wrong_value_names_key_value_and_what_is_wanted(key: str, value: object, says: str) -> None:
    found = faults("a", {key: value}, ALL_SETTINGS, [])
    assert found and key in found[0] and says in found[0]


EXAMPLE = ROOT / "inventories" / "example.py"


def test_the_example_is_right(tmp_path: Path) -> None:
    """As it stands, and with every line in force that is only where one needs it."""
    whole = tmp_path / "whole.py"
    whole.write_text(re.sub(r'^( +)# (")', r"\1\2", EXAMPLE.read_text(), flags=re.MULTILINE))
    (tmp_path / "example_ssh_config").write_text(EXAMPLE.with_name("example_ssh_config").read_text())
    for file in (EXAMPLE, whole):
        hosts, shared = runpy.run_path(str(file))["gpu_hosts"]
        assert [name for name, _ in hosts] == ["x99-tower", "x99-sxm2"]
        for name, own in hosts:
            data = {**shared, **own}
            assert faults(name, data, ALL_SETTINGS, [file]) == []
            assert len(data["expected_gpus"]) == 2
            assert ("ssh_config_file" in data) == (file == whole)


def test_pyinfra_loads_the_example() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("pyinfra")), "inventories/example.py", "debug-inventory"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and "x99-tower" in done.stdout + done.stderr and "x99-sxm2" in done.stdout + done.stderr


def test_the_example_shows_every_kind_of_setting() -> None:
    text = (ROOT / "inventories" / "example.py").read_text()
    for key in (
        "ssh_config_file",
        "http_proxy",
        "pip_index_url",
        "apt_sources",
        "alert_urls_file",
        "power_limit_w",
        "expected_gpus",
    ):
        assert f'"{key}"' in text
