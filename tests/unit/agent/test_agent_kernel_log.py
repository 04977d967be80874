"""Kernel log records: every form that real hosts printed gives the right event; forged and broken ones give none."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.agent.kernel_log import (
    KernelEvent,
    KmsgRecord,
    Position,
    Stitcher,
    after_replacement,
    holds_nothing,
    interesting,
    parse_kernel_line,
    parse_kmsg_record,
    signal_of,
)

CAPTURES = Path(__file__).resolve().parents[2] / "data" / "captures"


def events(name: str) -> list[tuple[str, str | None, int | None]]:
    """What the lines of a capture give, record by record, as the follower feeds them."""
    found: list[tuple[str, str | None, int | None]] = []
    stitcher = Stitcher()
    for line in (CAPTURES / name).read_text().splitlines():
        if line.startswith(("# ", "$ ")) or not interesting(line.encode()):
            continue
        stitcher, event = stitcher.feed(line)
        if event:
            found.append((event.kind, event.bdf, event.xid))
    return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "dmesg_aer_fatal_then_xid79_bdw_ep.txt",
            [("aer_uncorrected", "0000:00:02.0", None), ("xid", "0000:02:00.0", 79)],
        ),
        ("dmesg_aer_rxerr_flood_x99_taichi_v100_sxm2_adapter.txt", []),
        ("dmesg_fallen_off_2012_format.txt", [("fallen_off", "0000:01:00.0", None), ("xid", "0000:01:00.0", 3)]),
        ("dmesg_fallen_off_multiline_no_xid.txt", [("fallen_off", "0000:18:00.0", None)]),
        (
            "dmesg_xid79_fallen_off_pid_unknown.txt",
            [("xid", "0000:91:00.0", 79), ("fallen_off", "0000:91:00.0", None)],
        ),
        ("dmesg_xid79_new_5080.txt", [("xid", "0000:2b:00.0", 79), ("fallen_off", "0000:2b:00.0", None)]),
        ("dmesg_xid109_ctxsw.txt", [("xid", "0000:01:00.0", 109), ("xid", "0000:01:00.0", 38)]),
        ("dmesg_xid119_gsp_h100.txt", [("xid", "0000:9b:00.0", 119)]),
        ("dmesg_xid13_43.txt", [("xid", "0000:38:00.0", 13), ("xid", "0000:38:00.0", 43)]),
        (
            "dmesg_xid13_illegal_instruction_then_rminit_0x24_0x65.txt",
            [("xid", "0000:02:00.0", 13)] * 2 + [("init_failed", "0000:02:00.0", None)] * 2,
        ),
        (
            "dmesg_xid144_150_nvlink5.txt",
            [("xid", "0000:00:00.0", 149), ("xid", "0000:01:00.0", 144), ("xid", "0000:04:00.0", 150)],
        ),
        ("dmesg_xid31_oldest_format.txt", [("xid", "0000:01:00.0", 31)]),
        (
            "dmesg_xid32_69_62_2014.txt",
            [("xid", "0000:01:00.0", 32), ("xid", "0000:01:00.0", 69), ("xid", "0000:01:00.0", 62)],
        ),
        ("dmesg_xid63_row_remap_ampere.txt", [("xid", "0000:10:1c.0", 63)]),
        ("dmesg_xid74_nvlink_fatal.txt", [("xid", "0000:c1:00.0", 74)]),
        (
            "dmesg_xid94_95_source_format.txt",
            [("xid", "0000:01:00.0", 94), ("xid", "0000:01:00.0", 94), ("xid", "0000:01:00.0", 95)],
        ),
        ("smi_api_mismatch_ubuntu_unattended.txt", [("api_mismatch", None, None)]),
    ],
)
def test_captures(name: str, expected: list[tuple[str, str | None, int | None]]) -> None:
    assert events(name) == expected


def test_an_xid_blames_a_process() -> None:
    event = parse_kernel_line("NVRM: Xid (PCI:0000:38:00): 43, pid=2924364, name=pt_main_thread, Ch 00000008")
    assert event is not None
    assert (event.pid, event.process, dict(event.values)["body"]) == (2924364, "pt_main_thread", "Ch 00000008")


def test_non_zero_domain_and_caller_prefix() -> None:
    event = parse_kernel_line("[130.456250] [ T1946] NVRM: Xid (PCI:0018:01:00): 79, GPU has fallen off the bus.")
    assert event is not None
    assert (event.bdf, event.xid) == ("0018:01:00.0", 79)


def test_a_message_of_several_lines_in_one_record() -> None:
    record = parse_kmsg_record(
        b"3,9,77,-;NVRM: API mismatch: the client 'nvidia-smi' (pid 42)\\x0aNVRM: has the version 580.173.02,"
        b" but this kernel module has\\x0aNVRM: the version 580.142.  Please make sure that this\\x0aNVRM: kernel module"
        b" and all NVIDIA driver components\n SUBSYSTEM=x\n"
    )
    assert record is not None
    event = parse_kernel_line(record.text)
    assert event is not None
    assert (event.kind, dict(event.values)) == ("api_mismatch", {"client": "580.173.02", "module": "580.142"})


def test_records() -> None:
    assert parse_kmsg_record("6,339,5140900,-;NET: Registered protocol family 10") == KmsgRecord(
        0, 6, 339, 5140900, "NET: Registered protocol family 10"
    )
    # systemd and everything else of user space has a facility of its own: 30 is 3 << 3 | 6.
    forged = parse_kmsg_record("30,340,5690716,-,caller=T1;NVRM: Xid (PCI:0000:03:00): 79, GPU has fallen off the bus.")
    assert forged is not None
    assert (forged.facility, forged.from_kernel) == (3, False)
    for broken in ("", " SUBSYSTEM=pci", "6,339;x", "a,b,c,-;x", "6,339,12,-"):
        assert parse_kmsg_record(broken) is None


def test_signals_of_user_space_are_drills() -> None:
    event = KernelEvent("xid", "0000:03:00.0", "NVRM: Xid ...", 79)
    assert signal_of(event, KmsgRecord(1, 3, 5, 0, "x"), "boot").drill
    real = signal_of(event, KmsgRecord(0, 3, 5, 0, "x"), "boot")
    assert (real.drill, real.lasting, real.origin) == (False, False, "boot:5")


def test_corrected_aer_errors_are_passed_over() -> None:
    line = "pcieport 0000:00:03.0: PCIe Bus Error: severity={}, type=Physical Layer, (Receiver ID)"
    assert parse_kernel_line(line.format("Correctable")) is None
    assert parse_kernel_line(line.format("Corrected")) is None
    event = parse_kernel_line(line.format("Uncorrectable (Non-Fatal)"))
    assert event is not None
    assert event.kind == "aer_uncorrected"


@given(
    st.lists(
        st.sampled_from(
            [
                "3,1,1,-;NVRM: Xid (PCI:0000:03:00): 79, gone",
                "3,1,1,-;pcieport 0000:00:03.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)",
                "3,1,1,-;pcieport 0000:00:03.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
                "3,1,1,-;AER: severity=Corrected seen, PCIe Bus Error: who knows",
                "3,1,1,-;usb 1-1: new device",
                "",
            ]
        )
    )
)
def test_a_look_at_many_records_misses_none(lines: list[str]) -> None:
    if holds_nothing("\n".join(lines).encode()):
        assert not any(interesting(line.encode()) for line in lines)


@given(st.binary(max_size=300))
def test_no_record_breaks_the_parser(data: bytes) -> None:
    record = parse_kmsg_record(data)
    if record:
        Stitcher().feed(record.text)
    assert record is None or b";" in data


@given(
    st.text(alphabet="NVRM: XidPCG0123456789(),.;abc-\n\\x", max_size=120),
    st.sampled_from(
        ["", "NVRM: Xid (PCI:0000:03:00): ", "NVRM: The NVIDIA GPU 0000:18:00.0", "NVRM: API mismatch: ", "PCIe Bus Error: "]
    ),
)
def test_no_text_breaks_the_stitcher(text: str, head: str) -> None:
    stitcher = Stitcher()
    for _ in range(3):
        stitcher, event = stitcher.feed(head + text)
        assert event is None or event.kind


@given(st.integers(0, 0xFFFF), st.integers(0, 255), st.integers(0, 31), st.integers(1, 999))
def test_every_xid_line_is_found(domain: int, bus: int, device: int, number: int) -> None:
    event = parse_kernel_line(
        f"NVRM: Xid (PCI:{domain:04x}:{bus:02x}:{device:02x}): {number}, pid='<unknown>', name=<unknown>, words"
    )
    assert event is not None
    assert (event.bdf, event.xid) == (f"{domain:04x}:{bus:02x}:{device:02x}.0", number)


def record(sequence: int) -> KmsgRecord:
    return KmsgRecord(0, 3, sequence, 0, "x")


def test_a_file_that_took_anothers_place() -> None:
    goes_on = (record(1), record(2), record(3))
    assert after_replacement(goes_on, 2) == (record(3),)
    assert after_replacement(goes_on, 3) == ()
    assert after_replacement((record(0), record(1)), 9) == (record(0), record(1))
    assert after_replacement((), 9) == ()
    assert Position().sequence == -1
