"""A healthy X99 host with two V100 PCIe 32GB as sections of a probe, to be made ill by the tests.

Its parts have the shape of real output: windows at 56T as Aptio's factory settings give them, BARs of an lshw dump,
nvidia-smi's XML of a V100S cut to what is read.
"""

from __future__ import annotations

from laoka.host.report import HostReport, build
from laoka.host.sections import Section, Sections

GIB, MIB = 1 << 30, 1 << 20
WINDOW_START = 0x380000000000
KERNEL, OLD_KERNEL = "6.8.0-124-generic", "6.8.0-110-generic"
DRIVER = "580.173.02"
CARDS = {"0000:02:00.0": "0000:00:02.0", "0000:03:00.0": "0000:00:03.0"}
MEM32, MEM64PREF = 0x40200, 0x14220C
WINDOW32, WINDOW64 = 0x200200, 0x30220C | 0x100000


def resource_lines(bars: dict[int, tuple[int, int, int]], windows: tuple[tuple[int, int, int], ...] = ()) -> list[str]:
    """A `resource` file: six BARs and a ROM, then a bridge's windows (I/O, memory, prefetchable)."""
    rows = [(0, 0, 0)] * 7
    for index, (start, size, flags) in bars.items():
        rows[index] = (start, start + size - 1, flags)
    rows += [(0, 0, 0), *windows] if windows else []
    return [f"0x{start:016x} 0x{end:016x} 0x{flags:016x}" for start, end, flags in rows]


def card_bars(number: int, *, bar1: bool = True) -> dict[int, tuple[int, int, int]]:
    base = WINDOW_START + number * 64 * GIB
    bars = {0: (0xC8000000 + number * 0x2000000, 16 * MIB, MEM32), 3: (base + 32 * GIB, 32 * MIB, MEM64PREF)}
    if bar1:
        bars[1] = (base, 32 * GIB, MEM64PREF)
    return bars


def device_lines(address: str, **files: str | list[str]) -> str:
    rows = []
    for name, content in files.items():
        for line in content if isinstance(content, list) else [content]:
            rows.append(f"/sys/bus/pci/devices/{address}/{name.replace('__', '/')}:{line}")
    return "\n".join(rows)


def aer(corrected: int = 0, nonfatal: int = 0, fatal: int = 0) -> dict[str, list[str]]:
    return {
        "aer_dev_correctable": [f"RxErr {corrected}", "BadTLP 0", f"TOTAL_ERR_COR {corrected}"],
        "aer_dev_nonfatal": [f"TOTAL_ERR_NONFATAL {nonfatal}"],
        "aer_dev_fatal": [f"TOTAL_ERR_FATAL {fatal}"],
    }


def pci_attributes(
    *, bar1: bool = True, bridge_64bit: bool = True, speed: str = "8.0", width: int = 16, corrected: int = 0, device: str = "0x1db6"
) -> str:
    parts = []
    for number, (card, port) in enumerate(CARDS.items()):
        base = WINDOW_START + number * 64 * GIB
        high = (base, base + 48 * GIB - 1, WINDOW64) if bridge_64bit else (0xE0000000, 0xEFFFFFFF, 0x202208)
        windows = ((0xC8000000, 0xC9FFFFFF, WINDOW32), high)
        link = {"current_link_speed": f"{speed} GT/s PCIe", "current_link_width": str(width)}
        most = {"max_link_speed": "8.0 GT/s PCIe", "max_link_width": "16"}
        parts.append(
            device_lines(port, vendor="0x8086", device="0x6f04", **{"class": "0x060400"}, numa_node="0", enable="1",
                         resource=resource_lines({}, windows), **link, **most, **aer(corrected))
        )  # fmt: skip
        parts.append(
            device_lines(card, vendor="0x10de", device=device, **{"class": "0x030200"}, numa_node="0", enable="1",
                         resource=resource_lines(card_bars(number, bar1=bar1)), link__l1_aspm="0", **link, **most, **aer())
        )  # fmt: skip
    return "\n".join(parts)


def pci_links(driver: str | None = "nvidia") -> str:
    lines = ["total 0"]
    for card, port in CARDS.items():
        lines.append(f"lrwxrwxrwx 1 root root 0 Dec  1 04:59 {port} -> ../../../devices/pci0000:00/{port}")
        lines.append(f"lrwxrwxrwx 1 root root 0 Dec  1 04:59 {card} -> ../../../devices/pci0000:00/{port}/{card}")
        if driver:
            where = f"/sys/bus/pci/devices/{card}/driver"
            lines.append(f"lrwxrwxrwx 1 root root 0 Dec  1 04:59 {where} -> ../../../../bus/pci/drivers/{driver}")
    return "\n".join(lines)


IOMEM = f"""00000000-00000fff : Reserved
c8000000-fbffbfff : PCI Bus 0000:00
  c8000000-c8ffffff : PCI Bus 0000:02
{WINDOW_START:x}-{WINDOW_START + 256 * GIB - 1:x} : PCI Bus 0000:00
  {WINDOW_START:x}-{WINDOW_START + 48 * GIB - 1:x} : PCI Bus 0000:02"""

IOMEM_OFF = "00000000-00000fff : Reserved\nc8000000-fbffbfff : PCI Bus 0000:00"


def smi_gpu(address: str, *, memory_c: int = 60, core_c: int = 45, **values: str) -> str:
    told = {
        "persistence": "Enabled", "sbe": "0", "dbe": "0", "ecc": "Enabled", "pending": "No", "retired_sbe": "0", "retired_dbe": "0",
        "limit": "200.00 W", "draw": "30.00 W", "used": "2 MiB", "util": "0 %", "action": "None", "thermal": "Not Active",
        "brake": "Not Active", **values,
    }  # fmt: skip
    return f"""<gpu id="{address.replace("0000:", "00000000:", 1).upper()}">
<product_name>Tesla V100-PCIE-32GB</product_name><persistence_mode>{told["persistence"]}</persistence_mode>
<serial>1500000000000</serial><uuid>GPU-00000000-0000-0000-0000-000000000006</uuid>
<gpu_recovery_action>{told["action"]}</gpu_recovery_action>
<pci><pci_device_id>1DB610DE</pci_device_id><replay_counter>0</replay_counter></pci>
<clocks_event_reasons><clocks_event_reason_hw_thermal_slowdown>{told["thermal"]}</clocks_event_reason_hw_thermal_slowdown>
<clocks_event_reason_hw_power_brake_slowdown>{told["brake"]}</clocks_event_reason_hw_power_brake_slowdown></clocks_event_reasons>
<fb_memory_usage><total>32510 MiB</total><used>{told["used"]}</used></fb_memory_usage>
<bar1_memory_usage><total>32768 MiB</total></bar1_memory_usage><utilization><gpu_util>{told["util"]}</gpu_util></utilization>
<ecc_mode><current_ecc>{told["ecc"]}</current_ecc><pending_ecc>{told["ecc"]}</pending_ecc></ecc_mode>
<ecc_errors><volatile><single_bit><total>0</total></single_bit><double_bit><total>{told["dbe"]}</total></double_bit></volatile>
<aggregate><single_bit><total>{told["sbe"]}</total></single_bit><double_bit><total>{told["dbe"]}</total></double_bit></aggregate>
</ecc_errors>
<retired_pages><multiple_single_bit_retirement><retired_count>{told["retired_sbe"]}</retired_count></multiple_single_bit_retirement>
<double_bit_retirement><retired_count>{told["retired_dbe"]}</retired_count></double_bit_retirement>
<pending_retirement>{told["pending"]}</pending_retirement></retired_pages>
<temperature><gpu_temp>{core_c} C</gpu_temp><gpu_temp_slow_threshold>87 C</gpu_temp_slow_threshold>
<memory_temp>{memory_c} C</memory_temp><gpu_temp_max_mem_threshold>85 C</gpu_temp_max_mem_threshold></temperature>
<gpu_power_readings><instant_power_draw>{told["draw"]}</instant_power_draw><current_power_limit>{told["limit"]}</current_power_limit>
<default_power_limit>250.00 W</default_power_limit><max_power_limit>250.00 W</max_power_limit></gpu_power_readings></gpu>"""


def smi(*gpus: str) -> str:
    cards = gpus or tuple(smi_gpu(address) for address in CARDS)
    head = f"<driver_version>{DRIVER}</driver_version><cuda_version>13.0</cuda_version><attached_gpus>{len(cards)}</attached_gpus>"
    return f'<?xml version="1.0" ?>\n<nvidia_smi_log>{head}\n{"".join(cards)}\n</nvidia_smi_log>\n'


GRUB_MENU = f"""menuentry 'Ubuntu' --class ubuntu $menuentry_id_option 'gnulinux-simple-0aaa' {{
submenu 'Advanced options for Ubuntu' $menuentry_id_option 'gnulinux-advanced-0aaa' {{
\tmenuentry 'Ubuntu, with Linux {KERNEL}' --class ubuntu $menuentry_id_option 'gnulinux-{KERNEL}-advanced-0aaa' {{
\tmenuentry 'Ubuntu, with Linux {OLD_KERNEL}' --class ubuntu $menuentry_id_option 'gnulinux-{OLD_KERNEL}-advanced-0aaa' {{"""

HEALTHY: dict[str, str] = {
    "probe": "uid=0\nepoch_s=1796100000\nuptime_s=360000.00",
    "pci-attributes": pci_attributes(),
    "pci-links": pci_links(),
    "pci-config": "\n".join(f"{card} de 10 b6 1d" + " 00" * 60 for card in CARDS),
    "iomem": IOMEM,
    "processes": "1 S 0 3000 1 systemd\n900 S 1 9000 500 nvidia-persiste",
    "dmesg": "[    0.000000] Linux version 6.8.0\n[    5.48] pci_bus 0000:00: root bus resource [bus 00-7e]",
    "journal-kernel": "1796000000.000000 box kernel: Linux version 6.8.0",
    "boots": "0 abc",
    "journal-previous-boot": "1795990000.0 box systemd[1]: Reached target System Reboot.\n"
    "1795990001.0 box systemd-journald[2]: Journal stopped",
    "dmi": "/sys/class/dmi/id/board_vendor:MACHINIST\n/sys/class/dmi/id/board_name:X99 MD8\n"
    "/sys/class/dmi/id/bios_date:10/12/2024\n"
    "/sys/class/dmi/id/bios_version:5.11\n/sys/class/dmi/id/product_name: ",
    "efi": "efi=1\nsecure_boot=00",
    "secure-boot": "SecureBoot disabled",
    "virt": "vm=none\ncontainer=none",
    "uname": f"Linux box {KERNEL} #1 SMP PREEMPT_DYNAMIC x86_64 GNU/Linux",
    "os-release": 'PRETTY_NAME="Ubuntu 24.04.4 LTS"\nID=ubuntu\nVERSION_ID="24.04"',
    "cmdline": f"BOOT_IMAGE=/boot/vmlinuz-{KERNEL} root=UUID=0aaa ro quiet",
    "cpuinfo": "model name\t: Intel(R) Core(TM) i7-6950X\nphysical id\t: 0\nflags\t\t: fpu avx avx2\nthreads: 20",
    "meminfo": "MemTotal: 65536000 kB\nMemAvailable: 60000000 kB\nSwapTotal: 8388608 kB",
    "numa": "/sys/devices/system/node/node0/cpulist:0-19",
    "glibc": "glibc 2.39",
    "python": "/usr/bin/python3 Python 3.12.3\n/usr/bin/python3.12 Python 3.12.3",
    "compiler": "gcc (Ubuntu 13.3.0-6ubuntu2) 13.3.0",
    "boot-files": f"1795000000 70000000 /boot/initrd.img-{KERNEL}\n1790000000 40 /etc/modprobe.d/nouveau-blacklist.conf",
    "kernels": f"{OLD_KERNEL}\n{KERNEL}",
    "headers": f"{OLD_KERNEL}\n{KERNEL}",
    "modinfo": "\n".join(f"[{k}]\nversion: {DRIVER}\nlicense: NVIDIA\nsigner: DKMS" for k in (OLD_KERNEL, KERNEL)),
    "modules": "nvidia_uvm 1 0 - Live\nnvidia 1 1 nvidia_uvm, Live",
    "dkms-status": "\n".join(f"nvidia/{DRIVER}, {kernel}, x86_64: installed" for kernel in (OLD_KERNEL, KERNEL)),
    "dkms-failures": "",
    "modprobe": "/etc/modprobe.d/nouveau-blacklist.conf:blacklist nouveau",
    "grub": "/etc/default/grub:GRUB_DEFAULT=saved",
    "grubenv": f"# GRUB Environment Block\nsaved_entry=gnulinux-advanced-0aaa>gnulinux-{KERNEL}-advanced-0aaa",
    "grub-menu": GRUB_MENU,
    "nvidia-proc": f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {DRIVER}  Wed Jul  1 10:00:00 UTC 2026\nGCC version:  gcc 13",
    "nvidia-libraries": f"-rw-r--r-- 1 root root 1 Jan 1 00:00 /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{DRIVER}",
    "packages": f"nvidia-dkms-580-server {DRIVER}-0ubuntu1 hi  amd64\nlibnvidia-compute-580-server {DRIVER}-0ubuntu1 hi  amd64\n"
    "linux-image-generic 6.8.0-124.124 hi  amd64\nunattended-upgrades 2.9 ii  all",
    "holds": "libnvidia-compute-580-server hold\nlinux-image-generic hold\nnvidia-dkms-580-server hold",
    "apt-preferences": "/etc/apt/preferences.d/laoka:Package: nvidia-* libnvidia-*\n"
    "/etc/apt/preferences.d/laoka:Pin: version 580.*\n"
    "/etc/apt/preferences.d/laoka:Pin-Priority: 1001",
    "apt-sources": "",
    "apt-config": 'APT::Periodic::Unattended-Upgrade "1";\nUnattended-Upgrade::Package-Blacklist:: "nvidia";',
    "apt-policy": f"nvidia-dkms-580-server:\n  Installed: {DRIVER}-0ubuntu1\n  Candidate: {DRIVER}-0ubuntu1\n",
    "services": "Id=nvidia-persistenced.service\nLoadState=loaded\nActiveState=active\nUnitFileState=enabled\n",
    "failed-units": "",
    "disks": "Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/nvme0n1p2 976762584 100000000 800000000 12% /\n"
    "tmpfs 32768000 0 32768000 0% /dev/shm",
    "inodes": "Filesystem Inodes IUsed IFree IUse% Mounted on\n/dev/nvme0n1p2 60000000 1000000 59000000 2% /",
    "log-size": "300000\t/var/log",
    "journal-size": "Archived and active journals take up 200.0M in the file system.",
    "journald": "/etc/systemd/journald.conf:SystemMaxUse=1G",
    "rsyslog-filters": "",
    "installs": "",
    "hwmon": "/sys/class/hwmon/hwmon2/fan1_input:1500",
    "nvidia-smi-xml": smi(),
}


def sections(**changes: str | Section | None) -> Sections:
    """The healthy host's sections with some changed (underscores for dashes) or left out (None)."""
    texts: dict[str, str | Section | None] = {**HEALTHY, **{name.replace("_", "-"): text for name, text in changes.items()}}
    return Sections(
        {name: text if isinstance(text, Section) else Section(name, 0, text) for name, text in texts.items() if text is not None}
    )


def host(**changes: str | Section | None) -> HostReport:
    """The healthy host's report with some sections changed or left out."""
    return build(sections(**changes))
