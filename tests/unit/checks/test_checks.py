"""Each illness of a host is found by its check, with the severity and the case it deserves; a healthy host has none."""

from __future__ import annotations

import pytest
import x99_host as x99
from x99_host import CARDS, DRIVER, KERNEL, OLD_KERNEL, host, smi, smi_gpu

from laoka import checks
from laoka.catalog.messages import LANGUAGES
from laoka.checks.registry import CHECKS, Check, Wanted, run_one
from laoka.host.report import HostReport
from laoka.host.sections import Section

CARD, OTHER = CARDS
PORT = CARDS[CARD]


def dmesg(*lines: str) -> str:
    return "\n".join(f"[   10.{number:06d}] {line}" for number, line in enumerate(lines))


def journal(*lines: tuple[float, str]) -> str:
    return "\n".join(f"{1796000000 + at:.6f} box kernel: {line}" for at, line in lines)


XID = "NVRM: Xid (PCI:0000:02:00): {}, pid='<unknown>', name=<unknown>, {}"

ILL = [
    # platform
    ("platform.kind", "fail", "wsl", {"uname": "Linux box 6.6.87.2-microsoft-standard-WSL2 #1 SMP x86_64 GNU/Linux"}),
    ("platform.kind", "fail", "windows", {"uname": "MINGW64_NT-10.0-19045 box 3.4.6 x86_64 Msys"}),
    ("platform.kind", "info", "container", {"virt": "vm=none\ncontainer=systemd-nspawn"}),
    ("platform.kind", "info", "vm", {"virt": "vm=kvm\ncontainer=none"}),
    ("platform.simulated", "info", "simulated", {"probe": "uid=0\nepoch_s=1796100000\nuptime_s=36.0\nsimulated=1"}),
    ("platform.root", "warn", "user", {"probe": "uid=1000\nepoch_s=1796100000\nuptime_s=36.0"}),
    # firmware
    ("firmware.boot-mode", "info", "legacy", {"efi": "efi=0", "secure_boot": None}),
    ("firmware.pci-options", "warn", "nocrs", {"cmdline": "ro pci=nocrs"}),
    ("firmware.pci-options", "info", "there", {"cmdline": "ro pci=realloc"}),
    ("firmware.board", "warn", "no-option", {"dmi": "/sys/class/dmi/id/board_name:X99-UD4-CF"}),
    ("firmware.board", "info", "not-in-catalogue", {"dmi": "/sys/class/dmi/id/board_name:X99-F8 GAMING"}),
    ("firmware.bar1-agrees", "warn", "differs", {"nvidia_smi_xml": smi().replace("<total>32768 MiB", "<total>256 MiB")}),
    ("firmware.settings", "fail", "wrong", {"bios_menu": "Above 4G Decoding: [Disabled]"}),
    ("firmware.settings", "ok", "ok", {"bios_menu": "Above 4G Decoding: [Enabled]; CSM Support: [Disabled]"}),
    # cards
    ("cards.answer", "fail", "dead", {"pci_config": f"{CARD}" + " ff" * 64}),
    ("cards.known", "info", "not-in-catalogue", {"pci_attributes": x99.pci_attributes(device="0x0fff")}),
    ("cards.nvidia-smi", "fail", "hung", {"nvidia_smi_xml": Section("nvidia-smi-xml", 124, "")}),
    ("cards.nvidia-smi", "fail", "no-devices", {"nvidia_smi_xml": Section("nvidia-smi-xml", 6, "No devices were found")}),
    ("cards.listed", "fail", "not-listed", {"nvidia_smi_xml": smi(smi_gpu(CARD))}),
    ("cards.listed", "fail", "not-on-bus", {"nvidia_smi_xml": smi(*(smi_gpu(c) for c in (*CARDS, "0000:81:00.0")))}),
    (
        "cards.handles",
        "fail",
        "lost",
        {"nvidia_smi": "Unable to determine the device handle for GPU3: 0000:04:00.0: Unknown Error"},
    ),
    ("cards.initialised", "fail", "timeout", {"dmesg": dmesg("NVRM: GPU 0000:02:00.0: RmInitAdapter failed! (0x24:0x65:1185)")}),
    (
        "cards.initialised",
        "fail",
        "insufficient-power",
        {"dmesg": dmesg("NVRM: GPU 0000:02:00.0: RmInitAdapter failed! (0x26:0x1c:1470)")},
    ),
    # pcie
    ("pcie.width", "warn", "trained-down", {"pci_attributes": x99.pci_attributes(width=8)}),
    ("pcie.speed", "info", "idle", {"pci_attributes": x99.pci_attributes(speed="2.5")}),
    (
        "pcie.speed",
        "warn",
        "slow-under-load",
        {"pci_attributes": x99.pci_attributes(speed="5.0"), "nvidia_smi_xml": smi(*(smi_gpu(c, util="97 %") for c in CARDS))},
    ),
    ("pcie.corrected-errors", "warn", "flood", {"pci_attributes": x99.pci_attributes(corrected=2_000_000)}),
    ("pcie.corrected-errors", "info", "some", {"pci_attributes": x99.pci_attributes(corrected=12)}),
    (
        "pcie.uncorrected-errors",
        "fail",
        "fatal",
        {
            "dmesg": dmesg(
                f"pcieport {PORT}: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, id=0010(Receiver ID)"
            )
        },
    ),
    (
        "pcie.bandwidth",
        "warn",
        "limited",
        {
            "dmesg": dmesg(
                "pci 0000:02:00.0: 31.504 Gb/s available PCIe bandwidth, limited by 8.0 GT/s PCIe x4 link at 0000:00:02.0 "
                "(capable of 126.016 Gb/s with 8.0 GT/s PCIe x16 link)"
            )
        },
    ),
    # power, thermal
    (
        "power.cable",
        "fail",
        "missing",
        {"dmesg": dmesg("NVRM: GPU 0000:02:00.0: GPU does not have the necessary power cables connected.")},
    ),
    ("power.limit", "info", "uncapped", {"nvidia_smi_xml": smi(*(smi_gpu(c, limit="250.00 W") for c in CARDS))}),
    (
        "power.supply",
        "fail",
        "too-weak",
        {"dmidecode": "Handle 0x0027, DMI type 39, 22 bytes\nSystem Power Supply\n\tName: PSU\n\tMax Power Capacity: 300 W\n"},
    ),
    ("power.persistence", "warn", "off", {"nvidia_smi_xml": smi(*(smi_gpu(c, persistence="Disabled") for c in CARDS))}),
    ("power.brake", "fail", "active", {"nvidia_smi_xml": smi(*(smi_gpu(c, brake="Active") for c in CARDS))}),
    ("power.last-boot-end", "warn", "cut", {"journal_previous_boot": "1795990000.0 box kernel: usb 1-1: new device"}),
    ("thermal.memory", "fail", "at-limit", {"nvidia_smi_xml": smi(*(smi_gpu(c, memory_c=85) for c in CARDS))}),
    ("thermal.memory", "warn", "close", {"nvidia_smi_xml": smi(*(smi_gpu(c, memory_c=82) for c in CARDS))}),
    ("thermal.core", "warn", "close", {"nvidia_smi_xml": smi(*(smi_gpu(c, core_c=84) for c in CARDS))}),
    ("thermal.slowdown", "fail", "hot", {"nvidia_smi_xml": smi(*(smi_gpu(c, thermal="Active") for c in CARDS))}),
    ("thermal.idle", "warn", "hot", {"nvidia_smi_xml": smi(*(smi_gpu(c, core_c=79, draw="59.00 W") for c in CARDS))}),
    ("thermal.fans", "warn", "still", {"hwmon": "/sys/class/hwmon/hwmon2/fan1_input:0"}),
    # ecc
    ("ecc.on", "warn", "off", {"nvidia_smi_xml": smi(*(smi_gpu(c, ecc="Disabled") for c in CARDS))}),
    ("ecc.uncorrected", "fail", "now", {"nvidia_smi_xml": smi(*(smi_gpu(c, dbe="1") for c in CARDS))}),
    ("ecc.corrected", "info", "some", {"nvidia_smi_xml": smi(*(smi_gpu(c, sbe="236795") for c in CARDS))}),
    ("ecc.retired-pages", "fail", "full", {"nvidia_smi_xml": smi(*(smi_gpu(c, retired_sbe="60", retired_dbe="2") for c in CARDS))}),
    ("ecc.retired-pages", "info", "some", {"nvidia_smi_xml": smi(*(smi_gpu(c, retired_sbe="1") for c in CARDS))}),
    ("ecc.pending", "warn", "waits", {"nvidia_smi_xml": smi(*(smi_gpu(c, pending="Yes") for c in CARDS))}),
    # xid
    ("xid.bursts", "fail", "off-the-bus", {"journal_kernel": journal((0, XID.format(79, "GPU has fallen off the bus.")))}),
    ("xid.bursts", "info", "software", {"journal_kernel": journal((0, XID.format(13, "Graphics Exception")))}),
    ("xid.bursts", "warn", "care", {"journal_kernel": journal((0, XID.format(63, "Dynamic Page Retirement: New retired page")))}),
    (
        "xid.bursts",
        "fail",
        "retire",
        {
            "journal_kernel": journal(
                (0, XID.format(62, "0096(1c54)")), (2, XID.format(48, "DBE")), (3, XID.format(64, "Fatal error"))
            )
        },
    ),
    ("xid.fell-off", "warn", "back", {"dmesg": dmesg("NVRM: GPU 0000:02:00.0: GPU has fallen off the bus.")}),
    ("xid.fell-off", "fail", "gone", {"dmesg": dmesg("NVRM: GPU 0000:81:00.0: GPU has fallen off the bus.")}),
    (
        "xid.repeated",
        "fail",
        "again",
        {"journal_kernel": journal((0, XID.format(79, "x")), (7200, XID.format(79, "x")))},
    ),
    ("xid.impossible", "warn", "wrong-card", {"dmesg": dmesg(XID.format(119, "Timeout after 6s of waiting for RPC response"))}),
    # driver
    ("driver.loaded", "fail", "not-loaded", {"nvidia_proc": Section("nvidia-proc", 1, "", "No such file or directory")}),
    (
        "driver.loaded",
        "fail",
        "absent",
        {"nvidia_proc": Section("nvidia-proc", 1, "", "No such file or directory"), "modinfo": f"[{KERNEL}]\nmodinfo: not found"},
    ),
    ("driver.branch", "fail", "too-new", {"nvidia_proc": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  595.71.03  Wed"}),
    ("driver.end-of-life", "warn", "ended", {"nvidia_proc": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed"}),
    (
        "driver.flavour",
        "fail",
        "open",
        {"nvidia_proc": f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}  Release Build"},
    ),
    ("driver.open-packages", "fail", "installed", {"packages": f"nvidia-dkms-580-server-open {DRIVER} ii  amd64"}),
    ("driver.versions-agree", "fail", "differ", {"nvidia_libraries": "/usr/lib64/libnvidia-ml.so.580.159.03"}),
    (
        "driver.api-mismatch",
        "fail",
        "mismatch",
        {
            "dmesg": dmesg(
                "NVRM: API mismatch: the client 'nvidia-smi' (pid 4711)",
                "NVRM: has the version 580.173.02, but this kernel module has",
                "NVRM: the version 580.159.03.  Please",
            )
        },
    ),
    ("driver.metapackages", "fail", "installed", {"packages": "cuda-drivers-580 580.65.06 ii  amd64"}),
    ("driver.one-branch", "warn", "mixed", {"packages": "nvidia-dkms-580 580.1.2 hi  x\nlibnvidia-compute-570 570.1.2 hi  x"}),
    ("driver.half-installed", "fail", "broken", {"packages": "nvidia-dkms-580 580.119.02 iF  amd64"}),
    ("driver.held", "warn", "loose", {"holds": ""}),
    ("driver.pinned", "warn", "none", {"apt_preferences": ""}),
    ("driver.unattended-upgrades", "warn", "open", {"apt_config": 'APT::Periodic::Unattended-Upgrade "1";'}),
    (
        "driver.unattended-reboot",
        "warn",
        "on",
        {"apt_config": 'APT::Periodic::Unattended-Upgrade "1";\nUnattended-Upgrade::Automatic-Reboot "true";'},
    ),
    (
        "driver.candidate",
        "warn",
        "moves",
        {"apt_policy": "nvidia-driver-580:\n  Installed: 580.159.03\n  Candidate: 580.173.02\n"},
    ),
    (
        "driver.repository",
        "warn",
        "raised",
        {
            "apt_preferences": "/etc/apt/preferences.d/cuda-repository-pin-600:Package: *\n"
            "/etc/apt/preferences.d/cuda-repository-pin-600:Pin: release l=NVIDIA CUDA\n"
            "/etc/apt/preferences.d/cuda-repository-pin-600:Pin-Priority: 600"
        },
    ),
    (
        "driver.persistenced",
        "warn",
        "inactive",
        {"services": "Id=nvidia-persistenced.service\nLoadState=loaded\nActiveState=inactive"},
    ),
    (
        "driver.recovery-action",
        "fail",
        "wanted",
        {"nvidia_smi_xml": smi(*(smi_gpu(c, action="GPU Reset Required") for c in CARDS))},
    ),
    ("driver.bound", "fail", "vfio-pci", {"pci_links": x99.pci_links("vfio-pci")}),
    ("driver.bound", "fail", "unbound", {"pci_links": x99.pci_links(None)}),
    ("driver.nouveau", "fail", "loaded", {"modules": "nouveau 1 0 - Live"}),
    ("driver.nouveau", "warn", "not-blacklisted", {"modprobe": ""}),
    (
        "driver.initramfs",
        "warn",
        "older",
        {"boot_files": f"1 7 /boot/initrd.img-{KERNEL}\n2 40 /etc/modprobe.d/nouveau-blacklist.conf"},
    ),
    ("driver.vfio-ids", "fail", "claimed", {"cmdline": "ro vfio-pci.ids=10de:1db4"}),
    (
        "driver.secure-boot",
        "fail",
        "unsigned",
        {"secure_boot": "SecureBoot enabled", "modinfo": f"[{KERNEL}]\nversion: {DRIVER}\nlicense: NVIDIA"},
    ),
    (
        "driver.ignores-card",
        "fail",
        "ignored",
        {
            "dmesg": dmesg(
                "NVRM: The NVIDIA Tesla V100-PCIE-32GB GPU installed in this system is",
                "NVRM:  supported through the NVIDIA 580.xx Legacy drivers. Please",
                "NVRM:  The 595.71.03 NVIDIA driver will ignore",
                "NVRM:  this GPU.",
            )
        },
    ),
    # kernel
    ("kernel.next-boot", "warn", "other", {"grubenv": f"saved_entry=gnulinux-advanced-0aaa>gnulinux-{OLD_KERNEL}-advanced-0aaa"}),
    ("kernel.next-boot", "fail", "gone", {"kernels": OLD_KERNEL}),
    ("kernel.default", "warn", "newest", {"grub": "/etc/default/grub:GRUB_DEFAULT=0"}),
    ("kernel.held", "warn", "loose", {"holds": ""}),
    ("kernel.fallback", "info", "only-one", {"kernels": KERNEL}),
    ("kernel.headers", "fail", "missing", {"headers": OLD_KERNEL}),
    (
        "kernel.module-ready",
        "fail",
        "missing",
        {"modinfo": f"[{OLD_KERNEL}]\nversion: {DRIVER}\nlicense: NVIDIA\n[{KERNEL}]\nmodinfo: ERROR: Module nvidia not found."},
    ),
    ("kernel.dkms", "fail", "not-built", {"dkms_status": f"nvidia/{DRIVER}: added"}),
    (
        "kernel.dkms-failures",
        "fail",
        "failed",
        {"dkms_failures": "Error! Bad return status for module build on kernel: 6.17.9-76061709-generic (x86_64)"},
    ),
    # system, leftovers
    ("system.release", "warn", "untried", {"os_release": 'ID=arch\nPRETTY_NAME="Arch Linux"'}),
    ("system.glibc", "warn", "old", {"glibc": "glibc 2.35"}),
    ("system.glibc", "fail", "too-old", {"glibc": "glibc 2.31"}),
    ("system.python", "warn", "none", {"python": "/usr/bin/python3 Python 3.10.12"}),
    ("system.compiler", "warn", "none", {"compiler": Section("compiler", 127, "", "gcc: not found")}),
    ("system.cpu", "warn", "no-avx2", {"cpuinfo": "model name\t: Xeon E5-2670\nphysical id\t: 0\nflags\t: fpu avx\nthreads: 16"}),
    ("system.memory", "warn", "small", {"meminfo": "MemTotal: 16000000 kB\nMemAvailable: 1 kB\nSwapTotal: 1 kB"}),
    ("system.swap", "info", "none", {"meminfo": "MemTotal: 65536000 kB\nMemAvailable: 1 kB\nSwapTotal: 0 kB"}),
    ("system.shared-memory", "warn", "small", {"disks": "shm 65536 0 65536 0% /dev/shm"}),
    ("system.disk-model", "fail", "full", {"disks": "/dev/sda1 20000000 9000000 10000000 50% /"}),
    ("system.disk-root", "fail", "full", {"disks": "/dev/sda1 100000000 100000000 0 100% /"}),
    ("system.disk-root", "fail", "full", {"inodes": "/dev/nvme0n1p2 60000000 59999000 1000 100% /"}),
    ("system.log-size", "warn", "flood", {"log_size": "18874368\t/var/log"}),
    ("system.journal-limit", "warn", "volatile", {"journald": "/etc/systemd/journald.conf:Storage=volatile"}),
    ("system.failed-units", "warn", "some", {"failed_units": "qwen-serve.service loaded failed failed Qwen"}),
    ("system.stuck-processes", "fail", "hanging", {"processes": "4711 D 1 100 5 nvidia-smi"}),
    ("leftovers.engine-processes", "warn", "orphans", {"processes": "4711 S 1 100 5 VLLM::EngineCor"}),
    ("leftovers.cuda-13", "warn", "installed", {"installs": "/usr/local/cuda-13.0"}),
    ("leftovers.torch", "warn", "cuda-13", {"installs": "/opt/x/lib/python3.12/site-packages/torch-2.11.0+cu130.dist-info"}),
    ("leftovers.engines", "info", "there", {"installs": "/opt/x/lib/python3.12/site-packages/vllm-0.32.0.dist-info"}),
    ("leftovers.engines", "ok", "ok", {"installs": "/opt/laoka/engines/x/lib/python3.12/site-packages/vllm-0.32.0.dist-info"}),
    ("leftovers.torch", "ok", "ok", {"installs": "/opt/laoka/engines/x/lib/python3.12/site-packages/torch-2.13.0+cpu.dist-info"}),
    ("leftovers.card-memory", "info", "used", {"nvidia_smi_xml": smi(*(smi_gpu(c, used="31689 MiB") for c in CARDS))}),
]


def test_a_healthy_host_has_nothing_worse_than_info() -> None:
    findings = checks.run(host(), expected_gpus=2)
    assert [f for f in findings if f.severity not in ("ok", "info")] == []
    assert checks.verdict(findings) == "info"
    assert checks.gate(host(), 2) == ()


@pytest.mark.parametrize(("check", "severity", "case", "changes"), ILL, ids=[f"{row[0]}-{row[2]}" for row in ILL])
def test_each_illness_is_found(check: str, severity: str, case: str, changes: dict[str, str | Section | None]) -> None:
    findings = [f for f in checks.run(host(**changes), expected_gpus=2) if f.id == check]
    assert (severity, case) in {(f.severity, f.case) for f in findings}, findings
    for finding in findings:
        for lang in LANGUAGES:
            assert finding.title(lang)
            assert "{" not in finding.title(lang) + finding.why(lang) + finding.next(lang)


def test_every_check_but_those_of_special_machines_is_made_ill() -> None:
    told_elsewhere = {"firmware.above-4g", "firmware.window", "firmware.memory", "cards.present", "cards.links-between"}
    special = {
        "cards.one-module", "pcie.port", "pcie.aspm", "pcie.replays", "pcie.same-socket", "ecc.mode-change", "ecc.remapping",
        "driver.fabric-manager", "system.desktop", "platform.probe-complete",
    }  # fmt: skip
    assert {row[0] for row in ILL} | told_elsewhere | special == set(CHECKS)


@pytest.mark.parametrize(
    ("check", "case", "changes"),
    [
        ("cards.one-module", "mixed", {"pci_attributes": x99.pci_attributes().replace("0x1db6", "0x2b85", 1)}),
        (
            "pcie.port",
            "limits",
            {"pci_attributes": x99.pci_attributes().replace(f"{PORT}/max_link_width:16", f"{PORT}/max_link_width:8")},
        ),
        ("pcie.aspm", "on", {"pci_attributes": x99.pci_attributes().replace("l1_aspm:0", "l1_aspm:1")}),
        ("pcie.replays", "some", {"nvidia_smi_xml": smi().replace("<replay_counter>0", "<replay_counter>7")}),
        ("pcie.same-socket", "two", {"pci_attributes": x99.pci_attributes().replace(f"{CARD}/numa_node:0", f"{CARD}/numa_node:1")}),
        ("ecc.mode-change", "waits", {"nvidia_smi_xml": smi().replace("<pending_ecc>Enabled", "<pending_ecc>Disabled")}),
        (
            "driver.fabric-manager",
            "needless",
            {"services": "Id=nvidia-fabricmanager.service\nLoadState=loaded\nActiveState=failed"},
        ),
        ("system.desktop", "running", {"services": "Id=gdm.service\nLoadState=loaded\nActiveState=active"}),
        (
            "ecc.remapping",
            "failed",
            {
                "nvidia_smi_xml": smi().replace(
                    "<retired_pages>",
                    "<remapped_rows><remapped_row_pending>No</remapped_row_pending>"
                    "<remapped_row_failure>Yes</remapped_row_failure></remapped_rows><retired_pages>",
                )
            },
        ),
        ("cards.links-between", "some", {"nvlink": "GPU 3: Tesla V100\n Link 0: 25.781 GB/s\n Link 1: <inactive>"}),
        (
            "firmware.memory",
            "single",
            {"dmidecode": "Handle 0x0040, DMI type 17, 84 bytes\n\tSize: 32 GB\n\tLocator: DIMM_A1\n\tSpeed: 2133 MT/s\n"},
        ),
    ],
)
def test_illnesses_of_special_machines(check: str, case: str, changes: dict[str, str]) -> None:
    assert case in {f.case for f in checks.run(host(**changes)) if f.id == check}


def test_nothing_read_is_never_ok() -> None:
    """With no section at all, every finding is unknown, and the gate stops."""
    nothing = HostReport.from_files({})
    findings = checks.run(nothing)
    assert findings
    assert {f.severity for f in findings} == {"unknown"}
    assert {f.id for f in checks.gate(nothing)} == {"platform.kind", "firmware.above-4g", "cards.present"}


def test_each_section_left_out_makes_no_check_pass_that_did_not() -> None:
    before = {(f.id, f.subject) for f in checks.run(host()) if f.severity == "ok"}
    for name in x99.HEALTHY:
        after = {(f.id, f.subject) for f in checks.run(host(**{name: None})) if f.severity == "ok"}
        assert after - before <= {("driver.secure-boot", None), ("platform.kind", None)}, name


def test_a_fault_in_a_check_is_unknown() -> None:
    def broken(report: HostReport, wanted: Wanted) -> list[object]:
        raise ZeroDivisionError("division by zero")

    (finding,) = run_one(Check("cards.present", "cards", broken, True, ""), host(), Wanted())  # type: ignore[arg-type]
    assert finding.severity == "unknown"
    assert "ZeroDivisionError" in finding.title("en")


def test_a_burst_has_the_earliest_xid_that_is_no_clean_up_as_its_root() -> None:
    lines = journal(
        (0, XID.format(45, "Ch 00000008")), (1, XID.format(79, "GPU has fallen off the bus.")), (170, XID.format(154, "Recovery")),
        (1000, XID.format(31, "MMU fault")),
    )  # fmt: skip
    findings = [f for f in checks.run(host(journal_kernel=lines)) if f.id == "xid.bursts"]
    assert [dict(f.values)["code"] for f in findings] == ["79", "31"]  # fail before info
    assert "3 Xids in the burst: 45, 79, 154" in findings[0].evidence


def test_only_an_area_or_a_check() -> None:
    assert {f.area for f in checks.run(host(), only=["power"])} == {"power"}
    assert {f.id for f in checks.run(host(), only=["power.limit"])} == {"power.limit"}
