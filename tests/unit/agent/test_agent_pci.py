"""The PCI sensor: gone, swapped, dead and unreadable are four different things, and none of them is ok."""

from __future__ import annotations

from pathlib import Path

import pytest

from laoka.agent import pci
from laoka.agent.config import ExpectedGpu
from laoka.agent.signals import Reading

BDF = "0000:03:00.0"
V100 = ExpectedGpu(bdf=BDF, device_id="10de:1db6")


def put(root: Path, bdf: str = BDF, vendor: str = "10de", device: str = "1db6", config: bytes | None = None) -> Path:
    folder = root / "bus/pci/devices" / bdf
    folder.mkdir(parents=True, exist_ok=True)
    files = {"vendor": f"0x{vendor}\n", "device": f"0x{device}\n", "class": "0x030200\n"}
    for name, content in {**files, "current_link_speed": "8.0 GT/s PCIe\n", "current_link_width": "16\n"}.items():
        (folder / name).write_text(content)
    header = bytes.fromhex(vendor)[::-1] + bytes.fromhex(device)[::-1] + bytes(60)
    (folder / "config").write_bytes(header if config is None else config)
    return folder


def look(root: Path, *expected: ExpectedGpu) -> Reading:
    return pci.judge(expected, *pci.read_devices(str(root), expected, {}))


def test_present(tmp_path: Path) -> None:
    put(tmp_path)
    put(tmp_path, "0000:00:1f.2", "8086", "8d02")
    reading = look(tmp_path, V100)
    assert (reading.verdict, reading.signals) == ("ok", ())
    assert (reading.facts["seen"], reading.facts["expected"], reading.facts["unexpected"]) == (1, 1, [])
    assert reading.facts["cards"][0]["link"] == "8.0 GT/s PCIe x16"


@pytest.mark.parametrize(("kind", "state"), [("card_gone", "gone"), ("config_dead", "dead"), ("card_swapped", "swapped")])
def test_faults(tmp_path: Path, kind: str, state: str) -> None:
    put(tmp_path, "0000:04:00.0")
    if kind == "config_dead":
        put(tmp_path, config=b"\xff" * 4096)
    elif kind == "card_swapped":
        put(tmp_path, device="1db4")
    reading = look(tmp_path, V100, ExpectedGpu(bdf="0000:04:00.0", device_id="10de:1db6"))
    assert reading.verdict == "bad"
    assert [(signal.kind, signal.bdf) for signal in reading.signals] == [(kind, BDF)]
    assert [card["state"] for card in reading.facts["cards"]] == [state, "present"]
    assert reading.facts["seen"] == (2 if kind == "card_swapped" else 1)


def test_a_dead_card_is_not_seen_even_when_nobody_expects_it(tmp_path: Path) -> None:
    put(tmp_path, config=b"\xff" * 64)
    put(tmp_path, "0000:04:00.0")
    reading = look(tmp_path)
    assert (reading.verdict, reading.facts["seen"], reading.facts["unexpected"]) == ("unknown", 1, [BDF, "0000:04:00.0"])


def test_what_can_not_be_read_is_unknown(tmp_path: Path) -> None:
    reading = look(tmp_path / "none", V100)
    assert reading.verdict == "unknown"
    assert "No such file" in reading.detail
    put(tmp_path, config=b"\xde\x10")
    reading = look(tmp_path, V100)
    assert (reading.verdict, reading.unread) == ("unknown", frozenset({BDF}))
    folder = put(tmp_path)
    (folder / "vendor").unlink()
    assert look(tmp_path, V100).verdict == "unknown"


def test_one_unreadable_card_does_not_hide_another_that_is_gone(tmp_path: Path) -> None:
    put(tmp_path, config=b"")
    reading = look(tmp_path, V100, ExpectedGpu(bdf="0000:04:00.0", device_id="10de:1db6"))
    assert (reading.verdict, reading.unread) == ("bad", frozenset({BDF}))
    assert [signal.bdf for signal in reading.signals] == ["0000:04:00.0"]
