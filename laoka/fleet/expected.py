"""What a host should be: by its lock first, by its inventory data where there is no lock or the lock does not say. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DATA_KEYS = (
    "expected_gpus", "power_limit_w", "driver", "driver_branch", "kernel", "cuda_toolkit", "engine", "engine_name",
    "engine_version", "model_id", "model_revision", "serve_flags", "serve_instances",
)  # fmt: skip
"""The keys of an inventory that an audit asks for."""


@dataclass(frozen=True)
class ExpectedCard:
    """A card that should be at `bdf`; empty: the inventory does not say."""

    bdf: str
    device_id: str
    uuid: str = ""
    serial: str = ""
    slot: str = ""

    @property
    def name(self) -> str:
        """How people find it."""
        return f"{self.bdf} ({self.slot})" if self.slot else self.bdf


@dataclass(frozen=True)
class Expected:
    """What one host should be. None: nothing is expected of it.

    `cards` None: the inventory names none (an empty tuple: it says that there is none). `locked`: True when the lock has this host,
    False when it lacks it, None without a lock. `flags` are those of each unit, by its name.
    """

    host: str
    locked: bool | None = None
    cards: tuple[ExpectedCard, ...] | None = None
    driver_branch: str | None = None
    driver_version: str | None = None
    module_flavour: str | None = None
    kernel: str | None = None
    kernel_series: str | None = None
    cuda_toolkit: str | None = None
    engine: str | None = None
    engine_version: str | None = None
    wheel_sha256: str | None = None
    speculative_method: str | None = None
    model: str | None = None
    model_revision: str | None = None
    drafter: str | None = None
    drafter_revision: str | None = None
    power_limit_w: float | None = None
    flags: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def expected_of(host: str, data: Mapping[str, Any], stack: Mapping[str, Any] | None, *, has_lock: bool) -> Expected:
    """The expectations of one host.

    Arguments: `data` its inventory data (DATA_KEYS of it count); `stack` its stack in the lock, None when the lock lacks it;
    `has_lock` whether there is a lock at all. What is of a wrong form in the data counts as not said: `laoka lock` and the
    deploys refuse it with a message.
    """
    locked = stack or {}
    engine, version = _engine(data)
    branch, exact = _driver(data)
    cards = data.get("expected_gpus")
    return Expected(
        host=host,
        locked=None if not has_lock else stack is not None,
        cards=None if cards is None else tuple(_card(item) for item in cards if isinstance(item, Mapping)),
        driver_branch=_text(locked.get("driver_branch")) or (None if stack is not None else branch),
        driver_version=_text(locked.get("driver_version")) or (None if stack is not None else exact),
        module_flavour=_text(locked.get("module_flavour")),
        kernel=_text(data.get("kernel")),
        kernel_series=_text(locked.get("kernel_series")),
        cuda_toolkit=(_text(data.get("cuda_toolkit")) or _text(locked.get("cuda_toolkit")) or "").replace("-", ".") or None,
        engine=_text(locked.get("engine")) or engine,
        engine_version=_text(locked.get("engine_version")) or version,
        wheel_sha256=_text(locked.get("wheel_sha256")),
        speculative_method=_text(locked.get("speculative_method")),
        # The inventory names the model that is placed; a lock is for what fits, under the catalogue's name.
        model=_text(data.get("model_id")) or _text(locked.get("model_repo")),
        model_revision=_text(data.get("model_revision")) or _text(locked.get("model_revision")),
        drafter=_text(locked.get("drafter_repo")),
        drafter_revision=_text(locked.get("drafter_revision")),
        power_limit_w=_number(data.get("power_limit_w")),
        flags=_flags(data, locked),
    )


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def _card(raw: Mapping[str, Any]) -> ExpectedCard:
    return ExpectedCard(**{key: str(raw.get(key) or "") for key in ("bdf", "device_id", "uuid", "serial", "slot")})


def _engine(data: Mapping[str, Any]) -> tuple[str | None, str | None]:
    whole = _text(data.get("engine"))
    if whole:
        name, _, version = whole.partition("==")
        return name.strip(), version.strip() or None
    return _text(data.get("engine_name")), _text(data.get("engine_version"))


def _driver(data: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """(branch, version) of "580", "580.173.02" or "580.173.02-open"."""
    wish = (_text(data.get("driver")) or _text(data.get("driver_branch")) or "").removesuffix("-open")
    if not wish[:3].isdecimal():
        return None, None
    return wish[:3], wish if "." in wish else None


def _flags(data: Mapping[str, Any], locked: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    common = {**_mapping(locked.get("serve_flags")), **_mapping(data.get("serve_flags"))}
    instances = _mapping(data.get("serve_instances"))
    if not instances:
        return {"qwen-serve.service": common} if common else {}
    return {f"qwen-serve@{name}.service": {**common, **_mapping(_mapping(item).get("flags"))} for name, item in instances.items()}


def _mapping(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _text(value: object) -> str | None:
    return value or None if isinstance(value, str) else None
