"""What an engine's installation is pinned to: its wheel and hash, what it needs of the host, what goes with it. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from laoka.catalog.engines import Engine
from laoka.catalog.load import is_sha256
from laoka.serving.kernels import Kind

ENGINES = Path("/opt/laoka/engines")
CURRENT = "current"
STAMP = "laoka-complete"
RECORD = "laoka-engine.json"


class EngineError(Exception):
    """An engine can't be installed, or is not what it should be; the message says what was seen and what to do."""


@dataclass(frozen=True)
class EnginePin:
    """One release of an engine, pinned. The fields are the catalogue's (laoka.catalog.engines), the hash is the lock's."""

    name: str
    version: str
    wheel_file: str
    wheel_sha256: str
    wheel_bytes: int | None = None
    package: str | None = None
    wheel_url: str | None = None
    sums_url: str | None = None
    python: tuple[str, ...] = ()
    glibc_min: str | None = None
    torch: str | None = None
    torch_backend: str | None = None
    device: str = "cuda"
    kernels: Kind = "none"
    pins: tuple[str, ...] = ()
    remove_after_install: tuple[str, ...] = ()
    dist_info_alias: str | None = None

    @property
    def pin(self) -> str:
        """The release as a requirement: "1cat-vllm==1.5.1"."""
        return f"{self.name}=={self.version}"

    @property
    def stamp(self) -> str:
        """What the stamp of a finished environment says: another wheel of the same version is another text."""
        return f"{self.name} {self.version} {self.wheel_sha256}"

    def to_json(self) -> str:
        """One line, always the same for the same pin."""
        return json.dumps(asdict(self), sort_keys=True)


def folder_of(name: str, version: str, engines: Path = ENGINES) -> Path:
    """Where one version of an engine lives on the host."""
    return engines / f"{name}-{version}"


def kernels_of(attention_backend: str | None, speculation: str) -> Kind:
    """Which kernels for DFlash2 an engine should have."""
    if speculation != "dflash2":
        return "none"
    return "sm70" if attention_backend == "FLASH_ATTN_V100" else "upstream"


def pin_of_engine(engine: Engine, sha256: str) -> EnginePin:
    """The pin of a row of the catalogue with the hash that is known for it. Errors: EngineError without a valid one."""
    return _made({**{name: getattr(engine, name) for name in _SHARED}, "wheel_sha256": sha256,
                  "kernels": kernels_of(engine.attention_backend, engine.speculation)}, engine.pin)  # fmt: skip


def pin_of_stack(stack: Mapping[str, Any]) -> EnginePin:
    """The pin of a locked stack, from the lock alone. Errors: EngineError when it does not have what an installation needs."""
    values = {
        "name": stack.get("engine"),
        "version": stack.get("engine_version"),
        "package": stack.get("engine_package"),
        "device": stack.get("engine_device", "cuda"),
        "python": (str(stack.get("python")),) if stack.get("python") else (),
        "kernels": kernels_of(stack.get("attention_backend"), str(stack.get("engine_speculation", "none"))),
    }
    known = {key: stack.get(key) for key in _SHARED if key not in values}
    return _made({**known, **values, "wheel_sha256": stack.get("wheel_sha256")}, "the lock")


_SHARED = (
    "name", "version", "wheel_file", "wheel_bytes", "package", "wheel_url", "sums_url", "python", "glibc_min", "torch",
    "torch_backend", "device", "pins", "remove_after_install", "dist_info_alias",
)  # fmt: skip


def parse_pin(text: str) -> EnginePin:
    """The pin of `EnginePin.to_json`. Errors: EngineError."""
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise EngineError("the pin is not one: it is no table")
        return _made(content, "the pin")
    except (ValueError, TypeError) as error:
        raise EngineError(f"the pin is not one: {type(error).__name__} {str(error)[:80]}") from None


def _made(values: Mapping[str, Any], where: str) -> EnginePin:
    names = {field.name for field in fields(EnginePin)}
    unknown = sorted(set(values) - names)
    if unknown:
        raise EngineError(f"{where}: unknown key {unknown[0]}")
    kept: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.items() if value is not None
    }
    for key in ("name", "version", "wheel_file", "wheel_sha256"):
        if not isinstance(kept.get(key), str):
            raise EngineError(f"{where}: {key} is missing")
    pin = EnginePin(**kept)
    if not is_sha256(pin.wheel_sha256):
        raise EngineError(
            f"{where}: {pin.pin}: no SHA-256 of its wheel is known: `laoka lock INVENTORY --online` takes it from its release"
        )
    for text in (pin.name, pin.version):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+!_-]*", text):
            raise EngineError(f"{where}: {text!r} can't be a folder's name")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+!_-]*\.whl", pin.wheel_file):
        raise EngineError(f"{where}: {pin.wheel_file!r} is no wheel's name")
    return pin
