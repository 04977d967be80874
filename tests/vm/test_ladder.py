"""Above 4G, link and lost cards on real kernels: the probe and the checks against a virtual machine with simulated V100s.

The kernels are Debian's own (6.1 and 5.10) in QEMU; the cards are laoka/sandbox/fakepci: their configuration space is simulated,
and what the kernel makes of it (windows, BARs, sysfs, its log) is real.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from laoka import checks
from laoka.checks.above_4g import Ladder, climb
from laoka.checks.finding import Finding
from laoka.host import collect
from laoka.host.report import HostReport
from laoka.host.sections import parse
from laoka.host.unread import Unread
from laoka.sandbox import vm
from laoka.sandbox.lab import open_lab
from tests.hosts import until

pytestmark = pytest.mark.vm
FIRST, SECOND = "0000:81:00.0", "0000:82:00.0"
WINDOW_TOO_SMALL_MIB = 48 * 1024  # room for one BAR1 of 32 GiB, not for two


@pytest.fixture(scope="module")
def guest() -> Iterator[vm.Vm]:
    image = vm.image(open_lab("tests").state, print)
    with vm.running(image, "ladder") as started:
        yield started


def whole_probe(guest: vm.Vm) -> str | None:
    """The real probe's text, by one round trip over ssh; None where a busy guest was too slow for a section's deadline."""
    text = collect.text_over_ssh(vm.ssh_target(guest))
    return None if any(section.timed_out for section in parse(text).by_name.values()) else text


def look(guest: vm.Vm) -> HostReport:
    """The report of one probe of which every section came in time."""
    report = HostReport.from_probe(until(lambda: whole_probe(guest), 120, "a probe without a late section"))
    assert report.probe.is_root and not report.probe.simulated
    return report


def findings(report: HostReport) -> set[tuple[str, str, str | None]]:
    """What is not right, as (id, case, card)."""
    return {(f.id, f.case, f.subject) for f in checks.run(report, expected_gpus=2) if f.severity not in ("ok", "unknown")}


def ladders(report: HostReport) -> dict[str, Ladder]:
    assert not isinstance(report.gpus, Unread)
    return {gpu.address: climb(report, gpu) for gpu in report.gpus}


def rungs(report: HostReport) -> dict[str, tuple[str, int]]:
    return {address: (found.state, found.rung) for address, found in ladders(report).items()}


def kernel_says(guest: vm.Vm, words: str) -> bool:
    return words in vm.execute(guest, "dmesg", check=True).stdout


def of_cards(found: set[tuple[str, str, str | None]], check: str) -> set[tuple[str, str | None]]:
    return {(case, card) for name, case, card in found if name == check}


@pytest.fixture
def fresh(guest: vm.Vm) -> vm.Vm:
    """The guest as it booted, without cards."""
    vm.restore(guest)
    return guest


def test_cards_that_are_placed_then_trained_down_lost_and_pulled(fresh: vm.Vm) -> None:
    vm.load_fakepci(fresh, cards=2)
    report = look(fresh)
    assert rungs(report) == {
        FIRST: ("on", 1),
        SECOND: ("on", 1),
    }
    placed = findings(report)
    assert not {name for name, _, _ in placed} & {"firmware.above-4g", "pcie.width", "pcie.speed", "cards.answer", "cards.present"}

    vm.set_fakepci(fresh, speed=(1, 3), width=(16, 8))
    found = findings(look(fresh))
    assert of_cards(found, "pcie.speed") and {card for _, card in of_cards(found, "pcie.speed")} == {FIRST}
    assert of_cards(found, "pcie.width") == {("trained-down", SECOND)}

    vm.set_fakepci(fresh, speed=(3, 3), width=(16, 16), lost=2)
    listed = vm.execute(fresh, f"cat /sys/bus/pci/devices/{SECOND}/vendor; setpci -s {SECOND} 0.l").stdout.split()
    assert listed == ["0x10de", "ffffffff"]  # sysfs still shows what the card no longer answers
    report = look(fresh)
    assert of_cards(findings(report), "cards.answer") == {("dead", SECOND)}
    assert ("cards.answer", SECOND) in {(f.id, f.subject) for f in checks.gate(report, 2)}

    vm.set_fakepci(fresh, lost=0)
    vm.set_fakepci(fresh, removed=2)
    report = look(fresh)
    assert of_cards(findings(report), "cards.present") == {("missing", None)}
    missing = next(f for f in checks.gate(report, 2) if f.id == "cards.present")
    assert any(SECOND in line and "gone" in line for line in missing.evidence)


def test_no_window_above_4_gib(fresh: vm.Vm) -> None:
    vm.load_fakepci(fresh, cards=2, window_mib=0)
    assert kernel_says(fresh, f"pci {FIRST}: BAR 1 [mem size 0x800000000 64bit pref]: can't assign; no space")
    report = look(fresh)
    assert rungs(report) == {
        FIRST: ("off", 3),
        SECOND: ("off", 3),
    }
    assert of_cards(findings(report), "firmware.above-4g") == {("off", FIRST), ("off", SECOND)}
    refused: set[Finding] = {f for f in checks.gate(report, 2) if f.id == "firmware.above-4g"}
    assert {f.subject for f in refused} == {FIRST, SECOND}


def test_a_window_too_small_for_the_second_card(fresh: vm.Vm) -> None:
    vm.load_fakepci(fresh, cards=2, window_mib=WINDOW_TOO_SMALL_MIB)
    report = look(fresh)
    assert rungs(report) == {
        FIRST: ("on", 1),
        SECOND: ("too-small", 4),
    }
    assert of_cards(findings(report), "firmware.above-4g") == {("too-small", SECOND)}
    assert "(48 GiB)" in " ".join(ladders(report)[SECOND].evidence)


def test_cards_of_16_gib_need_half_the_window(fresh: vm.Vm) -> None:
    vm.load_fakepci(fresh, cards=2, device=0x1DB4, window_mib=WINDOW_TOO_SMALL_MIB)
    report = look(fresh)
    assert {address: found.state for address, found in ladders(report).items()} == {FIRST: "on", SECOND: "on"}
    assert not of_cards(findings(report), "firmware.above-4g")


def test_an_older_kernel_says_no_space_in_other_words(fresh: vm.Vm) -> None:
    vm.boot_kernel(fresh, vm.OLDER_KERNEL)
    vm.load_fakepci(fresh, cards=2, window_mib=WINDOW_TOO_SMALL_MIB)
    assert kernel_says(fresh, f"pci {SECOND}: BAR 1: no space for [mem size 0x800000000 64bit pref]")
    assert kernel_says(fresh, f"pci {SECOND}: BAR 1: failed to assign [mem size 0x800000000 64bit pref]")
    report = look(fresh)
    assert of_cards(findings(report), "firmware.above-4g") == {("too-small", SECOND)}
    assert any("no space" in line or "BAR1" in line for line in ladders(report)[SECOND].evidence)
