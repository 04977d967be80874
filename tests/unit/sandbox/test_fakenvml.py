"""The simulated NVML, compiled here and driven by nvidia-ml-py in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from laoka.sandbox import card, packages
from laoka.sandbox.lab import SandboxError

BDF = "0000:03:00.0"
DRIVER = "580.173.02"
DEADLINE_S = 20


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvml")
    packages.compile_nvml(folder / "libnvidia-ml.so.1", DRIVER)
    return folder


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    card.create(tmp_path, (card.v100_pcie_32gb(), card.v100_sxm2_16gb("0000:02:00.0", 2)))
    return tmp_path


PROLOGUE = """
import json, pynvml
from pynvml import *
def ask(call, *arguments, **named):
    try:
        return call(*arguments, **named)
    except NVMLError as error:
        return -error.value
"""


def start(library: Path, directory: Path, code: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "LAOKA_SANDBOX_GPU_CONF": str(directory / "gpu.conf")}
    return subprocess.Popen(
        [sys.executable, "-c", PROLOGUE + code],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ask(library: Path, directory: Path, code: str) -> object:
    """Run `code` in a process that has nvidia-ml-py imported; it prints one JSON value. Errors of NVML are negative codes."""
    process = start(library, directory, code)
    try:
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    return json.loads(stdout)


def test_the_whole_card(library: Path, directory: Path) -> None:
    answers = ask(
        library,
        directory,
        """
nvmlInit()
h = nvmlDeviceGetHandleByIndex(0)
pci = nvmlDeviceGetPciInfo(h)
memory, memory2 = nvmlDeviceGetMemoryInfo(h), nvmlDeviceGetMemoryInfo(h, version=nvmlMemory_v2)
bar1 = nvmlDeviceGetBAR1MemoryInfo(h)
util = nvmlDeviceGetUtilizationRates(h)
print(json.dumps(dict(
    driver=nvmlSystemGetDriverVersion(), nvml=nvmlSystemGetNVMLVersion(), cuda=nvmlSystemGetCudaDriverVersion(),
    count=nvmlDeviceGetCount(), name=nvmlDeviceGetName(h), serial=nvmlDeviceGetSerial(h), uuid=nvmlDeviceGetUUID(h),
    index=nvmlDeviceGetIndex(h), minor=nvmlDeviceGetMinorNumber(h), vbios=nvmlDeviceGetVbiosVersion(h),
    pci=[pci.busId, pci.busIdLegacy, pci.domain, pci.bus, pci.device, pci.pciDeviceId, pci.pciSubSystemId],
    total=memory.total, free=memory.free, used=memory.used, total2=memory2.total, free2=memory2.free, bar1=bar1.bar1Total,
    temperature=nvmlDeviceGetTemperature(h, 0), temperature_v=nvmlDeviceGetTemperatureV(h, 0),
    thresholds=[nvmlDeviceGetTemperatureThreshold(h, kind) for kind in range(4)],
    memory_temperature=nvmlDeviceGetFieldValues(h, [NVML_FI_DEV_MEMORY_TEMP])[0].value.uiVal,
    power=nvmlDeviceGetPowerUsage(h), limit=nvmlDeviceGetPowerManagementLimit(h), enforced=nvmlDeviceGetEnforcedPowerLimit(h),
    default=nvmlDeviceGetPowerManagementDefaultLimit(h), constraints=nvmlDeviceGetPowerManagementLimitConstraints(h),
    persistence=nvmlDeviceGetPersistenceMode(h), compute_mode=nvmlDeviceGetComputeMode(h),
    link=[nvmlDeviceGetCurrPcieLinkGeneration(h), nvmlDeviceGetCurrPcieLinkWidth(h), nvmlDeviceGetMaxPcieLinkGeneration(h),
          nvmlDeviceGetMaxPcieLinkWidth(h)],
    ecc=nvmlDeviceGetEccMode(h), errors=[nvmlDeviceGetTotalEccErrors(h, t, c) for t in (0, 1) for c in (0, 1)],
    device_memory=nvmlDeviceGetMemoryErrorCounter(h, 1, 1, 2),
    retired=[nvmlDeviceGetRetiredPages(h, cause) for cause in (0, 1)], pending=nvmlDeviceGetRetiredPagesPendingStatus(h),
    reasons=[nvmlDeviceGetCurrentClocksThrottleReasons(h), nvmlDeviceGetCurrentClocksEventReasons(h)],
    clocks=[nvmlDeviceGetClockInfo(h, kind) for kind in range(4)], max_sm=nvmlDeviceGetMaxClockInfo(h, 1),
    utilization=[util.gpu, util.memory],
    processes=[nvmlDeviceGetComputeRunningProcesses(h), nvmlDeviceGetGraphicsRunningProcesses(h)],
    capability=nvmlDeviceGetCudaComputeCapability(h), architecture=nvmlDeviceGetArchitecture(h), brand=nvmlDeviceGetBrand(h),
    by_uuid=nvmlDeviceGetIndex(nvmlDeviceGetHandleByUUID(nvmlDeviceGetUUID(h))),
    by_bus=[nvmlDeviceGetIndex(nvmlDeviceGetHandleByPciBusId(b)) for b in ("0000:03:00.0", "00000000:02:00.0", "03:00.0")],
    by_serial=nvmlDeviceGetIndex(nvmlDeviceGetHandleBySerial(nvmlDeviceGetSerial(h))),
)))
""",
    )
    mib = 1024**2
    assert answers == {
        "driver": DRIVER,
        "nvml": f"13.{DRIVER}",
        "cuda": 13000,
        "count": 2,
        "name": "Tesla V100-PCIE-32GB",
        "serial": "1500000000001",
        "uuid": "GPU-00000000-5a1d-4000-8000-000000000001",
        "index": 0,
        "minor": 0,
        "vbios": "88.00.7E.00.03",
        "pci": ["00000000:03:00.0", "0000:03:00.0", 0, 3, 0, 0x1DB610DE, 0x124A10DE],
        "total": 32510 * mib,
        "free": 32510 * mib,
        "used": 0,
        "total2": 32510 * mib,
        "free2": 32510 * mib,
        "bar1": 32768 * mib,
        "temperature": 29,
        "temperature_v": 29,
        "thresholds": [90, 87, 85, 83],
        "memory_temperature": 29,
        "power": 25130,
        "limit": 250000,
        "enforced": 250000,
        "default": 250000,
        "constraints": [100000, 250000],
        "persistence": pynvml.NVML_FEATURE_DISABLED,
        "compute_mode": pynvml.NVML_COMPUTEMODE_DEFAULT,
        "link": [3, 16, 3, 16],
        "ecc": [1, 1],
        "errors": [0, 0, 0, 0],
        "device_memory": 0,
        "retired": [[], []],
        "pending": 0,
        "reasons": [pynvml.nvmlClocksEventReasonGpuIdle] * 2,
        "clocks": [135, 135, 877, 555],
        "max_sm": 1380,
        "utilization": [0, 0],
        "processes": [[], []],
        "capability": [7, 0],
        "architecture": pynvml.NVML_DEVICE_ARCH_VOLTA,
        "brand": pynvml.NVML_BRAND_TESLA,
        "by_uuid": 0,
        "by_bus": [0, 1, 0],
        "by_serial": 0,
    }


def test_what_a_v100_does_not_have_is_not_supported(library: Path, directory: Path) -> None:
    codes = ask(
        library,
        directory,
        """
nvmlInit()
h, sxm2 = nvmlDeviceGetHandleByIndex(0), nvmlDeviceGetHandleByIndex(1)
print(json.dumps([ask(nvmlDeviceGetFanSpeed, h), ask(nvmlDeviceGetMigMode, h), ask(nvmlDeviceGetRemappedRows, h),
    ask(nvmlDeviceGetNvLinkState, h, 0), ask(nvmlDeviceGetGspFirmwareVersion, h), ask(nvmlDeviceGetTemperatureThreshold, sxm2, 0),
    nvmlDeviceGetFieldValues(h, [9999])[0].nvmlReturn * -1]))
""",
    )
    assert codes == [-pynvml.NVML_ERROR_NOT_SUPPORTED] * 7


def test_wrong_arguments_are_refused(library: Path, directory: Path) -> None:
    codes = ask(
        library,
        directory,
        """
before = ask(nvmlDeviceGetCount)
nvmlInit()
h = nvmlDeviceGetHandleByIndex(0)
old = c_nvmlMemory_v2_t(); old.version = 1
print(json.dumps([before, ask(nvmlDeviceGetHandleByIndex, 2), ask(nvmlDeviceGetHandleByUUID, "GPU-x"),
    ask(nvmlDeviceGetHandleByPciBusId, "0000:09:00.0"), ask(nvmlDeviceGetHandleByPciBusId, "nonsense"),
    ask(nvmlDeviceGetMemoryInfo, h, version=1), ask(nvmlDeviceGetTotalEccErrors, h, 7, 0), ask(nvmlDeviceGetTemperature, h, 5)]))
""",
    )
    assert codes == [
        -pynvml.NVML_ERROR_UNINITIALIZED,
        -pynvml.NVML_ERROR_INVALID_ARGUMENT,
        -pynvml.NVML_ERROR_NOT_FOUND,
        -pynvml.NVML_ERROR_NOT_FOUND,
        -pynvml.NVML_ERROR_INVALID_ARGUMENT,
        -pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        -pynvml.NVML_ERROR_INVALID_ARGUMENT,
        -pynvml.NVML_ERROR_INVALID_ARGUMENT,
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="setting a power limit needs root; the refusal to others is tested below")
def test_a_power_limit_is_kept_in_gpu_conf(library: Path, directory: Path) -> None:
    codes = ask(
        library,
        directory,
        """
nvmlInit()
h = nvmlDeviceGetHandleByIndex(1)
print(json.dumps([ask(nvmlDeviceSetPowerManagementLimit, h, 149999), ask(nvmlDeviceSetPowerManagementLimit, h, 300001),
    ask(nvmlDeviceSetPowerManagementLimit, h, 200000), nvmlDeviceGetPowerManagementLimit(h),
    nvmlDeviceGetPowerManagementDefaultLimit(h),
    ask(nvmlDeviceSetPersistenceMode, h, 1), nvmlDeviceGetPersistenceMode(h)]))
""",
    )
    invalid = -pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert codes == [invalid, invalid, None, 200000, 300000, None, 1]
    settings = card.parse_conf((directory / "gpu.conf").read_text())
    assert settings["gpu1.power_limit_mw"] == "200000"
    assert settings["gpu1.persistence"] == "1"
    assert settings["gpu0.power_limit_mw"] == "250000"
    assert (directory / "gpu.conf").read_text().startswith("# ")
    assert not list(directory.glob(".gpu.conf*"))


def test_an_ordinary_user_may_not_set_a_power_limit(library: Path, directory: Path) -> None:
    directory.chmod(0o755)
    before = (directory / "gpu.conf").read_text()
    code = f"""
import os
pynvml._LoadNvmlLibrary()
os.chdir({str(directory)!r})
if os.geteuid() == 0:
    os.setuid(65534)
os.environ["LAOKA_SANDBOX_GPU_CONF"] = "gpu.conf"  # the folders above are closed to this user
nvmlInit()
h = nvmlDeviceGetHandleByIndex(0)
print(json.dumps([ask(nvmlDeviceSetPowerManagementLimit, h, 200000), ask(nvmlDeviceSetPersistenceMode, h, 1)]))
"""
    assert ask(library, directory, code) == [-pynvml.NVML_ERROR_NO_PERMISSION] * 2
    assert (directory / "gpu.conf").read_text() == before


def test_changes_outside_show_on_the_next_call(library: Path, directory: Path) -> None:
    process = start(
        library,
        directory,
        """
import sys
nvmlInit()
h = nvmlDeviceGetHandleByIndex(0)
for line in sys.stdin:
    print(json.dumps([ask(nvmlDeviceGetTemperature, h, 0), ask(nvmlDeviceGetCurrPcieLinkWidth, h), ask(nvmlDeviceGetName, h),
        ask(nvmlDeviceGetCurrentClocksEventReasons, h)]), flush=True)
""",
    )
    assert process.stdin and process.stdout

    def now() -> list[object]:
        assert process.stdin and process.stdout
        process.stdin.write("\n")
        process.stdin.flush()
        answer: list[object] = json.loads(process.stdout.readline())
        return answer

    lost = -pynvml.NVML_ERROR_GPU_IS_LOST
    try:
        assert now() == [29, 16, "Tesla V100-PCIE-32GB", 1]
        card.set_value(directory, "gpu0.temperature_c", 64)
        (directory / f"sys/bus/pci/devices/{BDF}/current_link_width").write_text("8\n")
        assert now() == [64, 8, "Tesla V100-PCIE-32GB", 1]
        card.apply_fault(directory, "hot", BDF)
        assert now() == [78, 8, "Tesla V100-PCIE-32GB", pynvml.nvmlClocksEventReasonSwThermalSlowdown]
        card.apply_fault(directory, "card-gone", BDF)
        assert now() == [lost] * 4
        card.clear_fault(directory, "card-gone", BDF)
        card.clear_fault(directory, "hot", BDF)
        assert now() == [64, 8, "Tesla V100-PCIE-32GB", 1]
    finally:
        process.kill()
        process.communicate()


OPEN_BOTH = """
nvmlInit()
opened = []
for i in range(nvmlDeviceGetCount()):
    try:
        h = nvmlDeviceGetHandleByIndex(i)
        opened.append([nvmlDeviceGetIndex(h), ask(nvmlDeviceGetPowerUsage, h)])
    except NVMLError as error:
        opened.append(-error.value)
print(json.dumps(opened))
"""


def test_a_gone_card_does_not_open_and_the_other_keeps_its_index(library: Path, directory: Path) -> None:
    card.apply_fault(directory, "card-gone", BDF)
    assert ask(library, directory, OPEN_BOTH) == [-pynvml.NVML_ERROR_GPU_IS_LOST, [1, 43000]]


def test_an_off_bus_card_opens_but_is_lost_when_asked(library: Path, directory: Path) -> None:
    card.apply_fault(directory, "off-bus", BDF)
    assert ask(library, directory, OPEN_BOTH) == [[0, -pynvml.NVML_ERROR_GPU_IS_LOST], [1, 43000]]


def test_pages_that_wait_for_retirement(library: Path, directory: Path) -> None:
    card.apply_fault(directory, "ecc-pending", BDF, pages=3)
    code = """
nvmlInit()
h = nvmlDeviceGetHandleByIndex(0)
fields = nvmlDeviceGetFieldValues(h, [NVML_FI_DEV_RETIRED_SBE, NVML_FI_DEV_RETIRED_DBE, NVML_FI_DEV_RETIRED_PENDING])
print(json.dumps([nvmlDeviceGetRetiredPages(h, 0), nvmlDeviceGetRetiredPages(h, 1), nvmlDeviceGetRetiredPagesPendingStatus(h),
    [field.value.uiVal for field in fields]]))
"""
    assert ask(library, directory, code) == [[0x3FDF5E, 0x3FDF5F, 0x3FDF60], [], 1, [3, 0, 1]]


INIT = "print(json.dumps([ask(nvmlInit), ask(nvmlDeviceGetCount)]))"


def test_driver_mismatch_is_error_18(library: Path, directory: Path) -> None:
    card.apply_fault(directory, "driver-mismatch", BDF)
    assert ask(library, directory, INIT) == [-pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, -pynvml.NVML_ERROR_UNINITIALIZED]
    card.apply_fault(directory, "driver-mismatch", BDF, loaded_module=DRIVER)
    assert ask(library, directory, INIT) == [None, 2]


def test_a_driver_that_can_not_load_is_error_9(library: Path, tmp_path: Path) -> None:
    card.create(tmp_path / "off", (card.v100_pcie_32gb(),), bar_above_4g=False)
    for directory in (tmp_path / "off", tmp_path / "no card at all"):
        assert ask(library, directory, INIT)[0] == -pynvml.NVML_ERROR_DRIVER_NOT_LOADED  # type: ignore[index]


def test_a_branch_above_580_ignores_the_card(tmp_path: Path, directory: Path) -> None:
    folder = tmp_path / "595"
    folder.mkdir()
    packages.compile_nvml(folder / "libnvidia-ml.so.1", "595.71.03")
    assert ask(folder, directory, INIT) == [None, 0]


def test_a_hung_driver_blocks_every_caller_until_it_is_cleared(library: Path, directory: Path) -> None:
    process = start(
        library,
        directory,
        """
import sys
nvmlInit()
h = nvmlDeviceGetHandleByIndex(0)
print("ready", flush=True)
sys.stdin.readline()
print(nvmlDeviceGetTemperature(h, 0), flush=True)
""",
    )
    other = None
    try:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "ready\n"
        card.apply_fault(directory, "nvml-hung", BDF)
        process.stdin.write("\n")
        process.stdin.flush()
        other = start(library, directory, "nvmlInit()")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
        other.kill()  # a simulated hang can be killed; a process in D state can not
        assert other.wait(DEADLINE_S) == -9
        card.clear_fault(directory, "nvml-hung", BDF)
        assert process.communicate(timeout=DEADLINE_S)[0] == "29\n"
        assert process.returncode == 0
    finally:
        for running in filter(None, (process, other)):
            running.kill()
            running.communicate()


def test_the_library_has_its_real_name_inside(library: Path) -> None:
    listing = subprocess.run(["readelf", "-d", library / "libnvidia-ml.so.1"], capture_output=True, text=True, check=True).stdout
    assert "Library soname: [libnvidia-ml.so.1]" in listing


def test_a_missing_compiler_is_an_error_with_the_command_that_helps(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="apt-get install gcc libc6-dev"):
        packages.compile_nvml(tmp_path / "x.so", DRIVER, gcc="no-such-gcc")
