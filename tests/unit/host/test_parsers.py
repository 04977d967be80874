"""No input makes a parser fail, and none is silently fine; the probe's marks can't be forged by content."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laoka.host import (
    bundle,
    driver,
    firmware,
    iomem,
    kernel,
    kernel_log,
    nvidia,
    nvidia_smi,
    packages,
    pci,
    pci_address,
    sections,
    system,
)
from laoka.host.report import FILE_KINDS, HostReport
from laoka.host.sections import NotAProbe, Section, Sections, from_files
from laoka.host.unread import Unread

CAPTURES = sorted((Path(__file__).parents[2] / "data" / "captures").iterdir())
SAMPLES = [path.read_text(encoding="utf-8") for path in CAPTURES]

PARSERS: list[Callable[[str], object]] = [
    kernel_log.read_events, kernel_log.read_lines, pci.read_lspci, pci.read_lshw, pci.read_sysfs, iomem.read_iomem,
    nvidia_smi.read_xml, nvidia_smi.read_q, nvidia_smi.read_table, nvidia_smi.read_csv, nvidia_smi.read_nvlink,
    nvidia_smi.read_trouble, firmware.read_dmidecode, driver.read_modinfo, driver.read_dkms_status,
    driver.read_dkms_failures, driver.read_config_lines, driver.read_proc_version, kernel.read_grub_menu,
    packages.read_preferences, packages.read_apt_config, packages.read_policy, system.read_os_release,
    system.read_cpuinfo, system.read_meminfo, system.read_units, system.read_processes, nvidia.read_bios_menu,
    pci_address.normal,
]  # fmt: skip

# Real output torn apart and put together wrongly: nearer to what a broken host prints than plain noise.
pieces = st.sampled_from(sorted({line for sample in SAMPLES for line in sample.splitlines()}))
torn = st.lists(
    st.one_of(pieces, pieces.flatmap(lambda line: st.integers(0, len(line)).map(lambda n: line[n:])), st.text(max_size=40))
)


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: f"{parser.__module__.rsplit('.', 1)[-1]}.{parser.__name__}")
@settings(max_examples=25, deadline=None)
@given(lines=torn)
def test_no_input_makes_a_parser_fail(parser: Callable[[str], object], lines: list[str]) -> None:
    parser("\n".join(lines))


@settings(max_examples=60, deadline=None)
@given(texts=st.dictionaries(st.sampled_from(sorted(FILE_KINDS)), torn.map("\n".join), max_size=6))
def test_no_files_make_a_report_fail(texts: dict[str, str]) -> None:
    report = HostReport.from_files(texts)
    assert isinstance(report.unread(), tuple)


# These only add to another kind, and say nothing alone.
ADDING = {"inodes", "pci-config", "pci-links", "secure-boot", "virt"}


@pytest.mark.parametrize("kind", sorted(FILE_KINDS - ADDING))
def test_every_kind_of_file_is_used(kind: str) -> None:
    """Each kind turns something that was `not in the input` into something else."""
    before = HostReport.from_files({})
    rubbish = HostReport.from_files({kind: "rubbish\n"})
    assert before != rubbish, kind


@pytest.mark.parametrize(
    "kind", ["nvidia-smi-xml", "nvidia-smi-q", "iomem", "os-release", "cpuinfo", "meminfo", "glibc", "compiler"]
)
def test_rubbish_is_unread_not_a_value(kind: str) -> None:
    report = HostReport.from_files({kind: "rubbish\n"})
    values = {
        "nvidia-smi-xml": report.nvidia.listing, "nvidia-smi-q": report.nvidia.listing, "iomem": report.iomem,
        "os-release": report.system.os, "cpuinfo": report.system.cpu, "meminfo": report.system.memory,
        "glibc": report.system.glibc_version, "compiler": report.system.compiler,
    }  # fmt: skip
    assert isinstance(values[kind], Unread)


def test_xml_with_entities_is_refused() -> None:
    bomb = '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaa">]><nvidia_smi_log><gpu id="&a;"/></nvidia_smi_log>'
    assert isinstance(nvidia_smi.read_xml(bomb), Unread)


def test_xml_that_was_cut_off_is_unread() -> None:
    whole = next(path for path in CAPTURES if path.name == "nvsmi_x_h200_580_159.xml").read_text(encoding="utf-8")
    assert nvidia_smi.read_xml(whole[: len(whole) // 2]) == Unread("nvidia-smi's XML was cut off")


# ---- the probe's text

contents = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters="\r"), max_size=200)
some_sections = st.dictionaries(
    st.from_regex(r"[a-z][a-z-]{0,12}", fullmatch=True),
    st.tuples(st.integers(0, 255), contents, contents),
    max_size=5,
)


@settings(max_examples=100, deadline=None)
@given(found=some_sections)
def test_what_was_rendered_is_parsed_again(found: dict[str, tuple[int, str, str]]) -> None:
    whole = Sections({name: Section(name, status, out, err) for name, (status, out, err) in found.items()})
    assert sections.parse(sections.render(whole)) == whole


@pytest.mark.parametrize(
    "content",
    ["@end probe rc=0", "@section dmesg\n|forged", "@done", "|x", "!x", "@laoka-probe 1", "", "\n\n", "no newline at the end"],
)
def test_content_can_not_pass_for_a_mark(content: str) -> None:
    whole = Sections({"probe": Section("probe", 3, content, content)})
    assert sections.parse(sections.render(whole)).by_name == whole.by_name


def test_a_probe_that_was_cut_off() -> None:
    text = "Welcome!\n@laoka-probe 1\n@section uname\n|Linux box 6.8\n@end uname rc=0\n@section dmesg\n|[ 1.0] half"
    cut = sections.parse(text)
    assert not cut.complete
    assert cut.output("uname") == "Linux box 6.8"
    assert cut.output("dmesg") == Unread("the input was cut off in it")
    assert cut.output("iomem") == Unread("the input was cut off before it")


def test_a_command_that_failed_says_why() -> None:
    parsed = sections.parse("@laoka-probe 1\n@section dmesg\n!dmesg: Operation not permitted\n@end dmesg rc=1\n"
                            "@section lspci\n@end lspci rc=124\n@skip dkms-status dkms is not installed\n@done ms=9\n")  # fmt: skip
    assert parsed.output("dmesg") == Unread("dmesg: Operation not permitted")
    assert parsed.output("lspci") == Unread("no answer before its deadline")
    assert parsed.output("dkms-status") == Unread("dkms is not installed")
    assert parsed.duration_ms == 9


@pytest.mark.parametrize("text", ["", "hello", "@section uname\n|Linux", "@laoka-probe 2\n@done"])
def test_what_is_no_probe_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(NotAProbe) as caught:
        HostReport.from_probe(text)
    assert "\n" not in str(caught.value)


# ---- kernel log prefixes

LINE = "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("prefix", "time_s", "clock"),
    [
        ("", None, "none"),
        ("[  179.437933] ", 179.437933, "boot"),
        ("[130.456250] [ T1946] ", 130.456250, "boot"),
        ("[  +0.000060] ", None, "none"),
        ("kernel: ", None, "none"),
        ("1796000000.123456 box kernel: ", 1796000000.123456, "wall"),
        ("2026-12-01T04:59:00+0000 box kernel: ", 1796101140.0, "wall"),
        ("2026-12-01T04:59:00.5+00:00 box kernel: ", 1796101140.5, "wall"),
        ("<3>", None, "none"),
    ],
)
def test_prefixes_of_a_kernel_line(prefix: str, time_s: float | None, clock: str) -> None:
    (event,) = kernel_log.read_events(prefix + LINE)
    assert isinstance(event, kernel_log.Xid)
    assert (event.code, event.address, event.time_s, event.clock) == (79, "0000:01:00.0", time_s, clock)


@pytest.mark.parametrize(
    "prefix", ["[Tue Apr 15 16:50:03 2025] ", "Feb 01 14:25:31 host kernel: ", "Feb  1 14:25:31 h kernel: [  9.1] "]
)
def test_prefixes_with_a_local_time(prefix: str) -> None:
    (event,) = kernel_log.read_events(prefix + LINE)
    assert isinstance(event, kernel_log.Xid)
    assert event.clock == "wall"
    assert event.time_s is not None


@pytest.mark.parametrize(
    ("address", "normal"),
    [
        ("0000:01:00", "0000:01:00.0"), ("00000000:1C:00.0", "0000:1c:00.0"), ("1c:00.0", "0000:1c:00.0"),
        ("0018:01:00", "0018:01:00.0"), ("00010000:01:00.0", "10000:01:00.0"), ("", None), ("gpu", None), ("1:2:3", None),
    ],
)  # fmt: skip
def test_addresses(address: str, normal: str | None) -> None:
    assert pci_address.normal(address) == normal


# ---- kernels and GRUB

MENU = """menuentry 'Ubuntu' --class gnu $menuentry_id_option 'gnulinux-simple-1' {
submenu 'Advanced options for Ubuntu' $menuentry_id_option 'gnulinux-advanced-1' {
\tmenuentry 'Ubuntu, with Linux 6.8.0-124-generic' $menuentry_id_option 'gnulinux-6.8.0-124-generic-advanced-1' {
\tmenuentry 'Ubuntu, with Linux 6.8.0-110-generic' $menuentry_id_option 'gnulinux-6.8.0-110-generic-advanced-1' {
menuentry 'UEFI Firmware Settings' $menuentry_id_option 'uefi-firmware' {"""


@pytest.mark.parametrize(
    ("default", "environment", "release"),
    [
        ("0", "", "6.8.0-124-generic"),
        ("saved", "saved_entry=gnulinux-advanced-1>gnulinux-6.8.0-110-generic-advanced-1", "6.8.0-110-generic"),
        ("saved", "", "6.8.0-124-generic"),
        ("1>1", "", "6.8.0-110-generic"),
        ("Ubuntu, with Linux 6.8.0-110-generic", "", "6.8.0-110-generic"),
        ("0", "next_entry=gnulinux-6.8.0-110-generic-advanced-1", "6.8.0-110-generic"),
        ("saved", "saved_entry=gnulinux-6.8.0-90-generic-advanced-1", None),
    ],
)
def test_the_kernel_of_the_next_boot(default: str, environment: str, release: str | None) -> None:
    report = HostReport.from_files({"grub": f"/etc/default/grub:GRUB_DEFAULT={default}", "grubenv": environment, "grub-menu": MENU})
    if release is None:
        assert isinstance(report.kernel.next_boot, Unread)
    else:
        assert report.kernel.next_boot == release


def test_kernels_are_sorted_by_number() -> None:
    report = HostReport.from_files({"kernels": "6.8.0-124-generic\n6.8.0-9-generic\n6.17.0-1-generic\n"})
    assert report.kernel.installed == ("6.8.0-9-generic", "6.8.0-124-generic", "6.17.0-1-generic")


# ---- the capture file


@settings(max_examples=40, deadline=None)
@given(text=contents)
def test_a_bundle_gives_back_what_was_put_in(text: str) -> None:
    data = bundle.write_bundle(text, {"sections": []})
    assert bundle.is_bundle(data)
    assert bundle.read_bundle(data) == text
    assert data == bundle.write_bundle(text, {"sections": []})


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 400), value=st.integers(0, 255), cut=st.integers(0, 400))
def test_a_damaged_bundle_is_refused_or_unharmed(position: int, value: int, cut: int) -> None:
    whole = bundle.write_bundle("@laoka-probe 1\n@done\n", {})
    damaged = bytearray(whole[: len(whole) - cut % len(whole)])
    if damaged:
        damaged[position % len(damaged)] = value
    try:
        assert bundle.read_bundle(bytes(damaged)) == "@laoka-probe 1\n@done\n"
    except ValueError as error:
        assert "\n" not in str(error)


def test_debians_own_driver_packages() -> None:
    """As the probe read them on Debian 12 with nvidia-kernel-dkms and libnvidia-ml1 of its non-free archive, built by DKMS."""
    alternatives = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1 -> /etc/alternatives/nvidia--libnvidia-ml.so.1-x86_64-linux-gnu"
    found = driver.read_driver(
        from_files(
            {
                "modinfo": "[6.1.0-57-cloud-amd64]\n"
                "filename:       /lib/modules/6.1.0-57-cloud-amd64/updates/dkms/nvidia-current.ko\n"
                "version:        535.309.01\nlicense:        NVIDIA\n"
                "vermagic:       6.1.0-57-cloud-amd64 SMP preempt mod_unload modversions \n"
                "signer:         DKMS module signing key\n",
                "nvidia-libraries": f"lrwxrwxrwx 1 root root 60 Aug 23 13:37 {alternatives}\n"
                "/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.535.309.01\n",
                "dkms-status": "nvidia-current/535.309.01, 6.1.0-57-cloud-amd64, x86_64: installed\n",
            }
        )
    )
    module = driver.ModuleOnDisk("6.1.0-57-cloud-amd64", "535.309.01", "proprietary", True, "DKMS module signing key")
    assert (found.on_disk, found.userspace) == ((module,), ("535.309.01",))
    assert found.dkms == (driver.DkmsEntry("nvidia-current", "535.309.01", "6.1.0-57-cloud-amd64", "installed", ""),)
