"""The evidence ladder names each way in which a BAR1 can fail, and the rung that decided it."""

from __future__ import annotations

from pathlib import Path

import pytest
import x99_host as x99
from x99_host import CARDS, GIB, IOMEM_OFF, WINDOW_START, host

from laoka import checks
from laoka.checks.above_4g import climb, without_card
from laoka.host.pci import PciDevice
from laoka.host.report import HostReport

CAPTURES = Path(__file__).parents[2] / "data" / "captures"
CARD, OTHER = CARDS
PORT = CARDS[CARD]
NO_BAR1 = x99.pci_attributes(bar1=False)


def read(kind: str, name: str) -> HostReport:
    return HostReport.from_files({kind: (CAPTURES / name).read_text(encoding="utf-8")})


def card(report: HostReport, address: str = CARD) -> PciDevice:
    found = report.device(address)
    assert found is not None
    return found


def iomem_with(size: int) -> str:
    return f"c8000000-fbffbfff : PCI Bus 0000:00\n{WINDOW_START:x}-{WINDOW_START + size - 1:x} : PCI Bus 0000:00"


def no_space(words: str) -> str:
    return f"[    0.195779] pci {words}"


SHAPES = [
    ("healthy", {}, "on", 1),
    ("off", {"pci_attributes": NO_BAR1, "iomem": IOMEM_OFF}, "off", 3),
    ("window too small", {"pci_attributes": NO_BAR1, "iomem": iomem_with(64 * GIB)}, "too-small", 4),
    ("bridge of 32 bits", {"pci_attributes": x99.pci_attributes(bar1=False, bridge_64bit=False)}, "bridge-32bit", 5),
    ("no reason seen", {"pci_attributes": NO_BAR1}, "no-address", 2),
    (
        "kernel's newer words",
        {
            "pci_attributes": NO_BAR1,
            "iomem": None,
            "dmesg": no_space(f"{CARD}: BAR 1 [mem size 0x800000000 64bit pref]: can't assign; no space"),
        },
        "no-room",
        4,
    ),
    (
        "kernel's older words",
        {
            "pci_attributes": NO_BAR1,
            "iomem": None,
            "dmesg": no_space(f"{CARD}: BAR 1: no space for [mem size 0x800000000 64bit pref]"),
        },
        "no-room",
        4,
    ),
    (
        "older words about the bridge",
        {
            "pci_attributes": NO_BAR1,
            "iomem": None,
            "dmesg": no_space(f"{PORT}: BAR 15: no space for [mem size 0xc00000000 64bit pref]"),
        },
        "no-room",
        4,
    ),
    (
        "room, but not for this card",
        {"pci_attributes": NO_BAR1, "dmesg": no_space(f"{CARD}: BAR 1 [mem size 0x800000000 64bit pref]: failed to assign")},
        "too-small",
        4,
    ),
    (
        "off, told by the log alone",
        {
            "pci_attributes": NO_BAR1,
            "iomem": None,
            "dmesg": "[ 1.0] pci_bus 0000:00: root bus resource [mem 0xdfa00000-0xfeafffff window]",
        },
        "off",
        3,
    ),
    ("addresses hidden from a user", {"pci_attributes": NO_BAR1, "iomem": "00000000-00000000 : PCI Bus 0000:00"}, "no-address", 2),
    ("windows of pci=nocrs", {"pci_attributes": NO_BAR1, "iomem": IOMEM_OFF, "cmdline": "ro pci=nocrs"}, "no-address", 2),
]


@pytest.mark.parametrize(("changes", "state", "rung"), [row[1:] for row in SHAPES], ids=[row[0] for row in SHAPES])
def test_each_shape_has_its_rung(changes: dict[str, str | None], state: str, rung: int) -> None:
    report = host(**changes)
    ladder = climb(report, card(report))
    assert (ladder.state, ladder.rung) == (state, rung), ladder.evidence
    stopped = {(f.id, f.severity) for f in checks.gate(report, 2)}
    assert stopped == (set() if state == "on" else {("firmware.above-4g", "fail")})


def test_only_the_second_card_fails() -> None:
    """As on a real kernel with a window for one card."""
    one = x99.pci_attributes()
    lines = [line for line in one.splitlines() if not (OTHER in line and "/resource:" in line)]
    lines += [f"/sys/bus/pci/devices/{OTHER}/resource:{row}" for row in x99.resource_lines(x99.card_bars(1, bar1=False))]
    report = host(pci_attributes="\n".join(lines), iomem=iomem_with(48 * GIB))
    assert climb(report, card(report)).state == "on"
    assert climb(report, card(report, OTHER)).state == "too-small"
    assert [f.subject for f in checks.gate(report, 2)] == [OTHER]


def test_a_smaller_bar1_than_the_card_has() -> None:
    bars = {**x99.card_bars(0), 1: (0xD0000000, 256 << 20, x99.MEM64PREF)}
    lines = [line for line in x99.pci_attributes().splitlines() if not (CARD in line and "/resource:" in line)]
    lines += [f"/sys/bus/pci/devices/{CARD}/resource:{row}" for row in x99.resource_lines(bars)]
    report = host(pci_attributes="\n".join(lines))
    assert climb(report, card(report)).state == "small"


def test_a_card_with_a_small_bar_of_its_own_does_not_stop_a_run() -> None:
    """An RTX 4090 without Resizable BAR shows 256 MiB below 4 GiB: it works, and proves nothing."""
    bars = {0: (0xC8000000, 16 << 20, x99.MEM32), 1: (0xD0000000, 256 << 20, x99.MEM64PREF)}
    lines = [line for line in x99.pci_attributes(device="0x2684").splitlines() if "/resource:" not in line]
    lines += [f"/sys/bus/pci/devices/{address}/resource:{row}" for address in CARDS for row in x99.resource_lines(bars)]
    report = host(pci_attributes="\n".join(lines))
    assert climb(report, card(report)).state == "fits-below"
    assert checks.gate(report, 2) == ()


def test_the_register_that_was_never_written_is_evidence() -> None:
    config = f"{CARD} de 10 b6 1d" + " 00" * 16 + " 0c 00 00 00 00 00 00 00" + " 00" * 36
    report = host(pci_attributes=NO_BAR1, iomem=IOMEM_OFF, pci_config=config)
    assert any("0000000c 00000000" in line for line in climb(report, card(report)).evidence)


def test_a_fake_tree_of_plain_folders_still_reaches_rung_1() -> None:
    """Where device entries are folders instead of links nothing tells the root bus; the BAR itself is enough."""
    listing = "\n".join(f"drwxr-xr-x 2 root root 0 Dec  1 04:59 {address}" for address in (*CARDS, *CARDS.values()))
    report = host(pci_links=listing)
    assert climb(report, card(report)).state == "on"
    assert checks.gate(report, 2) == ()


# ---- real boards, from their own output

REAL = [
    # BAR1 at 0x7f000000000..0x7f7ffffffff of a V100 PCIe 32GB
    ("lshw", "lshw_v100_pcie_32gb_above4g.txt", "0000:03:00.0", "on", 1),
    # V100 SXM2 16GB: BAR1 at 0x1000000000, BAR3 below 4 GiB
    ("lspci", "lspci_v_v100_sxm2_16gb_aws.txt", "0000:00:1e.0", "on", 1),
    # the option was on in the BIOS, and BAR1 is 0M all the same
    ("dmesg", "dmesg_v100_16g_bar1_0m_dell7920.txt", "0000:73:00.0", "no-address", 2),
    ("dmesg", "dmesg_bar1_0m_legacy_format.txt", "0000:01:00.0", "no-address", 2),
    ("dmesg", "dmesg_all_bars_0m.txt", "0002:21:00.0", "no-address", 2),
    # the log shows BARs at 0 before the kernel placed them: that proves nothing
    ("dmesg", "dmesg_m40_z77_working_32g.txt", "0000:01:00.0", "unknown", 2),
]


@pytest.mark.parametrize(("kind", "name", "address", "state", "rung"), REAL, ids=[row[1] for row in REAL])
def test_real_cards(kind: str, name: str, address: str, state: str, rung: int) -> None:
    report = read(kind, name)
    ladder = climb(report, card(report, address))
    assert (ladder.state, ladder.rung) == (state, rung), ladder.evidence


WITHOUT = [
    # 47.5 GiB window, 48 GiB wanted
    ("dmesg", "dmesg_m40_z77_bridge_window_no_space.txt", "too-small", 4),
    # 1 GiB per root bus
    ("dmesg", "dmesg_rootbus_dell5820_1g_granularity.txt", "too-small", 4),
    # 256 GiB at 56T: as it should be, but no card to prove it
    ("dmesg", "dmesg_rootbus_bdw_ep_56t.txt", "likely-on", 6),
    ("lspci", "lspci_region_kata_p100_16g.txt", "on", 1),
    ("lspci", "sysfs_infer_above4g_from_bar.txt", "on", 1),
    ("iomem", "iomem_e5_dual_above4g_but_bridge_32bit.txt", "likely-on", 6),
]


@pytest.mark.parametrize(("kind", "name", "state", "rung"), WITHOUT, ids=[row[1] for row in WITHOUT])
def test_real_boards_without_a_known_card(kind: str, name: str, state: str, rung: int) -> None:
    ladder = without_card(read(kind, name))
    assert (ladder.state, ladder.rung) == (state, rung), ladder.evidence


def test_ucs_m4_with_a_card_behind_its_32bit_bridges() -> None:
    """The real host of the capture: window on bus 80, bridges 80:03.0 and 84:00.0 with 32-bit windows, card at 86:00.0."""
    text = (CAPTURES / "iomem_e5_dual_above4g_but_bridge_32bit.txt").read_text(encoding="utf-8")
    path = "pci0000:80/0000:80:03.0/0000:84:00.0/0000:85:00.0"
    report = host(
        iomem=text,
        pci_attributes="\n".join(
            [
                *(f"/sys/bus/pci/devices/0000:86:00.0/{name}:{value}" for name, value in (
                    ("vendor", "0x10de"), ("device", "0x1db4"), ("class", "0x030200"))),
                *(f"/sys/bus/pci/devices/0000:86:00.0/resource:{row}" for row in x99.resource_lines({})),
                "/sys/bus/pci/devices/0000:80:03.0/class:0x060400",
                "/sys/bus/pci/devices/0000:84:00.0/class:0x060400",
            ]
        ),
        pci_links=f"lrwxrwxrwx 1 root root 0 Dec 1 04:59 0000:86:00.0 -> ../../../devices/{path}/0000:86:00.0",
    )  # fmt: skip
    ladder = climb(report, card(report, "0000:86:00.0"))
    assert (ladder.state, ladder.rung) == ("bridge-32bit", 5), ladder.evidence


# ---- the gate


def device_of_another_maker() -> str:
    return x99.device_lines("0000:00:1f.0", vendor="0x8086", device="0x8d47", **{"class": "0x060100"})


NO_DRIVER = ("nvidia_proc", "nvidia_smi_xml", "modinfo", "modules", "dkms_status", "packages", "nvidia_libraries", "grub_menu")
NO_BARS = "\n".join(row for row in x99.pci_attributes().splitlines() if "/resource:" not in row)
GATE = [
    ("as expected", {}, 2, []),
    ("no count said", {}, None, []),
    ("one card missing", {}, 3, ["cards.present"]),
    ("a card fell off", {"pci_config": f"{CARD}" + " ff" * 64}, 2, ["cards.answer"]),
    ("WSL2", {"uname": "Linux box 6.6.87.2-microsoft-standard-WSL2 #1 SMP x86_64"}, 2, ["platform.kind"]),
    (
        "container without card",
        {"virt": "container=lxc", "pci_attributes": device_of_another_maker()},
        None,
        ["cards.present", "platform.kind"],
    ),
    ("sandbox host with its simulated card", {"virt": "container=systemd-nspawn"}, 2, []),
    ("PCI not readable", {"pci_attributes": None, "pci_links": None}, 2, ["cards.present"]),
    ("BARs not readable", {"pci_attributes": NO_BARS}, 2, ["firmware.above-4g", "firmware.above-4g"]),
    ("a bare host without a driver", dict.fromkeys(NO_DRIVER), 2, []),
]


@pytest.mark.parametrize(("changes", "expected", "stopping"), [row[1:] for row in GATE], ids=[row[0] for row in GATE])
def test_gate(changes: dict[str, str | None], expected: int | None, stopping: list[str]) -> None:
    found = checks.gate(host(**changes), expected)
    assert sorted(f.id for f in found) == stopping
    for finding in found:
        assert finding.title("en")
        assert finding.next("zh")
