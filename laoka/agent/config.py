"""The watchdog's settings: a TOML file into a frozen dataclass; whatever is wrong with it is told in one line."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from laoka.agent.ladder import Policy
from laoka.catalog import load, toml
from laoka.catalog.messages import Language
from laoka.host.pci_address import normal

DEFAULT_PATH = "/etc/laoka/watchdog.toml"


class ConfigError(ValueError):
    """A settings file that can't be followed; the message is one line: file, key, what is wrong."""


@dataclass(frozen=True, kw_only=True)
class ExpectedGpu:
    """A card that has to be there. Empty texts are not compared."""

    bdf: str
    """PCI address, 0000:03:00.0."""
    device_id: str
    """PCI id, 10de:1db6."""
    uuid: str = ""
    serial: str = ""
    slot: str = ""
    """Where a person finds it: "top slot", "riser 2"."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that the watchdog can be told. Times are seconds."""

    host: str
    """Name of the host as people know it; stands in every title."""
    lang: Language = "en"
    simulated: bool = False
    """True where the card is a simulation: every title and the status then say so."""
    drill: bool = False
    """True: kernel log records written by user space count too, and are marked as a drill. False: they are ignored."""
    gpu: tuple[ExpectedGpu, ...] = ()
    power_limit_w: float | None = None
    """Power limit that each card was given; None: not compared."""

    sysfs_root: str = "/sys"
    kernel_log: str = "/dev/kmsg"
    """The kernel log, or a file that grows with records of the same format."""
    unit: str = "qwen-serve.service"
    """The served model's unit; empty: not watched."""
    state_dir: str = "/var/lib/laoka/watchdog"
    state_file: str = "/run/laoka/watchdog.json"
    metrics_address: str = "127.0.0.1:9835"
    """Empty: no metrics over HTTP."""
    metrics_file: str = "/run/laoka/metrics.prom"
    """The same metrics as a file, for node-exporter's textfile collector; empty: none."""
    alert_urls_file: str = "/etc/laoka/alert-urls"
    """Root-only file of apprise addresses, one a line, # for comments. $CREDENTIALS_DIRECTORY/alert-urls goes before it."""
    alerts_per_hour: int = 20
    """What is above it in an hour is held back and told in one summary."""

    quiet_hours: str = ""
    """Local time in which only critical alerts are sent, as 22:30-07:00; the others come in one summary afterwards. Empty: none."""
    heartbeat_interval_s: float = 60.0
    """How often the heartbeat address of the alerts' file is asked while the watchdog lives."""

    nvml: Literal["required", "off"] = "required"
    nvml_interval_s: float = 30.0
    nvml_deadline_s: float = 10.0

    completion_url: str = ""
    """Root of the model server, such as http://127.0.0.1:8000; empty: health by completion is off."""
    completion_model: str = ""
    completion_api_key_file: str = ""
    completion_interval_s: float = 60.0
    completion_deadline_s: float = 30.0
    engine_stalled_after_s: float = 120.0
    """Requests are there but no token counter has moved for so long: the engine is stuck. Longer than its longest prefill step."""
    judge_text: bool = True
    """False where the model answers noise by nature (random weights)."""

    pci_interval_s: float = 1.0
    unit_interval_s: float = 5.0
    disk_interval_s: float = 30.0
    disk_free_min_mb: int = 512

    recovery: Policy = "engine-only"
    """What the watchdog may do by itself: observe (nothing), engine-only (restart the engine, apply the power cap), full."""
    reboot: bool = False
    """Whether policy full may reboot this host."""
    reboots_per_day: int = 1
    """Reboots and power cycles in 24 hours of the watchdog's running time."""
    power_cycle_command: tuple[str, ...] = ()
    """Program and arguments that cut this host's power for a while (ipmitool, a smart plug); empty: there is none."""
    power_unit: str = "laoka-power.service"
    """The unit that applies caps, persistence and clocks; empty: there is none."""
    smoke_test: tuple[str, ...] = ()
    """Program and arguments of a CUDA test that ends with status 0 when every visible card computes; empty: there is none."""
    tensor_parallel: int = 1
    """How many cards the served model needs; with fewer left it can't be served on."""
    engine_start_deadline_s: float = 1200.0
    """How long a start of the unit may take until it counts as up."""

    act_after_s: float = 15.0
    """How long a card's fault must stand before the ladder begins: one that comes back by itself does it within seconds."""
    burst_quiet_s: float = 180.0
    """Signals join one incident until it is quiet for so long (NVIDIA groups Xids the same way)."""
    recovered_after_s: float = 30.0
    """All of an incident's conditions must be gone for so long before it counts as recovered."""

    source: str = DEFAULT_PATH
    """The file that these settings came from; not a key of it."""


_INTERVALS = tuple(field.name for field in dataclasses.fields(Config) if field.name.endswith(("_interval_s", "_deadline_s")))


def load_config(path: str | Path) -> Config:
    """Read the settings file. Errors: ConfigError."""
    try:
        raw = toml.load(path)
    except toml.TomlError as error:
        raise ConfigError(str(error)) from None
    return parse_config(raw, str(path))


def parse_config(raw: Mapping[str, Any], name: str) -> Config:
    """Settings of a parsed TOML file; `name` is what an error calls it. Errors: ConfigError."""
    _known(raw, Config, name, "")
    for number, gpu in enumerate(raw.get("gpu", ()) if isinstance(raw.get("gpu"), list) else (), 1):
        if isinstance(gpu, Mapping):
            _known(gpu, ExpectedGpu, name, f"[[gpu]] {number}: ")
    try:
        config: Config = load.build(raw, Config, name)  # type: ignore[type-var]  # any dataclass will do
    except load.CatalogError as error:
        raise ConfigError(str(error)) from None
    return _checked(config, name)


def _known(raw: Mapping[str, Any], cls: type, name: str, where: str) -> None:
    names = [field.name for field in dataclasses.fields(cls) if field.name != "source"]
    for key in raw:
        if key not in names:
            close = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(names)}"
            raise ConfigError(f"{name}: {where}unknown key {key}: {hint}")


def _checked(config: Config, name: str) -> Config:
    for key in _INTERVALS:
        if getattr(config, key) <= 0:
            raise ConfigError(f"{name}: {key} must be above zero")
    if not config.host.strip():
        raise ConfigError(f"{name}: host is empty: alerts name the host")
    if config.completion_url and not config.completion_model:
        raise ConfigError(f"{name}: completion_model is missing: completion_url needs the served model's name")
    if config.alerts_per_hour < 1:
        raise ConfigError(f"{name}: alerts_per_hour must be 1 or more")
    if config.quiet_hours and not re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d", config.quiet_hours):
        raise ConfigError(f"{name}: quiet_hours {config.quiet_hours!r} is not like 22:30-07:00")
    if config.reboots_per_day < 1:
        raise ConfigError(f"{name}: reboots_per_day must be 1 or more; reboot = false means none")
    if config.reboot and config.recovery != "full":
        raise ConfigError(f'{name}: reboot = true needs recovery = "full"')
    if config.tensor_parallel < 1:
        raise ConfigError(f"{name}: tensor_parallel must be 1 or more")
    if config.metrics_address:
        metrics_endpoint(config.metrics_address, name)
    cards: list[ExpectedGpu] = []
    for number, gpu in enumerate(config.gpu, 1):
        bdf = normal(gpu.bdf)
        if bdf is None:
            raise ConfigError(f"{name}: [[gpu]] {number}: bdf {gpu.bdf!r} is not a PCI address like 0000:03:00.0")
        device_id = gpu.device_id.lower()
        if not re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{4}", device_id):
            raise ConfigError(f"{name}: [[gpu]] {number}: device_id {gpu.device_id!r} is not a PCI id like 10de:1db6")
        if bdf in [card.bdf for card in cards]:
            raise ConfigError(f"{name}: [[gpu]] {number}: {bdf} stands twice")
        cards.append(dataclasses.replace(gpu, bdf=bdf, device_id=device_id))
    return dataclasses.replace(config, gpu=tuple(cards), source=name)


def metrics_endpoint(address: str, name: str = "metrics_address") -> tuple[str, int]:
    """Host and port of `127.0.0.1:9835`. Errors: ConfigError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{name}: metrics_address {address!r} is not like 127.0.0.1:9835")
    return host.strip("[]"), int(port)
