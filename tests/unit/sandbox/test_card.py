"""The simulated card's directory: sysfs, kernel log and state as on real machines, faults that come and go without a trace."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.sandbox import card
from laoka.sandbox.lab import SandboxError

BDF = "0000:03:00.0"
GIB = 1024**3
RESTORABLE = sorted(set(card.FAULTS) - {"xid"})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    card.create(tmp_path, (card.v100_pcie_32gb(),))
    return tmp_path


def device(directory: Path, bdf: str = BDF) -> Path:
    return directory / "sys/bus/pci/devices" / bdf


def messages(directory: Path) -> list[str]:
    return [line.split(";", 1)[1] for line in (directory / "kmsg").read_text().splitlines()]


def snapshot(directory: Path) -> dict[str, bytes | str]:
    """All files and links of a directory; the log is left out, as it only grows."""
    return {
        str(path.relative_to(directory)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if (path.is_symlink() or path.is_file()) and path.name != "kmsg"
    }


def bar_lines(directory: Path) -> list[tuple[int, int, int]]:
    lines = (device(directory) / "resource").read_text().splitlines()
    return [tuple(int(number, 16) for number in line.split()) for line in lines]  # type: ignore[misc]


# ---- a healthy card


def test_says_in_one_line_that_it_is_simulated(directory: Path) -> None:
    text = (directory / "simulated").read_text()
    assert text.count("\n") == 1
    assert "simulated by laoka's sandbox" in text


def test_identity_is_the_pci_id_of_a_v100_pcie_32gb(directory: Path) -> None:
    ids = {
        name: (device(directory) / name).read_text().strip()
        for name in ("vendor", "device", "class", "subsystem_device", "revision")
    }
    assert ids == {"vendor": "0x10de", "device": "0x1db6", "class": "0x030200", "subsystem_device": "0x124a", "revision": "0xa1"}


def test_bars_are_16_mib_below_and_32_gib_and_32_mib_above_4_gib(directory: Path) -> None:
    bars = bar_lines(directory)
    assert len(bars) == 13
    sizes = [end - start + 1 if end else 0 for start, end, _ in bars[:6]]
    assert sizes == [16 * 1024**2, 32 * GIB, 0, 32 * 1024**2, 0, 0]
    assert bars[0][0] < 4 * GIB
    assert bars[1][0] >= 4 * GIB
    assert bars[1][0] % (32 * GIB) == 0


def test_sxm2_has_a_16_gib_bar1_and_unknown_thresholds(tmp_path: Path) -> None:
    card.create(tmp_path, (card.v100_sxm2_16gb(),))
    start, end, _ = bar_lines(tmp_path)[1]
    assert end - start + 1 == 16 * GIB
    assert card.parse_conf((tmp_path / "gpu.conf").read_text())["gpu0.shutdown_c"] == "N/A"


def test_config_space_agrees_with_the_text_files(directory: Path) -> None:
    config = (device(directory) / "config").read_bytes()
    assert len(config) == 4096
    vendor, product = struct.unpack_from("<HH", config, 0)
    assert (vendor, product) == (0x10DE, 0x1DB6)
    assert (config[0x0B], config[0x0A]) == (0x03, 0x02)
    bar0, low, high = struct.unpack_from("<III", config, 0x10)
    bars = bar_lines(directory)
    assert bar0 == bars[0][0]
    assert low & 0xF == 0xC  # 64-bit, prefetchable
    assert high << 32 | low & ~0xF == bars[1][0]


def test_root_port_leads_to_the_card(directory: Path) -> None:
    port = device(directory, "0000:00:03.0")
    assert (port / "vendor").read_text() == "0x8086\n"
    assert (port / "device").read_text() == "0x6f08\n"
    assert (port / "config").read_bytes()[0x19] == 0x03  # secondary bus
    assert (port / "driver").resolve() == (directory / "sys/bus/pci/drivers/pcieport").resolve()
    assert (directory / "sys/bus/pci/slots/3/address").read_text() == "0000:03:00\n"
    # The target of the link names root bus and bridges, as on a real host.
    assert str(device(directory).readlink()) == "../pci0000:00/0000:00:03.0/0000:03:00.0"
    assert device(directory).resolve().parent == port.resolve()


@pytest.mark.parametrize(("above_4g", "flags", "kind"), [(True, 0x102201, 1), (False, 0x2200, 0)])
def test_the_bridge_window_is_64_bit_only_with_above_4g(tmp_path: Path, above_4g: bool, flags: int, kind: int) -> None:
    card.create(tmp_path, (card.v100_pcie_32gb(),), bar_above_4g=above_4g)
    port = device(tmp_path, "0000:00:03.0")
    start, end, found = (int(number, 16) for number in (port / "resource").read_text().splitlines()[15].split())
    assert found == flags
    assert (start >= 4 * GIB, end >= 4 * GIB) == (above_4g, above_4g)
    assert (port / "config").read_bytes()[0x24] & 0xF == kind


def test_no_driver_is_bound_before_one_is_installed(directory: Path) -> None:
    assert not (device(directory) / "driver").exists()
    assert sorted(path.name for path in (directory / "sys/bus/pci/drivers").iterdir()) == ["pcieport"]


def test_link_files_are_in_the_kernels_words(directory: Path) -> None:
    assert (device(directory) / "current_link_speed").read_text() == "8.0 GT/s PCIe\n"
    assert (device(directory) / "current_link_width").read_text() == "16\n"
    assert (device(directory) / "aer_dev_correctable").read_text().splitlines()[0] == "RxErr 0"


def test_two_cards_do_not_overlap(tmp_path: Path) -> None:
    card.create(tmp_path, (card.v100_pcie_32gb(), card.v100_sxm2_16gb("0000:02:00.0", 2)))
    ranges = []
    for bdf in (BDF, "0000:02:00.0"):
        for line in (device(tmp_path, bdf) / "resource").read_text().splitlines():
            start, end, _ = (int(number, 16) for number in line.split())
            if end:
                ranges.append((start, end))
    ranges.sort()
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ranges))
    assert (device(tmp_path, "0000:00:02.0") / "device").read_text() == "0x6f04\n"


def test_cards_that_can_not_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="one PCI bus"):
        card.create(tmp_path, (card.v100_pcie_32gb(), card.v100_sxm2_16gb()))
    with pytest.raises(SandboxError, match="room for 4"):
        card.create(tmp_path, [card.v100_pcie_32gb(f"0000:{bus:02x}:00.0", bus) for bus in range(1, 6)])


# ---- Above 4G Decoding off


def test_without_above_4g_bar1_is_unassigned(tmp_path: Path) -> None:
    card.create(tmp_path, (card.v100_pcie_32gb(),), bar_above_4g=False)
    bars = bar_lines(tmp_path)
    assert bars[1] == (0, 0, 0)
    assert all(end < 4 * GIB for _, end, _ in bars)
    config = (device(tmp_path) / "config").read_bytes()
    assert struct.unpack_from("<II", config, 0x14) == (0x0000000C, 0)  # a 64-bit prefetchable BAR that was never assigned
    assert "pci 0000:03:00.0: BAR 1 [mem size 0x800000000 64bit pref]: can't assign; no space" in messages(tmp_path)
    windows = [line for line in messages(tmp_path) if "root bus resource" in line]
    assert windows == ["pci_bus 0000:00: root bus resource [mem 0xc0000000-0xfbffffff window]"]
    assert card.parse_conf((tmp_path / "gpu.conf").read_text())["driver_loaded"] == "0"


def test_with_above_4g_the_root_bus_has_a_256_gib_window_at_56t(directory: Path) -> None:
    assert "pci_bus 0000:00: root bus resource [mem 0x380000000000-0x383fffffffff window]" in messages(directory)


# ---- kernel log


def test_records_have_the_format_of_dev_kmsg() -> None:
    assert card.kmsg_record(7, 1234567, "NVRM: text, with; marks\nand a second line") == (
        "3,7,1234567,-;NVRM: text, with; marks\\x0aand a second line\n"
    )


@given(st.text())
def test_a_record_is_one_line_whatever_the_text(text: str) -> None:
    record = card.kmsg_record(0, 0, text.replace("\r", ""))
    assert record.endswith("\n")
    assert record.count("\n") == 1


@given(st.text())
def test_the_next_sequence_number_is_found_in_any_log(text: str) -> None:
    assert card.next_sequence(text) >= 0
    assert card.next_sequence(text + "\n" + card.kmsg_record(41, 5, "x")) == 42


def test_sequence_numbers_go_on(directory: Path) -> None:
    before = card.next_sequence((directory / "kmsg").read_text())
    card.apply_fault(directory, "xid", BDF, number=43)
    heads = [line.split(";")[0].split(",") for line in (directory / "kmsg").read_text().splitlines()]
    assert [int(head[1]) for head in heads] == list(range(before + 3))
    assert heads[-1][0] == "3"
    times = [int(head[2]) for head in heads]
    assert times == sorted(times)


# The words are those of real logs and, for 48, 63 and 64, of NVIDIA's page retirement document (cards before Ampere).
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (13, "Graphics SM Warp Exception on (GPC 0, TPC 1, SM 1): Illegal Instruction Encoding"),
        (31, "MMU Fault: ENGINE GRAPHICS"),
        (43, "Ch 00000008"),
        (48, "An uncorrectable double bit error (DBE) has been detected on GPU"),
        (62, "0096(1c54) 00000000 00000000"),
        (63, "Dynamic Page Retirement: New retired page, reload the driver to activate. (0x"),
        (64, "Dynamic Page Retirement: Fatal error, unable to retire page (0x"),
        (79, "GPU has fallen off the bus."),
    ],
)
def test_xid_wording(directory: Path, number: int, words: str) -> None:
    card.apply_fault(directory, "xid", BDF, number=number)
    line = next(line for line in messages(directory) if "Xid" in line)
    assert line.startswith(f"NVRM: Xid (PCI:0000:03:00): {number}, pid=")
    assert words in line


def test_an_xid_of_unknown_text_says_so_or_takes_the_given_one(directory: Path) -> None:
    card.apply_fault(directory, "xid", BDF, number=999)
    assert "not known to laoka's sandbox" in messages(directory)[-1]
    card.apply_fault(directory, "xid", BDF, number=69, text="Class Error: ChId 0005")
    assert messages(directory)[-1].endswith(": 69, pid='<unknown>', name=<unknown>, Class Error: ChId 0005")


# ---- faults


@pytest.mark.parametrize("fault", RESTORABLE)
def test_a_fault_applied_twice_and_cleared_leaves_no_trace(directory: Path, fault: str) -> None:
    healthy = snapshot(directory)
    card.apply_fault(directory, fault, BDF)
    faulty, log = snapshot(directory), messages(directory)
    assert faulty != healthy
    card.apply_fault(directory, fault, BDF)
    assert snapshot(directory) == faulty
    assert messages(directory) == log
    assert [(active.name, active.bdf) for active in card.active_faults(directory)] == [(fault, BDF)]
    card.clear_fault(directory, fault, BDF)
    assert snapshot(directory) == healthy
    assert card.active_faults(directory) == ()
    card.clear_fault(directory, fault, BDF)
    assert snapshot(directory) == healthy


@pytest.mark.parametrize("first", RESTORABLE)
@pytest.mark.parametrize("last", RESTORABLE)
def test_overlapping_faults_are_cleared_in_any_order(directory: Path, first: str, last: str) -> None:
    healthy = snapshot(directory)
    for fault in ("card-gone", "off-bus", first, last):
        card.apply_fault(directory, fault, BDF)
    for fault in (last, first, "card-gone", "off-bus"):
        card.clear_fault(directory, fault, BDF)
    assert snapshot(directory) == healthy


def test_card_gone(directory: Path) -> None:
    card.apply_fault(directory, "card-gone", BDF)
    assert not device(directory).is_symlink()
    assert not list((directory / "sys").rglob(BDF))
    assert messages(directory)[-4:] == [
        "NVRM: GPU at PCI:0000:03:00: GPU-00000000-5a1d-4000-8000-000000000001",
        "NVRM: GPU Board Serial Number: 1500000000001",
        "NVRM: Xid (PCI:0000:03:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "NVRM: GPU 0000:03:00.0: GPU has fallen off the bus.",
    ]


def test_card_gone_takes_its_driver_link_along(directory: Path) -> None:
    driver = directory / "sys/bus/pci/drivers/nvidia"
    driver.mkdir()
    (device(directory) / "driver").symlink_to("../../../drivers/nvidia")
    (driver / BDF).symlink_to(f"../../devices/{BDF}")
    card.apply_fault(directory, "card-gone", BDF)
    assert list(driver.iterdir()) == []
    card.clear_fault(directory, "card-gone", BDF)
    assert (driver / BDF).resolve() == device(directory).resolve()


def test_off_bus(directory: Path) -> None:
    card.apply_fault(directory, "off-bus", BDF)
    assert (device(directory) / "vendor").read_text() == "0x10de\n"
    assert set((device(directory) / "config").read_bytes()) == {0xFF}
    assert (device(directory) / "current_link_speed").read_text() == "Unknown\n"
    assert any("Xid (PCI:0000:03:00): 79" in line for line in messages(directory))


def test_ecc_pending_logs_the_wording_of_a_volta_card(directory: Path) -> None:
    card.apply_fault(directory, "ecc-pending", BDF, pages=62)
    assert "63, pid='<unknown>', name=<unknown>, Dynamic Page Retirement: New retired page" in messages(directory)[-1]
    assert card.parse_conf((directory / "faults.conf").read_text()) == {"gpu0.retired_sbe": "62", "gpu0.retired_pending": "1"}


def test_driver_mismatch_is_one_record_of_five_lines(directory: Path) -> None:
    card.apply_fault(directory, "driver-mismatch", BDF, loaded_module="580.159.03")
    parts = messages(directory)[-1].split("\\x0a")
    assert parts[0].startswith("NVRM: API mismatch: the client 'nvidia-smi' (pid ")
    assert parts[1] == "NVRM: has the version 580.173.02, but this kernel module has"
    assert parts[2].startswith("NVRM: the version 580.159.03.")
    assert len(parts) == 5


def test_driver_mismatch_shows_in_the_version_file_of_the_module(directory: Path) -> None:
    version = directory / "proc/driver/nvidia/version"
    version.parent.mkdir()
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.173.02  (stand-in)\n")
    card.apply_fault(directory, "driver-mismatch", BDF, loaded_module="580.159.03")
    assert "Module  580.159.03  (" in version.read_text()
    card.clear_fault(directory, "driver-mismatch", BDF)
    assert "Module  580.173.02  (" in version.read_text()


def test_other_parameters_take_the_place_of_the_old_ones(directory: Path) -> None:
    card.apply_fault(directory, "hot", BDF)
    card.apply_fault(directory, "hot", BDF, memory_temperature_c=99)
    (fault,) = card.active_faults(directory)
    assert dict(fault.params)["memory_temperature_c"] == 99
    assert "gpu0.memory_temperature_c=99" in (directory / "faults.conf").read_text()


def test_what_the_host_changed_outlives_a_fault(directory: Path) -> None:
    card.apply_fault(directory, "card-gone", BDF)
    card.set_value(directory, "gpu0.power_limit_mw", 175000)
    card.clear_fault(directory, "card-gone", BDF)
    assert card.parse_conf((directory / "gpu.conf").read_text())["gpu0.power_limit_mw"] == "175000"


def test_a_fault_stays_with_its_card(tmp_path: Path) -> None:
    card.create(tmp_path, (card.v100_pcie_32gb(), card.v100_pcie_32gb("0000:02:00.0", 2)))
    card.apply_fault(tmp_path, "hot", "0000:02:00.0")
    assert all(key.startswith("gpu1.") for key in card.parse_conf((tmp_path / "faults.conf").read_text()))
    card.clear_fault(tmp_path, "hot", BDF)
    assert len(card.active_faults(tmp_path)) == 1


def test_create_again_makes_the_card_healthy_and_keeps_the_folders_that_hosts_have_mounted(directory: Path) -> None:
    healthy = snapshot(directory)
    inodes = {name: (directory / name).stat().st_ino for name in ("sys/bus/pci", "sys/bus/pci/devices", "kmsg")}
    card.apply_fault(directory, "card-gone", BDF)
    card.apply_fault(directory, "off-bus", BDF)
    card.create(directory, (card.v100_pcie_32gb(),))
    assert snapshot(directory) == healthy
    assert {name: (directory / name).stat().st_ino for name in inodes} == inodes


def test_mistakes_get_one_clear_line(directory: Path, tmp_path: Path) -> None:
    calls: tuple[tuple[Callable[[], None], str], ...] = (
        (lambda: card.apply_fault(directory, "card-gon", BDF), "no fault of the simulated card is called 'card-gon'"),
        (lambda: card.apply_fault(directory, "hot", BDF, temp=3), "no parameter 'temp': it takes memory_temperature_c"),
        (
            lambda: card.apply_fault(directory, "hot", "0000:04:00.0"),
            "no simulated card at '0000:04:00.0': this host has 0000:03:00.0",
        ),
        (lambda: card.clear_fault(directory, "hot", "0000:04:00.0"), "no simulated card at"),
        (lambda: card.set_value(directory, "gpu0.colour", 1), "has no 'gpu0.colour'"),
        (lambda: card.apply_fault(tmp_path / "nowhere", "hot", BDF), "holds no simulated card"),
    )
    for call, words in calls:
        with pytest.raises(SandboxError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)
