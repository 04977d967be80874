"""Every saved sample of real machine output is read for what its own text says."""

from __future__ import annotations

from pathlib import Path

import pytest

from laoka.catalog.boards import by_name
from laoka.host import nvidia_smi
from laoka.host.driver import DkmsEntry, DkmsFailure
from laoka.host.kernel_log import (
    AerError,
    ApiMismatch,
    BandwidthLimited,
    BarLine,
    CardIgnored,
    DeviceLine,
    Event,
    FallenOff,
    InvalidBar,
    NoSpace,
    RmInitFailure,
    RootWindow,
    Xid,
    read_events,
)
from laoka.host.nvidia_smi import LostHandle, Smi
from laoka.host.report import HostReport
from laoka.host.unread import Unread

CAPTURES = Path(__file__).parents[2] / "data" / "captures"
GIB, MIB = 1 << 30, 1 << 20


def text(name: str) -> str:
    return (CAPTURES / name).read_text(encoding="utf-8")


def report(kind: str, name: str) -> HostReport:
    return HostReport.from_files({kind: text(name)})


def seen(events: tuple[Event, ...]) -> list[tuple[object, ...]]:
    """Events as short tuples of what identifies them."""
    short: list[tuple[object, ...]] = []
    for event in events:
        if isinstance(event, Xid):
            short.append(("Xid", event.code, event.address))
        elif isinstance(event, FallenOff):
            short.append(("off", event.address))
        elif isinstance(event, RmInitFailure):
            short.append(("init", event.address, event.init_status, event.rm_status))
        elif isinstance(event, AerError):
            short.append(("AER", event.address, event.severity, event.layer))
        elif isinstance(event, InvalidBar):
            short.append(("BAR", event.address, event.bar, event.size_mib))
        elif isinstance(event, RootWindow) and event.start >= 4 * GIB:
            short.append(("window", event.bus, event.start, event.size_bytes))
        elif isinstance(event, NoSpace):
            short.append(("no space", event.device, event.what, event.size_bytes))
        elif isinstance(event, BarLine):
            short.append(("bar", event.address, event.bar, event.start, event.end + 1))
        elif isinstance(event, DeviceLine):
            short.append(("device", event.address, f"{event.vendor_id:04x}:{event.device_id:04x}"))
        elif isinstance(event, BandwidthLimited):
            short.append(("bandwidth", event.address, event.available_gb_s, event.capable_gb_s))
        elif isinstance(event, CardIgnored):
            short.append(("ignored", event.card, event.driver_version, event.last_branch))
        elif isinstance(event, ApiMismatch):
            short.append(("mismatch", event.client_version, event.module_version))
    return short


KERNEL_LOGS: dict[str, list[tuple[object, ...]]] = {
    "dmesg_580_legacy_p100_tesla.txt": [("ignored", "Tesla P100-PCIE-16GB", "595.71.03", "580")],
    "dmesg_aer_fatal_then_xid79_bdw_ep.txt": [
        ("AER", "0000:00:02.0", "corrected", "Data Link Layer"),
        ("AER", "0000:00:02.0", "fatal", "Transaction Layer"),
        ("Xid", 79, "0000:02:00.0"),
    ],
    "dmesg_aer_rxerr_flood_x99_taichi_v100_sxm2_adapter.txt": [("AER", "0000:00:03.0", "corrected", "Physical Layer")],
    "dmesg_all_bars_0m.txt": [("BAR", "0002:21:00.0", bar, 0) for bar in (1, 2, 3, 4)],
    "dmesg_bar1_0m_legacy_format.txt": [("BAR", "0000:01:00.0", 1, 0)],
    "dmesg_fallen_off_2012_format.txt": [("off", "0000:01:00.0"), ("Xid", 3, "0000:01:00.0")],
    "dmesg_fallen_off_multiline_no_xid.txt": [("off", "0000:18:00.0")],
    "dmesg_m40_z77_bridge_window_no_space.txt": [
        ("window", "0000:00", 0x41F600000, 0x1000000000 - 0x41F600000),
        ("no space", "0000:00:01.0", "bridge window", 48 * GIB),
    ],
    "dmesg_m40_z77_working_32g.txt": [
        ("window", "0000:00", 0x21F600000, 0x1000000000 - 0x21F600000),
        ("device", "0000:01:00.0", "10de:17fd"),
        ("bar", "0000:01:00.0", 0, 0, 16 * MIB),
        ("bar", "0000:01:00.0", 1, 0, 32 * GIB),
        ("bar", "0000:01:00.0", 3, 0, 32 * MIB),
    ],
    "dmesg_pcie_bandwidth_limited.txt": [
        ("bandwidth", "0000:04:00.0", 252.048, 504.112),
        ("bandwidth", "0000:8b:00.0", 252.048, 504.112),
    ],
    "dmesg_rootbus_bdw_ep_56t.txt": [
        ("window", "0000:00", 0x380000000000, 256 * GIB),
        ("device", "0000:00:00.0", "8086:6f00"),
        ("device", "0000:00:01.0", "8086:6f02"),
        ("device", "0000:00:02.0", "8086:6f04"),
    ],
    "dmesg_rootbus_dell5820_1g_granularity.txt": [
        ("window", bus, 0x380000000000 + number * GIB, GIB)
        for number, bus in enumerate(("0000:00", "0000:16", "0000:64", "0000:b2"))
    ],
    "dmesg_v100_16g_bar1_0m_dell7920.txt": [("BAR", "0000:73:00.0", 1, 0)],
    "dmesg_xid109_ctxsw.txt": [("Xid", 109, "0000:01:00.0"), ("Xid", 38, "0000:01:00.0")],
    "dmesg_xid119_gsp_h100.txt": [("Xid", 119, "0000:9b:00.0")],
    "dmesg_xid13_43.txt": [("Xid", 13, "0000:38:00.0"), ("Xid", 43, "0000:38:00.0")],
    "dmesg_xid13_illegal_instruction_then_rminit_0x24_0x65.txt": [
        ("Xid", 13, "0000:02:00.0"),
        ("Xid", 13, "0000:02:00.0"),
        ("init", "0000:02:00.0", 0x24, 0x65),
        ("init", "0000:02:00.0", 0x24, 0x65),
    ],
    "dmesg_xid144_150_nvlink5.txt": [("Xid", 149, "0000:00:00.0"), ("Xid", 144, "0000:01:00.0"), ("Xid", 150, "0000:04:00.0")],
    "dmesg_xid31_oldest_format.txt": [("Xid", 31, "0000:01:00.0")],
    "dmesg_xid32_69_62_2014.txt": [("Xid", 32, "0000:01:00.0"), ("Xid", 69, "0000:01:00.0"), ("Xid", 62, "0000:01:00.0")],
    "dmesg_xid63_row_remap_ampere.txt": [("Xid", 63, "0000:10:1c.0")],
    "dmesg_xid74_nvlink_fatal.txt": [("Xid", 74, "0000:c1:00.0")],
    "dmesg_xid79_fallen_off_pid_unknown.txt": [("Xid", 79, "0000:91:00.0"), ("off", "0000:91:00.0")],
    "dmesg_xid79_new_5080.txt": [("Xid", 79, "0000:2b:00.0"), ("off", "0000:2b:00.0")],
    "dmesg_xid94_95_source_format.txt": [("Xid", 94, "0000:01:00.0"), ("Xid", 94, "0000:01:00.0"), ("Xid", 95, "0000:01:00.0")],
    "smi_api_mismatch_ubuntu_unattended.txt": [("mismatch", "470.129.06", "470.103.01")],
    # summaries in words and documentation: no kernel line, so no event
    "adr_x99_v100_p100_hbm_death_xids.txt": [],
    "doc_xid48_63_64_page_retirement_texts.txt": [],
}


@pytest.mark.parametrize("name", KERNEL_LOGS)
def test_kernel_logs(name: str) -> None:
    assert seen(read_events(text(name))) == KERNEL_LOGS[name]


def test_every_sample_is_read_by_a_test() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in sorted(CAPTURES.iterdir()) if path.name not in source] == []


def test_who_the_driver_blames() -> None:
    first, second = read_events(text("dmesg_xid13_43.txt"))
    assert isinstance(first, Xid)
    assert isinstance(second, Xid)
    assert (first.pid, first.process) == (None, None)
    assert (second.pid, second.process, second.body) == (2924364, "pt_main_thread", "Ch 00000008")
    mig = read_events(text("dmesg_xid94_95_source_format.txt"))[0]
    assert isinstance(mig, Xid)
    assert (mig.mig_instance, mig.pid) == ("GPU-I:05", 7194)


def test_device_ids_of_a_card_that_fell_off_before_its_driver_started() -> None:
    (event,) = read_events(text("dmesg_fallen_off_multiline_no_xid.txt"))
    assert isinstance(event, FallenOff)
    assert event.device_id == "2330"


def smi_of(found: object) -> Smi:
    assert isinstance(found, Smi)
    return found


def test_nvidia_smi_q_of_a_v100_with_driver_470() -> None:
    listing = smi_of(nvidia_smi.read_q(text("nvsmi_q_v100_pcie_32gb_idle_470.txt")))
    assert (listing.driver_version, listing.cuda_version, listing.attached_gpus) == ("470.129.06", "11.4", 8)
    (gpu,) = listing.gpus
    assert (gpu.address, gpu.device_id, gpu.name) == ("0000:1c:00.0", 0x1DB6, "Tesla V100-PCIE-32GB")
    assert (gpu.bar1_total_mib, gpu.memory_total_mib, gpu.persistence_mode) == (32768, 32510, True)
    assert (gpu.link_gen, gpu.link_width, gpu.replay_count, gpu.throttle_reasons) == (3, 16, 0, ("gpu_idle",))
    assert (gpu.retired_pages_single_bit, gpu.retired_pages_double_bit, gpu.retired_pages_pending) == (1, 0, False)
    assert (gpu.ecc.aggregate_corrected, gpu.ecc.aggregate_uncorrected, gpu.ecc.volatile_corrected) == (3, 0, 0)
    assert (gpu.core_temperature_c, gpu.memory_temperature_c, gpu.slowdown_temperature_c) == (29, 29, 87)
    assert (gpu.shutdown_temperature_c, gpu.max_core_temperature_c, gpu.max_memory_temperature_c) == (90, 83, 85)
    assert (gpu.power_draw_w, gpu.power_limit_w, gpu.power_limit_default_w) == (25.13, 250.0, 250.0)
    assert isinstance(gpu.gpu_utilization_percent, Unread)


def test_nvidia_smi_xml_of_a_v100s_with_driver_460() -> None:
    listing = smi_of(nvidia_smi.read_xml(text("nvsmi_x_v100s_pcie_32gb_load_460.xml")))
    (gpu,) = listing.gpus
    assert (listing.driver_version, gpu.address, gpu.device_id) == ("460.73.01", "0000:00:0d.0", 0x1DF6)
    assert (gpu.persistence_mode, gpu.gpu_utilization_percent, gpu.memory_used_mib) == (False, 97, 31689)
    assert (gpu.power_draw_w, gpu.core_temperature_c, gpu.memory_temperature_c) == (232.8, 66, 63)
    assert (gpu.throttle_reasons, gpu.retired_pages_pending) == ((), False)


@pytest.mark.parametrize("name", ["nvsmi_q_h200_580_159.txt", "nvsmi_x_h200_580_159.xml"])
def test_nvidia_smi_of_driver_580_in_both_forms(name: str) -> None:
    """Branch 580 renamed the throttle and power fields, and counts DRAM errors instead of double-bit ones."""
    read = nvidia_smi.read_xml if name.endswith(".xml") else nvidia_smi.read_q
    listing = smi_of(read(text(name)))
    (gpu,) = listing.gpus
    assert (listing.driver_version, gpu.address, gpu.device_id) == ("580.159.04", "0000:00:06.0", 0x2335)
    assert (gpu.recovery_action, gpu.throttle_reasons) == ("None", ("gpu_idle",))
    assert (gpu.power_limit_w, gpu.power_limit_default_w, gpu.bar1_total_mib) == (700.0, 700.0, 262144)
    assert (gpu.ecc.volatile_uncorrected, gpu.remapping_pending, gpu.remapping_failed) == (0, False, False)
    assert gpu.retired_pages_single_bit == Unread("N/A")


def test_a_table_with_a_card_in_error() -> None:
    good, bad = nvidia_smi.read_table(text("nvsmi_table_err_a100.txt"))
    assert (good.index, good.address, good.core_temperature_c, good.power_draw_w) == (4, "0000:8c:00.0", 34, 60.0)
    assert (bad.index, bad.address, bad.core_temperature_c) == (5, "0000:91:00.0", Unread("ERR!"))
    trouble = nvidia_smi.read_trouble(text("nvsmi_table_err_a100.txt"))
    assert trouble.error_cells == 9
    assert not trouble.version_mismatch  # that is only in the note above it


def test_a_table_of_an_idle_v100_sxm2() -> None:
    (row,) = nvidia_smi.read_table(text("nvsmi_table_v100_sxm2_16gb_idle.txt"))
    assert (row.core_temperature_c, row.power_draw_w, row.power_limit_w, row.memory_total_mib) == (35, 43.0, 300.0, 16130)


def test_six_spellings_of_a_lost_handle() -> None:
    lost = "GPU is lost. Reboot the system to recover this GPU"
    assert nvidia_smi.read_trouble(text("smi_unable_handle_variants.txt")).lost == (
        LostHandle(None, "0000:05:00.0", lost),
        LostHandle(None, "0000:25:00.0", "Unknown Error"),
        LostHandle(None, "0000:01:00.0", "Not Found"),
        LostHandle(1, "0000:0a:00.0", lost),
        LostHandle(2, None, "Unknown Error"),
        LostHandle(None, "0000:08:00.0", lost),
    )


def test_a_gap_in_the_indexes() -> None:
    name = "smi_unable_handle_unknown_error_index_gap.txt"
    assert nvidia_smi.read_trouble(text(name)).lost == (LostHandle(3, "0000:04:00.0", "Unknown Error"),)
    assert [dict(row)["0"] for row in nvidia_smi.read_csv(text(name))] == ["0", "1", "2", "4", "5", "6", "7"]


def test_query_csv_with_its_command_lines() -> None:
    rows = [dict(row) for row in nvidia_smi.read_csv(text("csv_v100_v100_p100_power_limits_sample.txt"))]
    assert [row["power.limit"] for row in rows if "power.limit" in row] == ["200.00", "175.00", "175.00"]
    assert [row["persistence_mode"] for row in rows if "persistence_mode" in row] == ["Enabled"] * 3
    assert [row["temperature.memory"] for row in rows if "temperature.memory" in row] == [Unread("N/A"), "84", "83"]


def test_nvlinks() -> None:
    links = nvidia_smi.read_nvlink(text("smi_nvlink_status_v100_sxm2_inactive.txt"))
    assert [link.speed_gb_s for link in links] == [25.781, 25.781, 25.781, None, 25.781, None]
    assert {link.gpu_index for link in links} == {3}


def test_a_version_mismatch_is_no_listing() -> None:
    name = "smi_api_mismatch_ubuntu_unattended.txt"
    assert nvidia_smi.read_q(text(name)) == Unread("Driver/library version mismatch")
    assert nvidia_smi.read_trouble(text(name)).version_mismatch


def test_lshw_of_a_v100_32gb() -> None:
    (gpu,) = report("lshw", "lshw_v100_pcie_32gb_above4g.txt").gpus or ()
    assert (gpu.address, gpu.id_text, gpu.driver) == ("0000:03:00.0", "10de:1db6", "nvidia")
    assert [(bar.index, bar.start, bar.size_bytes) for bar in gpu.bars or ()] == [
        (0, 0xFB000000, 16 * MIB), (1, 0x7F000000000, 32 * GIB), (3, 0x7F800000000, 32 * MIB),
    ]  # fmt: skip


def test_lspci_v_without_root_of_a_v100_sxm2() -> None:
    (gpu,) = report("lspci", "lspci_v_v100_sxm2_16gb_aws.txt").gpus or ()
    assert [(bar.index, bar.size_bytes) for bar in gpu.bars or ()] == [(0, 16 * MIB), (1, 16 * GIB), (3, 32 * MIB)]
    assert isinstance(gpu.link.width, Unread)
    assert isinstance(gpu.device_id, Unread)  # the name is not taken for an id
    assert gpu.driver == "nvidia"


def test_lspci_nns_with_iommu_groups() -> None:
    gpus = report("lspci", "iommu_groups_v100_pcie_16gb.txt").gpus or ()
    assert [(gpu.address, gpu.device_id) for gpu in gpus] == [
        (address, 0x1DB4) for address in ("0000:27:00.0", "0000:28:00.0", "0000:44:00.0", "0000:a3:00.0")
    ]


def test_lspci_link_lines() -> None:
    found = report("lspci", "lspci_lnksta_2_5gt_x8_downgraded.txt").pci or ()
    assert [(d.address, d.link.speed_gt_s, d.link.width, d.link.max_speed_gt_s, d.link.max_width) for d in found] == [
        ("0000:31:00.0", 2.5, 8, 16.0, 16), ("0000:34:00.0", 2.5, 8, 16.0, 16),
    ]  # fmt: skip


def test_lspci_regions_without_a_device_line() -> None:
    (device,) = report("lspci", "lspci_region_kata_p100_16g.txt").pci or ()
    assert [(bar.index, bar.start, bar.size_bytes) for bar in device.bars or ()] == [
        (0, 0xC6000000, 16 * MIB), (1, 0x383800000000, 16 * GIB), (3, 0x383C00000000, 32 * MIB),
    ]  # fmt: skip


def test_lspci_regions_under_their_command_lines() -> None:
    found = report("lspci", "sysfs_infer_above4g_from_bar.txt").pci or ()
    assert [(d.address, [(bar.index, bar.size_bytes) for bar in d.bars or ()]) for d in found] == [
        ("0000:01:00.0", [(1, 32 * GIB)]), ("0000:06:00.0", [(1, 32 * GIB)]),
    ]  # fmt: skip


def test_iomem_of_a_dual_socket_board() -> None:
    found = report("iomem", "iomem_e5_dual_above4g_but_bridge_32bit.txt")
    assert found.root_windows == {
        "0000:80": ((0xC8000000, 0xFBFFBFFF), (0x3C000000000, 0x3FFFFFFFFFF)),
        "0000:00": ((0x38000000000, 0x3BFFFFFFFFF),),
    }
    bridge = found.device("0000:80:03.0")
    assert bridge is not None
    assert [(w.start, w.end, w.is_64bit, w.prefetchable) for w in bridge.windows or ()] == [(0xE0000000, 0xF07FFFFF, False, True)]


def test_dmidecode_of_a_clone_board() -> None:
    firmware = report("dmidecode", "dmidecode_huananzhi_x99_f8.txt").firmware
    assert (firmware.board_vendor, firmware.board_name, firmware.bios_date) == ("HUANANZHI", "X99-F8 GAMING", "09/15/2021")
    assert (firmware.product_name, firmware.bios_version) == (None, "5.11")
    assert [(slot.designation, slot.usage, slot.bus_address) for slot in firmware.slots or ()] == [
        ("Slot1", "Unknown", "0000:ff:00.3"), ("Slot4", "Available", "0000:06:00.0"), ("Slot6", "In Use", "0000:03:00.0"),
    ]  # fmt: skip


def test_dkms_status_and_failures() -> None:
    assert report("dkms-status", "dkms_status_variants.txt").driver.dkms == (
        DkmsEntry("nvidia", "390.157", None, "added"),
        DkmsEntry("vboxhost", "7.0.8_OSE", "6.4.1-zen1-1-zen", "installed"),
        DkmsEntry("nvidia-current", "550.163.01", "6.12.69+deb13-amd64", "installed"),
        DkmsEntry("nvidia-current", "550.163.01", None, "added"),
    )
    for name, failure in (
        ("dkms_build_fail_470_kernel_6_14.txt", DkmsFailure("6.14.4-arch1-2", "470.256.02")),
        ("dkms_build_fail_580_119_kernel_6_17_9.txt", DkmsFailure("6.17.9-76061709-generic", "580.119.02")),
    ):
        assert report("dkms-failures", name).driver.dkms_failures == (failure,)


def test_cmdline_as_quoted_in_a_forum() -> None:
    words = report("cmdline", "cmdline_pci_realloc_no_help.txt").kernel.cmdline
    assert words == (
        "BOOT_IMAGE=/boot/vmlinuz-6.2.16-3-pve", "root=/dev/mapper/pve-root", "ro", "quiet", "intel_iommu=on", "pci=realloc",
    )  # fmt: skip


def test_bios_menu_and_board() -> None:
    settings = dict(report("bios-menu", "bios_menu_machinist_x99_md8.txt").nvidia.settings_in_bios or ())
    assert (settings["Above 4G Decoding"], settings["CSM Support"]) == ("Disabled", "Enabled")
    assert (settings["MMIOHBase"], settings["MMIO High Size"], settings["PCI-E ASPM (Global)"]) == ("56T", "256G", "Disable")
    board = by_name("X99 MD8")
    assert board is not None
    assert (board.above_4g_default, board.has_above_4g) == ("Disabled", True)


def test_a_board_without_the_option() -> None:
    """bios_ifr_gigabyte_x99_ud4_pfmmio.txt: no Above 4G option, and no POST with a V100."""
    assert "does not POST" in text("bios_ifr_gigabyte_x99_ud4_pfmmio.txt") or "switches off" in text(
        "bios_ifr_gigabyte_x99_ud4_pfmmio.txt"
    )
    board = by_name("X99-UD4-CF")
    assert board is not None
    assert not board.has_above_4g
