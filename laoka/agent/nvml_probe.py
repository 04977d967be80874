"""Asks NVML, each time in a child that it forks: a wedged card makes any of these calls hang for ever.

For each deadline (seconds) on a line of its standard input it prints one line of JSON, and ends when its input ends. It never calls
NVML itself: the library is loaded by the child, afresh each time, because one that was loaded before goes on talking to the old
kernel module after an update that breaks every new program. Forking saves the start of Python and of pynvml, which is twenty times
what the questions cost, twice a minute for ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

if __name__ == "__main__":
    # pynvml imports find_library and calls it nowhere on Linux; what comes with it (shutil, subprocess, compressors) would stay in
    # memory for ever.
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


KILL_WAIT_S = 2.0


@dataclass
class Asker:
    """Asks by a child that has a deadline, at most one at a time. `hung` are children that did not die of SIGKILL (they hang in the
    driver, in D state): they are left alone and counted, and no other is started until they are gone: each would hang as well.
    """

    probe: Callable[[], dict[str, Any]]
    hung: list[int] = field(default_factory=list)

    def ask(self, deadline_s: float) -> dict[str, Any]:
        """The child's answer; {"hung": N} when it did not come in time, {"broken": why} when it was none."""
        self.hung = [pid for pid in self.hung if not _gone(pid)]
        if self.hung:
            return {"hung": len(self.hung)}
        # A file, not a pipe: a child in D state would keep a pipe open for ever.
        out = os.memfd_create("nvml")
        pid = os.fork()
        if pid == 0:
            _child(self.probe, out)
        with os.fdopen(out, "rb") as answer:
            child = os.pidfd_open(pid)
            try:
                if not select.select([child], [], [], deadline_s)[0]:
                    os.kill(pid, signal.SIGKILL)
                    if select.select([child], [], [], KILL_WAIT_S)[0]:
                        os.waitpid(pid, 0)
                    else:
                        self.hung.append(pid)
                    return {"hung": len(self.hung)}
            finally:
                os.close(child)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            answer.seek(0)
            try:
                found = json.loads(answer.read())
            except ValueError:
                found = None
        return found if isinstance(found, dict) else {"broken": f"the NVML child ended with status {status} and no answer"}


def _child(probe: Callable[[], dict[str, Any]], out: int) -> NoReturn:
    """The child: writes its answer and ends, whatever happens."""
    status = 1
    try:
        os.setsid()
        # The pipes to the watchdog are not the child's: one that hangs would keep them open.
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        os.write(out, json.dumps(probe()).encode())
        status = 0
    finally:
        os._exit(status)


def _gone(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG)[0] != 0


def main() -> None:
    """An answer for every deadline until the input ends."""
    asker = Asker(probe)
    for line in sys.stdin:
        print(json.dumps(asker.ask(float(line))), flush=True)


if __name__ == "__main__":
    main()
