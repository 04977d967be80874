"""The simulated nvidia-smi: every mode and every fault, against the shapes and words of the real tool."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest

from laoka.sandbox import card, packages

BDF = "0000:03:00.0"
DRIVER = "580.173.02"
DEADLINE_S = 20


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library and the tool as the packages ship them."""
    folder = tmp_path_factory.mktemp("smi")
    packages.compile_nvml(folder / "libnvidia-ml.so.1", DRIVER)
    (folder / "nvidia-smi").write_text(packages.smi_text())
    (folder / "nvidia-smi").chmod(0o755)
    return folder


@dataclass(frozen=True)
class Smi:
    installed: Path
    directory: Path

    def popen(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.installed),
            "LAOKA_SANDBOX_GPU_CONF": str(self.directory / "gpu.conf"),
        }
        command = [str(self.installed / "nvidia-smi"), *arguments]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def __call__(self, *arguments: str, status: int = 0) -> str:
        """Standard output; the exit status has to be `status`."""
        stdout, _ = self.both(*arguments, status=status)
        return stdout

    def both(self, *arguments: str, status: int = 0) -> tuple[str, str]:
        process = self.popen(*arguments)
        try:
            stdout, stderr = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
        assert process.returncode == status, stdout + stderr
        assert "Traceback" not in stderr
        return stdout, stderr

    def query(self, fields: str, *formats: str, status: int = 0) -> list[list[str]]:
        text = self(f"--query-gpu={fields}", f"--format={','.join(('csv', 'noheader', *formats))}", status=status)
        return list(csv.reader(text.splitlines(), skipinitialspace=True))


@pytest.fixture
def smi(installed: Path, tmp_path: Path) -> Smi:
    card.create(tmp_path, (card.v100_pcie_32gb(),))
    return Smi(installed, tmp_path)


@pytest.fixture
def two(installed: Path, tmp_path: Path) -> Smi:
    card.create(tmp_path, (card.v100_pcie_32gb(), card.v100_sxm2_16gb("0000:02:00.0", 2)))
    return Smi(installed, tmp_path)


# ---- modes


def test_list(two: Smi) -> None:
    assert two("-L").splitlines() == [
        "GPU 0: Tesla V100-PCIE-32GB (UUID: GPU-00000000-5a1d-4000-8000-000000000001)",
        "GPU 1: Tesla V100-SXM2-16GB (UUID: GPU-00000000-5a1d-4000-9000-000000000002)",
    ]


def test_nobody_can_mistake_it_for_the_real_tool(smi: Smi) -> None:
    for arguments in (("--version",), ("--help",), (), ("-q",), ("-q", "-x")):
        assert "simulated by laoka's sandbox" in "\n".join(smi(*arguments).splitlines()[:4]), arguments
    assert smi("--version").splitlines() == [
        "simulated by laoka's sandbox",
        "NVIDIA-SMI version  : 580.173.02",
        "NVML version        : 580.173",
        "DRIVER version      : 580.173.02",
        "CUDA Version        : 13.0",
    ]


def test_table(smi: Smi) -> None:
    lines = smi().splitlines()
    assert {len(line) for line in lines[1:] if line} == {91}
    assert "| NVIDIA-SMI 580.173.02             Driver Version: 580.173.02     CUDA Version: 13.0     |" in lines
    assert "|   0  Tesla V100-PCIE-32GB           Off |   00000000:03:00.0 Off |                    0 |" in lines
    assert "| N/A   29C    P0             25W /  250W |       0MiB /  32510MiB |      0%      Default |" in lines
    assert "|  No running processes found                                                             |" in lines


# Lines of a real V100 (driver 470) and a real card of driver 580; only values and indents differ.
Q_LINES = """
    Product Name                                       : Tesla V100-PCIE-32GB
    Product Brand                                      : Tesla
    Persistence Mode                                   : Disabled
        Current                                        : N/A
    Serial Number                                      : 1500000000001
    Minor Number                                       : 0
    VBIOS Version                                      : 88.00.7E.00.03
    Board Part Number                                  : 900-2G500-0110-030
        Image Version                                  : G500.0202.00.02
    GPU Recovery Action                                : None
        Bus                                            : 0x03
        Device Id                                      : 0x1DB610DE
        Bus Id                                         : 00000000:03:00.0
        Sub System Id                                  : 0x124A10DE
                Max                                    : 3
                Max                                    : 16x
        Replays Since Reset                            : 0
    Fan Speed                                          : N/A
    Performance State                                  : P0
    Clocks Event Reasons
        Idle                                           : Active
            HW Thermal Slowdown                        : Not Active
        Total                                          : 32510 MiB
        Total                                          : 32768 MiB
    ECC Mode
                CBU                                    : 0
        Single Bit ECC                                 : 0
        Pending Page Blacklist                         : No
    Remapped Rows                                      : N/A
        GPU Current Temp                               : 29 C
        GPU Shutdown Temp                              : 90 C
        GPU Slowdown Temp                              : 87 C
        GPU Max Operating Temp                         : 83 C
        Memory Max Operating Temp                      : 85 C
    GPU Power Readings
        Average Power Draw                             : 25.13 W
        Current Power Limit                            : 250.00 W
        Min Power Limit                                : 100.00 W
        SM                                             : 1380 MHz
        Memory                                         : 877 MHz
    Processes                                          : None
"""


def test_full_query(smi: Smi) -> None:
    lines = smi("-q").splitlines()
    assert [line for line in Q_LINES.strip("\n").splitlines() if line not in lines] == []
    assert "GPU 00000000:03:00.0" in lines
    assert "Driver Version                                         : 580.173.02" in lines


def test_xml_has_the_elements_that_readers_use(smi: Smi) -> None:
    root = ElementTree.fromstring(smi("-q", "-x"))
    expected = {
        "driver_version": DRIVER,
        "attached_gpus": "1",
        "gpu/product_name": "Tesla V100-PCIE-32GB",
        "gpu/persistence_mode": "Disabled",
        "gpu/uuid": "GPU-00000000-5a1d-4000-8000-000000000001",
        "gpu/pci/pci_device_id": "1DB610DE",
        "gpu/pci/pci_bus_id": "00000000:03:00.0",
        "gpu/pci/pci_gpu_link_info/pcie_gen/current_link_gen": "3",
        "gpu/pci/pci_gpu_link_info/link_widths/current_link_width": "16x",
        "gpu/clocks_event_reasons/clocks_event_reason_gpu_idle": "Active",
        "gpu/fb_memory_usage/total": "32510 MiB",
        "gpu/bar1_memory_usage/total": "32768 MiB",
        "gpu/ecc_errors/volatile/double_bit/total": "0",
        "gpu/retired_pages/double_bit_retirement/retired_count": "0",
        "gpu/retired_pages/pending_retirement": "No",
        "gpu/remapped_rows": "N/A",
        "gpu/temperature/memory_temp": "29 C",
        "gpu/temperature/gpu_temp_max_mem_threshold": "85 C",
        "gpu/gpu_power_readings/max_power_limit": "250.00 W",
        "gpu/max_clocks/sm_clock": "1380 MHz",
    }
    assert {path: root.findtext(path) for path in expected} == expected
    gpu = root.find("gpu")
    assert gpu is not None and gpu.get("id") == "00000000:03:00.0"


FIELDS = {
    "index": "0",
    "name": "Tesla V100-PCIE-32GB",
    "uuid": "GPU-00000000-5a1d-4000-8000-000000000001",
    "serial": "1500000000001",
    "pci.bus_id": "00000000:03:00.0",
    "driver_version": DRIVER,
    "memory.total": "32510",
    "memory.used": "0",
    "memory.free": "32510",
    "temperature.gpu": "29",
    "temperature.memory": "29",
    "power.draw": "25.13",
    "power.limit": "250.00",
    "power.default_limit": "250.00",
    "power.min_limit": "100.00",
    "power.max_limit": "250.00",
    "persistence_mode": "Disabled",
    "pcie.link.gen.current": "3",
    "pcie.link.gen.max": "3",
    "pcie.link.width.current": "16",
    "pcie.link.width.max": "16",
    "ecc.mode.current": "Enabled",
    "ecc.errors.corrected.volatile.total": "0",
    "ecc.errors.uncorrected.aggregate.device_memory": "0",
    "retired_pages.single_bit_ecc.count": "0",
    "retired_pages.double_bit.count": "0",
    "retired_pages.pending": "No",
    "clocks_event_reasons.active": "0x0000000000000001",
    "clocks_throttle_reasons.gpu_idle": "Active",
    "clocks_throttle_reasons.hw_thermal_slowdown": "Not Active",
    "compute_cap": "7.0",
    "compute_mode": "Default",
    "fan.speed": "[N/A]",
    "mig.mode.current": "[N/A]",
    "gpu_recovery_action": "None",
    "pstate": "P0",
    "clocks.sm": "135",
    "clocks.max.mem": "877",
    "utilization.gpu": "0",
}


def test_query_fields(smi: Smi) -> None:
    (values,) = smi.query(",".join(FIELDS), "nounits")
    assert dict(zip(FIELDS, values, strict=True)) == FIELDS


def test_query_header_and_units(smi: Smi) -> None:
    text = smi("--query-gpu=gpu_name,memory.total,power.limit,clocks_throttle_reasons.active,timestamp", "--format=csv")
    header, row = text.splitlines()
    assert header == "name, memory.total [MiB], power.limit [W], clocks_event_reasons.active, timestamp"
    assert re.fullmatch(r"Tesla V100-PCIE-32GB, 32510 MiB, 250\.00 W, 0x0+1, \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{3}", row)


def test_a_field_that_does_not_exist(smi: Smi) -> None:
    assert smi("--query-gpu=index,colour", "--format=csv", status=2) == 'Field "colour" is not a valid field to query.\n\n'


def test_wrong_use(smi: Smi) -> None:
    assert "csv" in smi("--query-gpu=index", status=2)
    assert "Invalid combination of input arguments" in smi("--no-such-option", status=2)
    assert smi("-i", "7", "-L", status=6) == "No devices were found\n"


@pytest.mark.parametrize("which", ["1", "0000:02:00.0", "00000000:02:00.0", "GPU-00000000-5a1d-4000-9000-000000000002"])
def test_one_card_by_index_bus_id_or_uuid(two: Smi, which: str) -> None:
    text = two("-i", which, "--query-gpu=index", "--format=csv,noheader")
    assert text == "1\n"


# ---- settings


def may_set() -> bool:
    return os.geteuid() == 0


def test_power_limit(smi: Smi) -> None:
    done = smi("-pl", "175", status=0 if may_set() else 4)
    if not may_set():
        assert "Insufficient Permissions" in done
        return
    assert done.splitlines()[0] == "Power limit for GPU 00000000:03:00.0 was set to 175.00 W from 250.00 W."
    assert done.splitlines()[-1] == "All done."
    assert smi.query("power.limit,enforced.power.limit,power.default_limit", "nounits") == [["175.00", "175.00", "250.00"]]


@pytest.mark.parametrize("watts", ["99", "251"])
def test_power_limit_out_of_range(smi: Smi, watts: str) -> None:
    assert smi("-pl", watts, status=2).splitlines() == [
        f"Provided power limit {watts}.00 W is not a valid power limit which should be between 100.00 W and 250.00 W "
        "for GPU 00000000:03:00.0",
        "Terminating early due to previous errors.",
    ]
    assert smi.query("power.limit", "nounits") == [["250.00"]]


def test_persistence_mode(smi: Smi) -> None:
    first = smi("-pm", "1", status=0 if may_set() else 4)
    if not may_set():
        assert "Insufficient Permissions" in first
        return
    assert first == "Enabled persistence mode for GPU 00000000:03:00.0.\nAll done.\n"
    assert smi("-pm", "1") == "Persistence mode is already Enabled for GPU 00000000:03:00.0.\nAll done.\n"
    assert smi.query("persistence_mode") == [["Enabled"]]
    assert smi("-pm", "0").startswith("Disabled persistence mode")


# ---- faults


def test_gone_card_leaves_a_gap_in_the_list(two: Smi) -> None:
    card.apply_fault(two.directory, "card-gone", BDF)
    stdout, stderr = two.both("--query-gpu=index,name", "--format=csv,noheader", status=15)
    assert stdout == "1, Tesla V100-SXM2-16GB\n"
    assert stderr == (
        "Unable to determine the device handle for GPU0: 0000:03:00.0: GPU is lost.  Reboot the system to recover this GPU\n"
    )


def test_off_bus_card_shows_err(two: Smi) -> None:
    card.apply_fault(two.directory, "off-bus", BDF)
    table = two()
    assert "|   0  ERR!                           ERR!|   00000000:03:00.0 Off |                 ERR! |" in table
    assert "|ERR!  ERR!  ERR!" in table
    assert "|   1  Tesla V100-SXM2-16GB" in table
    assert two.query("index,pci.bus_id,temperature.gpu")[0] == ["0", "00000000:03:00.0", "[GPU is lost]"]
    assert "    Product Name                                       : GPU is lost" in two("-q").splitlines()


def test_driver_mismatch(smi: Smi) -> None:
    card.apply_fault(smi.directory, "driver-mismatch", BDF)
    assert smi(status=18) == "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.173\n"


def test_driver_not_loaded(smi: Smi) -> None:
    card.set_value(smi.directory, "driver_loaded", 0)
    for arguments in ((), ("-L",), ("-q",)):
        assert smi(*arguments, status=9).startswith(
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest"
        )


def test_no_library(smi: Smi, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(smi.installed / "nvidia-smi", alone)
    assert Smi(alone, smi.directory)(status=12).startswith("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.")


def test_no_card(installed: Path, tmp_path: Path) -> None:
    card.create(tmp_path, ())
    assert Smi(installed, tmp_path)(status=6) == "No devices were found\n"


def test_hot_card(smi: Smi) -> None:
    card.apply_fault(smi.directory, "hot", BDF)
    fields = "temperature.memory,clocks_throttle_reasons.sw_thermal_slowdown,clocks_throttle_reasons.active"
    assert smi.query(fields) == [["92", "Active", "0x0000000000000020"]]


def test_pages_wait_for_retirement(smi: Smi) -> None:
    card.apply_fault(smi.directory, "ecc-pending", BDF)
    assert smi.query("retired_pages.sbe,retired_pages.dbe,retired_pages.pending") == [["1", "0", "Yes"]]
    assert "        Pending Page Blacklist                         : Yes" in smi("-q").splitlines()
    retired = ElementTree.fromstring(smi("-q", "-x")).find("gpu/retired_pages/multiple_single_bit_retirement")
    assert retired is not None
    assert retired.findtext("retired_pagelist/retired_page_address") == "0x00000000003fdf5e"


def test_hung_until_cleared_or_killed(smi: Smi) -> None:
    card.apply_fault(smi.directory, "nvml-hung", BDF)
    waits, dies = smi.popen("-L"), smi.popen()
    try:
        for process in (waits, dies):
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.7)
        dies.kill()
        assert dies.wait(DEADLINE_S) == -9
        card.clear_fault(smi.directory, "nvml-hung", BDF)
        assert waits.communicate(timeout=DEADLINE_S)[0].startswith("GPU 0: Tesla V100-PCIE-32GB")
        assert waits.returncode == 0
    finally:
        for process in (waits, dies):
            process.kill()
            process.communicate()


def test_a_closed_pipe_is_no_traceback(smi: Smi) -> None:
    process = smi.popen("-q")
    assert process.stdout and process.stderr
    process.stdout.close()
    assert process.stderr.read() == ""
    process.wait(DEADLINE_S)
