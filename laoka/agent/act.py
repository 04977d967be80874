"""One step of the ladder, done and verified in a process of its own: python -m laoka.agent.act STEP --config FILE --card BDF...

The watchdog starts it with a deadline and never does any of this itself: a write to `remove` can block for ever behind a wedged
driver, and so can nvidia-smi and modprobe. It prints one JSON object: outcome and detail. One at a time: a step whose watchdog was
killed may still be at work.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from laoka.agent import engine, nvml, pci, unit
from laoka.agent.config import DEFAULT_PATH, Config, ConfigError, load_config
from laoka.agent.ladder import Step
from laoka.files import write_atomic
from laoka.process import Completed, run
from laoka.serving import completion

STOP_DEADLINE_S = 75.0
"""Above the unit's own TimeoutStopSec of 45 s."""
UNIT_DEADLINE_S = 90.0
RESET_DEADLINE_S = 90.0
MODULE_DEADLINE_S = 60.0
TERM_S, KILL_S = 8.0, 4.0
GONE_S = 10.0
BACK_S = 30.0
LINK_SETTLE_S = 1.0
"""PCI Express gives a device 1 s after a reset before it must answer (Base Specification, conventional reset)."""
RESET_HOLD_S = 0.1
BRIDGE_CONTROL = 0x3E
SECONDARY_BUS_RESET = 0x40
SMOKE_DEADLINE_S = 120.0
COMPLETION_DEADLINE_S = 60.0
FENCE_FILE = "fence.env"
MODULES = ("nvidia_uvm", "nvidia_drm", "nvidia_modeset", "nvidia")
PERSISTENCE_UNIT = "nvidia-persistenced.service"


@dataclass(frozen=True)
class Result:
    """How a step ended. `done`: carried out, nothing to verify (stop_users); `skipped`: it was not needed or not possible."""

    outcome: str
    detail: str


class StepError(Exception):
    """A step that could not be carried out; the message is one line."""


def deadline_s(step: str, config: Config) -> float:
    """What a step may take with all that follows it."""
    verify_s = BACK_S + config.nvml_deadline_s + UNIT_DEADLINE_S + SMOKE_DEADLINE_S + COMPLETION_DEADLINE_S
    users_s = STOP_DEADLINE_S + UNIT_DEADLINE_S + TERM_S + KILL_S
    start_s = config.engine_start_deadline_s + 60
    of_step = {
        "apply_caps": UNIT_DEADLINE_S,
        "restart_engine": STOP_DEADLINE_S + start_s + COMPLETION_DEADLINE_S,
        "stop_users": users_s,
        "start_engine": start_s + COMPLETION_DEADLINE_S,
        "reboot": 60.0,
        "cold_cycle": 60.0,
        "fence": users_s + GONE_S + start_s + COMPLETION_DEADLINE_S,
        "gpu_reset": users_s + RESET_DEADLINE_S + verify_s + start_s,
        "module_reload": users_s + 3 * MODULE_DEADLINE_S + verify_s + start_s,
    }
    return of_step.get(step, users_s + 2 * GONE_S + BACK_S + verify_s + start_s) + 10


# ---- the bus --------------------------------------------------------------------------------------------------------------


def _devices(config: Config) -> Path:
    return Path(config.sysfs_root) / "bus/pci/devices"


def alive(config: Config, bdf: str) -> bool:
    """Whether a card is listed and its configuration space is not all ones."""
    found, _ = pci.read_devices(config.sysfs_root, [gpu for gpu in config.gpu if gpu.bdf == bdf], {})
    return bdf in found and found[bdf].header is not None and not found[bdf].dead


def functions(config: Config, bdf: str) -> tuple[str, ...]:
    """A card's functions that are listed (its audio function goes with it), the card itself last."""
    slot = bdf.rsplit(".", 1)[0]
    return tuple(sorted((entry.name for entry in _devices(config).iterdir() if entry.name.startswith(f"{slot}.")), reverse=True))


def port_of(sysfs_root: str, bdf: str) -> str:
    """The bridge that a listed card sits behind, by the path in sysfs; "" where it sits on the root bus or is not listed."""
    device = Path(sysfs_root) / "bus/pci/devices" / bdf
    if not device.exists():
        return ""
    parent = device.resolve().parent.name
    return parent if parent.count(":") == 2 else ""


def _write(path: Path, text: str) -> None:
    try:
        with path.open("w", encoding="ascii") as stream:
            stream.write(text)
    except OSError as error:
        raise StepError(f"{path}: {error.strerror}") from None


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(0.1)
    return True


def remove(config: Config, bdf: str) -> None:
    """Take a card and its functions out of the kernel's list. Errors: StepError."""
    for name in functions(config, bdf):
        _write(_devices(config) / name / "remove", "1\n")
    if not _wait(lambda: not (_devices(config) / bdf).exists(), GONE_S):
        raise StepError(f"{bdf} is still listed {GONE_S:.0f} s after its removal")


def rescan(config: Config, cards: Sequence[str]) -> None:
    """Have the kernel look for devices, and wait until the cards are there and alive. Errors: StepError."""
    _write(Path(config.sysfs_root) / "bus/pci/rescan", "1\n")
    if not _wait(lambda: all(alive(config, bdf) for bdf in cards), BACK_S):
        missing = ", ".join(bdf for bdf in cards if not alive(config, bdf))
        raise StepError(f"after a rescan not there or dead: {missing}")


def reset_bus(config: Config, bdf: str, port: str) -> None:
    """Reset everything behind the port of one card, which must be that card alone. Errors: StepError."""
    folder = _devices(config) / port
    if not port or not folder.exists():
        raise StepError(f"{bdf}: the port that it sits behind is not known")
    slot = bdf.rsplit(".", 1)[0]
    # Children are folders of the port's own; links such as `driver` or `firmware_node` are not devices.
    others = [
        entry.name
        for entry in folder.resolve().iterdir()
        if entry.is_dir() and not entry.is_symlink() and entry.name.count(":") == 2 and not entry.name.startswith(f"{slot}.")
        and "pcie" not in entry.name
    ]  # fmt: skip
    if others:
        raise StepError(f"{port} has other devices behind it ({', '.join(sorted(others))}): not reset")
    if (_devices(config) / bdf).exists():
        remove(config, bdf)
    try:
        with (folder / "config").open("r+b", buffering=0) as stream:
            stream.seek(BRIDGE_CONTROL)
            value = int.from_bytes(stream.read(2), "little")
            if value == 0xFFFF:
                raise StepError(f"{port} itself does not answer")
            for step in (value | SECONDARY_BUS_RESET, value & ~SECONDARY_BUS_RESET):
                stream.seek(BRIDGE_CONTROL)
                stream.write(step.to_bytes(2, "little"))
                time.sleep(RESET_HOLD_S)
    except OSError as error:
        raise StepError(f"{folder}/config: {error.strerror}") from None
    time.sleep(LINK_SETTLE_S)


# ---- who uses the cards ---------------------------------------------------------------------------------------------------


def users(proc: str = "/proc") -> tuple[int, ...]:
    """Processes that hold one of NVIDIA's device nodes open, ourselves and init left out."""
    found = []
    for entry in Path(proc).iterdir():
        if not entry.name.isdecimal() or int(entry.name) in (1, os.getpid()):
            continue
        with contextlib.suppress(OSError):
            if any(str(link.readlink()).startswith("/dev/nvidia") for link in (entry / "fd").iterdir()):
                found.append(int(entry.name))
    return tuple(found)


def stop_users(config: Config) -> str:
    """Stop the engine, the persistence daemon, then whatever else holds a card open. Returns what was ended. Errors: StepError."""
    if config.unit:
        _must(run(["systemctl", "stop", config.unit], deadline_s=STOP_DEADLINE_S))
    run(["systemctl", "stop", PERSISTENCE_UNIT], deadline_s=UNIT_DEADLINE_S)
    ended = users()
    for number, seconds in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
        for pid in users():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if _wait(lambda: not users(), seconds):
            return f"ended {len(ended)} other process(es)" if ended else "no other process held a card"
    raise StepError(f"processes that can't be ended hold a card: {', '.join(map(str, users()))}")


def _must(done: Completed) -> None:
    if not done.ok:
        reason = "passed its deadline" if done.timed_out else done.last_line()
        raise StepError(f"{' '.join(done.argv[:4])}: {reason}")


# ---- what has to hold afterwards ------------------------------------------------------------------------------------------


def apply_caps(config: Config) -> str:
    """Have the power unit apply caps, persistence and clocks again. Errors: StepError."""
    if not config.power_unit:
        return "no power unit"
    state = run(["systemctl", "show", config.power_unit, "--property=LoadState"], deadline_s=UNIT_DEADLINE_S)
    if "LoadState=loaded" not in state.stdout:
        return f"{config.power_unit} is not installed"
    _must(run(["systemctl", "restart", config.power_unit], deadline_s=UNIT_DEADLINE_S))
    return f"{config.power_unit} applied"


def coming_up(config: Config) -> bool:
    """Whether systemd is starting the unit already."""
    return unit.read_unit(config.unit).active == "activating"


def start_engine(config: Config, *, restart: bool = False) -> str:
    """Start the unit and ask for a completion. Errors: StepError."""
    if not config.unit:
        return "no engine is watched"
    if not coming_up(config):
        run(["systemctl", "reset-failed", config.unit], deadline_s=UNIT_DEADLINE_S)
    verb = "restart" if restart else "start"
    stop_s = STOP_DEADLINE_S if restart else 0.0
    _must(run(["systemctl", verb, config.unit], deadline_s=stop_s + config.engine_start_deadline_s + 60))
    if not config.completion_url:
        return f"{config.unit} started"
    verdict = completion.ask(engine.server(config), deadline_s=COMPLETION_DEADLINE_S)
    if not verdict.healthy:
        raise StepError(f"{config.unit} started, but no completion: {verdict.kind}: {verdict.detail}")
    return f"a completion came back in {verdict.latency_s:.2f} s"


def verify(config: Config, fenced: frozenset[str], *, with_engine: bool) -> str:
    """Caps, count, link, computing, engine: all that a recovered host must show. Errors: StepError with what is not so."""
    expected = [gpu for gpu in config.gpu if gpu.bdf not in fenced]
    said = []
    if not _wait(lambda: all(alive(config, gpu.bdf) for gpu in expected), BACK_S):
        raise StepError(f"not back: {', '.join(gpu.bdf for gpu in expected if not alive(config, gpu.bdf))}")
    said.append(f"{len(expected)} of {len(config.gpu)} card(s) on the bus")
    run(["systemctl", "start", PERSISTENCE_UNIT], deadline_s=UNIT_DEADLINE_S)
    said.append(apply_caps(config))
    if config.nvml == "required":
        answer = nvml.ask_once(config.nvml_deadline_s)
        reading = nvml.judge(config, answer)
        bad = [
            signal.seen
            for signal in reading.signals
            if signal.kind not in ("heat", "throttled", "pages_many") and signal.bdf not in fenced
        ]
        if reading.verdict == "unknown":
            raise StepError(f"NVML: {reading.detail}")
        if bad:
            raise StepError(f"NVML: {bad[0]}")
        said.append("NVML answers")
    devices, _ = pci.read_devices(config.sysfs_root, expected, {})
    narrow = [
        f"{bdf} x{device.link_width} of x{device.max_link_width}"
        for bdf, device in devices.items()
        if bdf in {gpu.bdf for gpu in expected} and device.narrow
    ]
    said.append(f"link narrower than it can be: {', '.join(narrow)}" if narrow else "links at full width")
    if config.smoke_test:
        _must(run(config.smoke_test, deadline_s=SMOKE_DEADLINE_S))
        said.append("the CUDA test passed")
    if with_engine:
        said.append(start_engine(config))
    return "; ".join(said)


# ---- the steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A step and all that it needs to know. `ports`: the bridge of each card, as it was seen while the card was there."""

    step: Step
    cards: tuple[str, ...]
    ports: tuple[tuple[str, str], ...] = ()
    fenced: frozenset[str] = frozenset()
    engine_wanted: bool = True


def perform(task: Task, config: Config) -> Result:
    """Take one step and verify what it brought."""
    try:
        if task.step == "stop_users":
            return Result("done", stop_users(config))
        if task.step == "apply_caps":
            return Result("recovered", apply_caps(config))
        if task.step == "restart_engine":
            # systemd may have noticed at the same moment: to restart what it is starting would only begin anew.
            return Result("recovered", start_engine(config, restart=not coming_up(config)))
        if task.step == "reboot":
            _must(run(["systemctl", "reboot"], deadline_s=30))
            return Result("done", "the reboot is under way")
        if task.step == "cold_cycle":
            _must(run(config.power_cycle_command, deadline_s=50))
            return Result("done", "the power is being cut")
        if task.step == "fence":
            return _fence(task, config)
        if task.step == "start_engine":
            return Result("done", start_engine(config) if task.engine_wanted else "the engine was not running before")
        if task.step == "gpu_reset" and (dead := [bdf for bdf in task.cards if not alive(config, bdf)]):
            return Result("skipped", f"does not answer: {', '.join(dead)}")
        stopped = stop_users(config)
        _touch(task, config)
        return Result("recovered", f"{stopped}; {verify(config, task.fenced, with_engine=task.engine_wanted)}")
    except StepError as error:
        return Result("failed", str(error))


def _touch(task: Task, config: Config) -> None:
    if task.step == "gpu_reset":
        for bdf in task.cards:
            _must(run(["nvidia-smi", "-r", "-i", bdf], deadline_s=RESET_DEADLINE_S))
    elif task.step == "module_reload":
        loaded = [name for name in MODULES if (Path(config.sysfs_root) / "module" / name).exists()]
        if loaded:
            _must(run(["modprobe", "-r", *loaded], deadline_s=MODULE_DEADLINE_S))
        _must(run(["modprobe", "nvidia"], deadline_s=MODULE_DEADLINE_S))
        run(["modprobe", "nvidia_uvm"], deadline_s=MODULE_DEADLINE_S)
    elif task.step == "remove_rescan":
        for bdf in task.cards:
            if (_devices(config) / bdf).exists():
                remove(config, bdf)
        rescan(config, task.cards)
    elif task.step == "bus_reset":
        ports = dict(task.ports)
        for bdf in task.cards:
            reset_bus(config, bdf, ports.get(bdf, ""))
        rescan(config, task.cards)


def _fence(task: Task, config: Config) -> Result:
    """Give cards up: out of the kernel's list, out of the engine's sight; serve on with the rest where enough are left."""
    out = task.fenced | set(task.cards)
    said = []
    for bdf in task.cards:
        if (_devices(config) / bdf).exists():
            try:
                remove(config, bdf)
            except StepError as error:
                said.append(str(error))
    rest = [gpu for gpu in config.gpu if gpu.bdf not in out]
    if len(rest) < config.tensor_parallel:
        said.append(f"{len(rest)} card(s) left, the model needs {config.tensor_parallel}: not served")
        return Result("fenced", "; ".join(said))
    write_atomic(Path(config.state_dir) / FENCE_FILE, fence_text(config, out), 0o600)
    if task.engine_wanted:
        try:
            said.append(f"serving on with {len(rest)} card(s): {start_engine(config, restart=True)}")
        except StepError as error:
            said.append(str(error))
    return Result("fenced", "; ".join(said) or "given up")


def fence_text(config: Config, fenced: frozenset[str]) -> str:
    """The environment of an engine that must not see some cards; nothing when it may see all. By UUID where it is recorded: CUDA's
    own numbers change when a card goes.
    """
    if not fenced:
        return "# laoka: no card is given up\n"
    rest = [(number, gpu) for number, gpu in enumerate(gpu for gpu in config.gpu if gpu.bdf not in fenced)]
    seen = ",".join(gpu.uuid or str(number) for number, gpu in rest[: max(config.tensor_parallel, 1)])
    return f"# laoka: given up: {' '.join(sorted(fenced))}\nCUDA_DEVICE_ORDER=PCI_BUS_ID\nCUDA_VISIBLE_DEVICES={seen}\n"


def main(argv: list[str] | None = None) -> int:
    """The command line: one JSON object on standard output, status 0; 2 for settings that can't be followed."""
    parser = argparse.ArgumentParser(prog="python -m laoka.agent.act", description="One step of the watchdog's recovery ladder.")
    parser.add_argument("step", choices=get_args(Step))
    parser.add_argument("--config", default=DEFAULT_PATH)
    parser.add_argument("--card", action="append", default=[])
    parser.add_argument("--port", action="append", default=[], help="BDF=PORT")
    parser.add_argument("--fenced", action="append", default=[])
    parser.add_argument("--leave-engine", action="store_true")
    options = parser.parse_args(argv)
    try:
        config = load_config(options.config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    ports = tuple((bdf, port) for bdf, _, port in (item.partition("=") for item in options.port))
    task = Task(options.step, tuple(options.card), ports, frozenset(options.fenced), not options.leave_engine)
    with (Path(config.state_dir) / "act.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = perform(task, config)
    print(json.dumps({"outcome": result.outcome, "detail": result.detail}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
