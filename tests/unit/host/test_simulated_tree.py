"""The probe reads a sandbox host's simulated card as it reads a real one, and says that it is simulated."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from laoka import checks
from laoka.host.probe import script
from laoka.host.report import HostReport
from laoka.sandbox import card

CARDS = (card.v100_pcie_32gb("0000:03:00.0", 1), card.v100_pcie_32gb("0000:02:00.0", 2))


def probe(folder: Path) -> HostReport:
    """The report with the simulated tree where the sandbox mounts it."""
    devices = str(folder / "sys/bus/pci/devices")
    asked = script().replace("dev=/sys/bus/pci/devices", f"dev={devices}").replace("/srv/laoka-sandbox", str(folder))
    done = subprocess.run(["sh", "-s"], input=asked, capture_output=True, text=True, timeout=30, check=True)
    return HostReport.from_probe(done.stdout.replace(devices, "/sys/bus/pci/devices"))


@pytest.mark.parametrize("above_4g", [True, False])
def test_a_simulated_host(tmp_path: Path, above_4g: bool) -> None:
    card.create(tmp_path, CARDS, bar_above_4g=above_4g)
    report = probe(tmp_path)
    assert report.probe.simulated
    assert [(gpu.address, gpu.id_text) for gpu in report.gpus or ()] == [
        ("0000:02:00.0", "10de:1db6"),
        ("0000:03:00.0", "10de:1db6"),
    ]
    stopping = {(f.id, f.subject) for f in checks.gate(report, 2) if f.id != "platform.kind"}
    wanted = set() if above_4g else {("firmware.above-4g", gpu.bdf) for gpu in CARDS}
    assert stopping == wanted
    assert "simulated" in next(f for f in checks.run(report) if f.id == "platform.simulated").title("en")


def test_a_simulated_card_that_fell_off(tmp_path: Path) -> None:
    card.create(tmp_path, CARDS)
    card.apply_fault(tmp_path, "off-bus", "0000:03:00.0")
    report = probe(tmp_path)
    found = {(f.id, f.case, f.subject) for f in checks.run(report, expected_gpus=2)}
    assert ("cards.answer", "dead", "0000:03:00.0") in found
    assert ("xid.fell-off", "gone", "0000:03:00.0") in found
    assert any(f.id == "cards.answer" for f in checks.gate(report, 2))


def test_a_simulated_card_that_is_gone(tmp_path: Path) -> None:
    card.create(tmp_path, CARDS)
    card.apply_fault(tmp_path, "card-gone", "0000:03:00.0")
    stopping = {(f.id, f.case) for f in checks.gate(probe(tmp_path), 2)}
    assert ("cards.present", "missing") in stopping
