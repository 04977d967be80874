"""Asks NVML once and prints JSON; always run as a child of its own: a wedged card makes any of these calls hang for ever.

A fresh process each time, on purpose: a long-lived one keeps the library it loaded, and would go on talking to the old kernel
module after an update that breaks every new program.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

if __name__ == "__main__":
    # pynvml imports find_library and calls it nowhere on Linux; what comes with it (shutil, subprocess, compressors) is a tenth or
    # more of what this child costs, twice a minute for ever.
    _unused = ModuleType("ctypes.util")
    vars(_unused)["find_library"] = lambda name: None
    sys.modules.setdefault("ctypes.util", _unused)

import pynvml

# Parts of NVML's interface by what we call them; each may be "not supported" on a card, which is no fault.
_THRESHOLDS = {
    "shutdown_c": pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN,
    "slowdown_c": pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
    "memory_max_c": pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX,
    "gpu_max_c": pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX,
}


def probe() -> dict[str, Any]:
    """What NVML says of the host and every card: `error` (number and words) when it does not start."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"error": error.value, "words": str(error)}
    try:
        count = pynvml.nvmlDeviceGetCount()
        return {"error": 0, "driver": _text(pynvml.nvmlSystemGetDriverVersion()), "cards": [_card(i) for i in range(count)]}
    except pynvml.NVMLError as error:
        return {"error": error.value, "words": str(error)}
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _card(index: int) -> dict[str, Any]:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as error:
        return {"index": index, "bdf": None, "lost": error.value == pynvml.NVML_ERROR_GPU_IS_LOST, "words": str(error)}
    faults: dict[str, int] = {}

    def ask(name: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_NOT_SUPPORTED:
                faults[name] = error.value
            return None

    info = ask("pci", lambda: pynvml.nvmlDeviceGetPciInfo(handle))
    memory = ask("memory_c", lambda: _memory_temperature(handle))
    found = {
        "index": index,
        "bdf": _text(info.busId) if info else None,
        "uuid": ask("uuid", lambda: _text(pynvml.nvmlDeviceGetUUID(handle))),
        "serial": ask("serial", lambda: _text(pynvml.nvmlDeviceGetSerial(handle))),
        "core_c": ask("core_c", lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        "memory_c": memory,
        "power_w": _watts(ask("power_w", lambda: pynvml.nvmlDeviceGetPowerUsage(handle))),
        "power_limit_w": _watts(ask("power_limit_w", lambda: pynvml.nvmlDeviceGetPowerManagementLimit(handle))),
        "throttle_reasons": ask("throttle_reasons", lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        "pages_pending": ask("pages_pending", lambda: pynvml.nvmlDeviceGetRetiredPagesPendingStatus(handle)),
        "pages_retired": ask("pages_retired", lambda: _retired(handle)),
        "ecc_uncorrected": ask(
            "ecc_uncorrected",
            lambda: pynvml.nvmlDeviceGetTotalEccErrors(handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC),
        ),
    }
    for name, threshold in _THRESHOLDS.items():
        found[name] = ask(name, partial(pynvml.nvmlDeviceGetTemperatureThreshold, handle, threshold))
    found["lost"] = pynvml.NVML_ERROR_GPU_IS_LOST in faults.values()
    found["faults"] = faults
    return found


def _memory_temperature(handle: Any) -> int | None:
    value = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_MEMORY_TEMP])[0]
    if value.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(value.nvmlReturn)
    return int(value.value.uiVal)


def _retired(handle: Any) -> int:
    causes = (
        pynvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
        pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
    )
    return sum(len(pynvml.nvmlDeviceGetRetiredPages(handle, cause)) for cause in causes)


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


if __name__ == "__main__":
    json.dump(probe(), sys.stdout)
