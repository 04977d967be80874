"""The sensors at work: each in a thread of its own, so that one that hangs stops no other. I/O only; judging is elsewhere."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from laoka.agent import act, boot, disk, drill, engine, flood, link, nvml, pci, unit
from laoka.agent.config import Config
from laoka.agent.follow import Follower, boot_id
from laoka.agent.kernel_log import Position, Stitcher, signal_of
from laoka.agent.signals import Reading
from laoka.serving import completion
from laoka.serving.progress import parse_progress

ASK_AGAIN_S = 5.0
KERNEL_TELL_S = 5.0
SLACK_S = 10.0
QUEUE_MAX = 2000
LINK_S = 30.0
ENGINE_S = 15.0
ENGINE_DEADLINE_S = 5.0


@dataclass(frozen=True)
class LastBoot:
    """This boot, the last one that the watchdog ran in, and whether the watchdog itself cut the power in it."""

    boot_id: str = ""
    known_boot_id: str = ""
    power_was_cut: bool = False


@dataclass
class Sensors:
    """All sensor threads. `max_age_s` says for each after how long a silence it counts as stuck."""

    config: Config
    readings: queue.Queue[Reading] = field(default_factory=lambda: queue.Queue(QUEUE_MAX))
    stopping: threading.Event = field(default_factory=threading.Event)
    max_age_s: dict[str, float] = field(default_factory=dict)
    heard_s: dict[str, float] = field(default_factory=dict)
    _look_at_pci: threading.Event = field(default_factory=threading.Event)
    _unit_active: str = ""
    _records: int = 0

    def start(self, position: Position | None, last_boot: LastBoot) -> None:
        """Start every sensor that is not off. `position`: how far the kernel log was read before; None: never."""
        config = self.config
        self._start("pci", self._pci, config.pci_interval_s + SLACK_S)
        self._start("kernel_log", lambda: self._kernel_log(position), KERNEL_TELL_S + SLACK_S)
        self._start("link", self._link, LINK_S + SLACK_S)
        self._start("flood", self._flood, flood.WINDOW_S + SLACK_S)
        threading.Thread(target=lambda: self._boot(last_boot), name="boot", daemon=True).start()
        self._start("disk", self._disk, config.disk_interval_s + SLACK_S)
        if config.nvml == "required":
            self._start("nvml", self._nvml, config.nvml_interval_s + config.nvml_deadline_s + SLACK_S)
        else:
            self.put(Reading("nvml", "off", detail='nvml = "off"'))
        if config.unit:
            self._start("unit", self._unit, config.unit_interval_s + unit.DEADLINE_S + SLACK_S)
        else:
            self.put(Reading("unit", "off", detail="no unit is configured"))
        if config.completion_url:
            self._start("completion", self._completion, config.completion_interval_s + config.completion_deadline_s + SLACK_S)
            self._start("engine", self._engine, ENGINE_S + ENGINE_DEADLINE_S + SLACK_S)
        else:
            self.put(Reading("completion", "off", detail="no completion_url is configured"))
            self.put(Reading("engine", "off", detail="no completion_url is configured"))

    def put(self, reading: Reading) -> None:
        """Hand a reading to the main loop."""
        self.heard_s[reading.sensor] = time.monotonic()
        self.readings.put(reading)

    def _start(self, name: str, work: Callable[[], None], max_age_s: float) -> None:
        self.max_age_s[name] = max_age_s
        self.heard_s[name] = time.monotonic()
        threading.Thread(target=work, name=name, daemon=True).start()

    def _every(self, name: str, interval_s: Callable[[], float], look: Callable[[], Reading], wake: threading.Event | None) -> None:
        waker = wake or self.stopping
        while not self.stopping.is_set():
            started = time.monotonic()
            try:
                reading = look()
            except Exception as error:  # noqa: BLE001 - whatever it was, the sensor must go on, and must not say "ok"
                reading = Reading(name, "unknown", detail=f"the sensor failed: {type(error).__name__}: {error}")
            self.put(reading)
            waker.wait(max(0.05, interval_s() - (time.monotonic() - started)))
            if wake is not None:
                wake.clear()

    def _pci(self) -> None:
        expected = self.config.gpu
        kinds: dict[str, bool] = {}

        def look() -> Reading:
            return pci.judge(expected, *pci.read_devices(self.config.sysfs_root, expected, kinds))

        self._every("pci", lambda: self.config.pci_interval_s, look, self._look_at_pci)

    def _disk(self) -> None:
        def look() -> Reading:
            state = Path(self.config.state_dir)
            nearest = next(path for path in (state, *state.parents) if path.exists())
            return disk.judge(disk.read_free_mb(tuple(dict.fromkeys(("/", str(nearest))))), self.config.disk_free_min_mb)

        self._every("disk", lambda: self.config.disk_interval_s, look, None)

    def _nvml(self) -> None:
        prober = nvml.Prober(self.config.nvml_deadline_s)
        hot: frozenset[str] = frozenset()
        held: frozenset[str] = frozenset()

        def look() -> Reading:
            nonlocal hot, held
            reading = nvml.judge(self.config, prober.ask(), hot, held)
            hot, held = nvml.hot_cards(reading.signals), nvml.held_cards(reading)
            return reading

        self._every("nvml", lambda: self.config.nvml_interval_s, look, None)

    def _unit(self) -> None:
        memory = unit.UnitMemory()

        def look() -> Reading:
            nonlocal memory
            state = unit.read_unit(self.config.unit)
            reading, memory = unit.judge(self.config.unit, state, memory)
            self._unit_active = state.active
            return reading

        self._every("unit", lambda: self.config.unit_interval_s, look, None)

    def _completion(self) -> None:
        config = self.config
        failures = 0

        def look() -> Reading:
            nonlocal failures
            if config.unit and self._unit_active not in ("active", ""):
                failures = 0
                return engine.not_asked(config.unit, self._unit_active)
            reading, failures = engine.judge(
                completion.ask(engine.server(config), deadline_s=config.completion_deadline_s), failures
            )
            return reading

        def interval_s() -> float:
            soon = failures == 1 or bool(config.unit and self._unit_active not in ("active", ""))
            return min(ASK_AGAIN_S, config.completion_interval_s) if soon else config.completion_interval_s

        self._every("completion", interval_s, look, None)

    def _engine(self) -> None:
        config = self.config
        standing = engine.Standing()

        def look() -> Reading:
            nonlocal standing
            if config.unit and self._unit_active not in ("active", ""):
                standing = engine.Standing()
                return Reading("engine", "unknown", detail=f"not asked: {config.unit} is {self._unit_active}")
            progress = parse_progress(completion.metrics_text(engine.server(config), ENGINE_DEADLINE_S))
            reading, standing = engine.judge_progress(progress, standing, time.monotonic(), config.engine_stalled_after_s)
            return reading

        self._every("engine", lambda: ENGINE_S, look, None)

    def _link(self) -> None:
        config = self.config
        before: dict[str, link.Counters] = {}
        ports: dict[str, str] = {}

        def look() -> Reading:
            nonlocal before
            ports.update({gpu.bdf: port for gpu in config.gpu if (port := act.port_of(config.sysfs_root, gpu.bdf))})
            names = dict.fromkeys([*(gpu.bdf for gpu in config.gpu), *ports.values()])
            now_s = time.monotonic()
            now = {name: found for name in names if (found := link.read_counters(config.sysfs_root, name, now_s))}
            devices, fault = pci.read_devices(config.sysfs_root, config.gpu, {})
            if fault:
                return Reading("link", "unknown", detail=fault)
            reading = link.judge(config.gpu, devices, before, now, ports)
            before = now
            return reading

        self._every("link", lambda: LINK_S, look, None)

    def _flood(self) -> None:
        before = flood.Rate(self._records, time.monotonic())

        def look() -> Reading:
            nonlocal before
            reading, before = flood.judge(self._records, time.monotonic(), before)
            return reading

        self._every("flood", lambda: flood.WINDOW_S, look, None)

    def _boot(self, last: LastBoot) -> None:
        """Once: what became of the boot before this one."""
        words = boot.LastWords(False)
        if last.known_boot_id and last.known_boot_id != last.boot_id:
            words = boot.read_last_words()
        self.put(boot.judge(last.boot_id, last.known_boot_id, words, power_was_cut=last.power_was_cut))

    def _kernel_log(self, position: Position | None) -> None:
        follower = Follower(self.config.kernel_log, position or Position(boot_id()), fresh=position is None)
        stitcher = Stitcher()
        told_s = float("-inf")
        told_fault = ""

        def alive() -> None:
            nonlocal told_s, told_fault
            self._records = follower.records_total
            if time.monotonic() - told_s >= KERNEL_TELL_S or follower.fault != told_fault:
                told_s, told_fault = time.monotonic(), follower.fault
                self.put(_kernel_reading(follower))

        for record in follower.follow(self.stopping.is_set, alive):
            if not record.from_kernel and not self.config.drill:
                continue
            signal = None if record.from_kernel else drill.signal_of(record.text, self.config)
            stitcher, event = stitcher.feed(record.text)
            if event is not None:
                signal = signal_of(event, record, follower.position.boot_id)
            if signal is not None:
                reading = _kernel_reading(follower)
                self.put(Reading(reading.sensor, reading.verdict, (signal,), reading.detail, reading.facts))
                # The card may be gone already: look now, so that one alert tells both.
                self._look_at_pci.set()


def _kernel_reading(follower: Follower) -> Reading:
    facts = {
        "records": follower.records_total,
        "overruns": follower.overruns_total,
        "position": asdict(follower.position),
    }
    if follower.fault:
        return Reading("kernel_log", "unknown", detail=follower.fault, facts=facts)
    return Reading("kernel_log", "ok", detail=f"following {follower.path}", facts=facts)
