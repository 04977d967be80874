"""Which engine a host gets, from the lock or the catalogue, and why it can't have one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from laoka.catalog.engines import UNVERIFIED, engines
from laoka.catalog.messages import Language
from laoka.catalog.models import model
from laoka.fleet.requests import request_of
from laoka.serving.engine_pin import EngineError, EnginePin, pin_of_engine, pin_of_stack
from laoka.stack.request import RequestError
from laoka.stack.resolve import Refusal, resolve, unlisted
from laoka.stack.tables import stack_table

CONTAINER_GLIBC, CONTAINER_PYTHON = "2.39", "3.12"
"""Of Ubuntu 24.04, which the container is made of."""


@dataclass(frozen=True)
class Choice:
    """The engine of a host. `refused` has a line for each reason against it, and `pin` is None then; `stack` is what it is part of.

    `origin` says where the pin comes from: "lock" or "catalogue".
    """

    pin: EnginePin | None
    origin: str
    refused: tuple[str, ...] = ()
    stack: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


def choose(
    name: str,
    data: Mapping[str, Any],
    locked: Mapping[str, Any],
    *,
    glibc: str | None = None,
    container: bool = False,
    lang: Language = "en",
) -> Choice:
    """The engine of one host.

    Arguments: `data` is the host's in the inventory; `locked` its stack in the lock file, empty without one; `glibc` as read on
    the host; `container` True where the engine runs in one, so that the host's glibc and Python don't matter.
    """
    try:
        if locked:
            return _from_lock(locked, data, None if container else glibc)
        return _from_catalogue(name, data, glibc, container, lang)
    except (RequestError, EngineError) as error:
        return Choice(None, "none", (str(error),))


def _from_lock(stack: Mapping[str, Any], data: Mapping[str, Any], glibc: str | None) -> Choice:
    pin = pin_of_stack(stack)
    wanted = (data.get("engine_name"), data.get("engine_version"))
    if (wanted[0] or pin.name, wanted[1] or pin.version) != (pin.name, pin.version):
        said = "==".join(str(word) for word in wanted if word)
        raise EngineError(f"the lock pins {pin.pin}, the inventory says {said}: laoka lock again, or take the keys out")
    refused = _glibc_lines(pin, glibc)
    return Choice(None if refused else pin, "lock", refused, stack)


def _glibc_lines(pin: EnginePin, glibc: str | None) -> tuple[str, ...]:
    if glibc is None or pin.glibc_min is None or _numbers(glibc) >= _numbers(pin.glibc_min):
        return ()
    return (
        f"[glibc] {pin.pin} needs glibc {pin.glibc_min}, the host has {glibc}: lock ReVolta, or set engine_route = 'container'",
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _from_catalogue(name: str, data: Mapping[str, Any], glibc: str | None, container: bool, lang: Language) -> Choice:
    named = data.get("model") or data.get("model_id")
    if named is not None and model(str(named)) is None and not Path(str(named)).is_dir():
        # A model that the catalogue does not have is judged by its own files before it is fetched; the engine has to be named.
        return _by_name(name, data, glibc if not container else None)
    request = request_of(name, data, {})
    if container:
        request = replace(request, glibc=CONTAINER_GLIBC, python=CONTAINER_PYTHON)
    elif glibc is not None:
        request = replace(request, glibc=glibc)
    outcome = resolve(request)
    if isinstance(outcome, Refusal):
        lines = [f"[{item.constraint}] {item.evidence.say(lang)}: {item.way_out.say(lang)}" for item in outcome.violations]
        return Choice(None, "catalogue", tuple(lines))
    if outcome.wheel_sha256 is None:
        raise EngineError(
            f"{outcome.engine.pin}: no SHA-256 of its wheel is known: `laoka lock INVENTORY --online` takes it from its release"
        )
    notes = tuple(warning.say(lang) for warning in outcome.warnings)
    return Choice(pin_of_engine(outcome.engine, outcome.wheel_sha256), "catalogue", (), stack_table(outcome), notes)


def _by_name(name: str, data: Mapping[str, Any], glibc: str | None) -> Choice:
    wanted, version = data.get("engine_name"), data.get("engine_version")
    rows = [row for row in engines() if row.kind == "vllm" and row.name == wanted]
    if not rows:
        raise EngineError(f"host {name}: the catalogue does not have its model: name the engine too (engine_name, engine_version)")
    exact = [row for row in rows if version is None or row.version == version]
    row = exact[0] if exact else unlisted(rows, str(version))
    if row.wheel_sha256 == UNVERIFIED:
        raise EngineError(f"{row.pin}: no SHA-256 of its wheel is known: `laoka lock INVENTORY --online` takes it from its release")
    pin = pin_of_engine(row, row.wheel_sha256)
    refused = _glibc_lines(pin, glibc)
    return Choice(None if refused else pin, "catalogue", refused, None)
