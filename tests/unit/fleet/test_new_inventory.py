"""The first inventory: what hosts said becomes a file that laoka's own reader and the roles' settings take."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from laoka.cli.capture import bundle_of
from laoka.fleet.inventory import load_inventory
from laoka.fleet.new_inventory import NewHost, inventory_text, names_of, notes_of
from laoka.host.collect import SshTarget
from laoka.host.report import HostReport
from laoka.host.sections import parse
from laoka.host.unread import Unread
from roles.base.deploy import BaseSettings
from tests.documented import ROOT
from tests.unit.test_cli import laoka

DATA = ROOT / "tests" / "data"
H200 = HostReport.from_probe((DATA / "hosts" / "h200_driver_580_ubuntu_2404.probe.txt").read_text(encoding="utf-8"))


def host(report: HostReport = H200, **reached: object) -> NewHost:
    return NewHost(SshTarget(**{"host": "192.168.7.21", **reached}), report)  # type: ignore[arg-type]


def written(tmp_path: Path, *hosts: NewHost) -> dict[str, dict[str, object]]:
    file = tmp_path / "lab.py"
    file.write_text(inventory_text(hosts, str(file), "2026-12-01"), encoding="utf-8")
    return {entry.name: dict(entry.data) for entry in load_inventory(file)}


def test_a_real_hosts_probe_becomes_its_entry(tmp_path: Path) -> None:
    named = dataclasses.replace(H200, hostname="GPU_1.example.net")
    data = written(tmp_path, host(named, user="ops", port=2222, key_file="/home/me/it's a key"))["gpu-1"]
    assert data["ssh_hostname"] == "192.168.7.21" and data["ssh_user"] == "ops" and data["ssh_port"] == 2222
    assert data["ssh_key"] == "/home/me/it's a key" and data["_sudo"] is True and data["os_release"] == "ubuntu-24.04"
    assert data["expected_gpus"] == [{"bdf": "0000:00:06.0", "device_id": "10de:2335"}]  # as lspci of that host has it
    BaseSettings.model_validate({"expected_gpus": data["expected_gpus"]})


def test_captures_become_entries_and_how_they_are_reached_is_left_to_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DATA / "hosts" / "h200_driver_580_ubuntu_2404.probe.txt").read_text(encoding="utf-8")
    Path("GPU 1.tar.gz").write_bytes(bundle_of(parse(text))[0])
    Path("gpu2.probe.txt").write_text(text, encoding="utf-8")
    done = laoka("--lang", "en", "init", "GPU 1.tar.gz", "gpu2.probe.txt", "-o", "lab.py")
    assert done.returncode == 0, done.stderr
    assert "gpu2: a capture does not tell how its host is reached" in done.stderr
    hosts = {entry.name: entry.data for entry in load_inventory("lab.py")}
    assert list(hosts) == ["gpu-1", "gpu2"]
    for data in hosts.values():
        assert data["expected_gpus"] == [{"bdf": "0000:00:06.0", "device_id": "10de:2335"}] and "ssh_hostname" not in data
    assert Path("lab.py").read_text().count('# "ssh_hostname": ""') == 2
    missing = laoka("--lang", "en", "init", "gpu3.tar.gz", "-o", "other.py")
    assert (missing.returncode, Path("other.py").exists()) == (2, False) and "gpu3.tar.gz: there is no such file" in missing.stderr


def test_root_needs_no_sudo(tmp_path: Path) -> None:
    assert all(data["_sudo"] is False for data in written(tmp_path, host(user="root")).values())


def test_hosts_of_one_name_are_told_apart(tmp_path: Path) -> None:
    twin = dataclasses.replace(H200, hostname="node")
    none = dataclasses.replace(H200, hostname=Unread("uname printed no host name"))
    hosts = (host(twin), host(twin), host(none))
    assert names_of(hosts) == ("node", "node-2", "host") and set(written(tmp_path, *hosts)) == {"node", "node-2", "host"}


@pytest.mark.parametrize(
    ("cards", "note"),
    [(Unread('can\'t\nbe "read"'), "cards_unread"), ((), "no_cards")],
)
def test_what_was_not_seen_is_left_out_and_told(tmp_path: Path, cards: object, note: str) -> None:
    odd = host(dataclasses.replace(H200, pci=cards))
    assert note in notes_of(odd)
    (data,) = written(tmp_path, odd).values()
    assert "expected_gpus" not in data


def test_a_card_that_is_not_in_the_catalogue_is_kept_and_told(tmp_path: Path) -> None:
    assert not isinstance(H200.gpus, Unread)
    odd = dataclasses.replace(H200.gpus[0], device_id=0x0001)
    strange = host(dataclasses.replace(H200, pci=(odd,)))
    assert notes_of(strange) == ("unknown_card",)
    (data,) = written(tmp_path, strange).values()
    assert data["expected_gpus"] == [{"bdf": "0000:00:06.0", "device_id": "10de:0001"}]
