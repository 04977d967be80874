"""What a host's inventory data asks of the resolver, with the defaults for what it leaves out. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from laoka.stack.checkpoint import CheckpointError
from laoka.stack.models import checkpoint_of
from laoka.stack.request import (
    DEFAULT_CONTEXT_TOKENS,
    DEFAULT_MODEL,
    DEFAULT_OS,
    DEFAULT_STREAMS,
    MEASURE,
    SPECULATIVE_WISHES,
    Request,
    RequestError,
    card_of,
    parse_driver,
    parse_engine,
)


def request_of(name: str, data: Mapping[str, Any], hashes: Mapping[str, str]) -> Request:
    """The request of one host.

    Keys: `expected_gpus` (list of {"device_id", ...}; none: an engine for CPU), `os_release` (ubuntu-24.04), `kernel`,
    `model` or `model_id` (the QUASAR NVFP4 checkpoint), `context_tokens` or serve_flags max-model-len (32768),
    `streams` or serve_flags max-num-seqs (1), `speculative` (auto; measure counts as auto), `engine` ("1cat-vllm==1.5.1") or
    `engine_name` with `engine_version` (the best that is known), `driver` or `driver_branch` (the best), `driver_source` (the
    release's preferred one). serve_flags speculative-config is checked.
    Errors: RequestError, one line that names host and key.
    """
    try:
        return _request(data, hashes)
    except (RequestError, CheckpointError) as error:
        raise RequestError(f"host {name}: {error}") from None


def _request(data: Mapping[str, Any], hashes: Mapping[str, str]) -> Request:
    cards = []
    gpus = data.get("expected_gpus") or []
    if not isinstance(gpus, (list, tuple)):
        raise RequestError(f"expected_gpus is {gpus!r}: write a list of {{'bdf', 'device_id'}}")
    for gpu in gpus:
        device_id = gpu.get("device_id") if isinstance(gpu, Mapping) else None
        if not isinstance(device_id, str):
            raise RequestError(f"expected_gpus: {gpu!r} has no device_id such as 10de:1db6")
        cards.append(card_of(device_id))
    flags = data.get("serve_flags") or {}
    if not isinstance(flags, Mapping):
        raise RequestError(f"serve_flags is {flags!r}: write a table of flags")
    engine, version = data.get("engine"), None
    if engine is None and data.get("engine_name"):
        engine = data["engine_name"] if not data.get("engine_version") else f"{data['engine_name']}=={data['engine_version']}"
    name, version = parse_engine(_text(engine, "engine"))
    speculative = data.get("speculative", "auto")
    speculative = "auto" if speculative == MEASURE else speculative
    if speculative not in SPECULATIVE_WISHES:
        raise RequestError(f"speculative is {speculative!r}: write one of {', '.join((*SPECULATIVE_WISHES, MEASURE))}")
    return Request(
        cards=tuple(cards),
        checkpoint=checkpoint_of(_text(data.get("model") or data.get("model_id"), "model") or DEFAULT_MODEL),
        os_release=_text(data.get("os_release"), "os_release") or DEFAULT_OS,
        kernel=_text(data.get("kernel"), "kernel"),
        context_tokens=_number(data.get("context_tokens", flags.get("max-model-len")), "context_tokens", DEFAULT_CONTEXT_TOKENS),
        streams=_number(data.get("streams", flags.get("max-num-seqs")), "streams", DEFAULT_STREAMS),
        speculative=speculative,
        speculative_config=_config(flags.get("speculative-config")),
        engine=name,
        engine_version=version,
        driver=parse_driver(_text(data.get("driver") or data.get("driver_branch"), "driver")),
        driver_source=_text(data.get("driver_source"), "driver_source"),
        hashes=dict(hashes),
    )


def _text(value: object, key: str) -> str | None:
    if value is None or isinstance(value, str):
        return value or None
    raise RequestError(f"{key} is {value!r}: write a text")


def _number(value: object, key: str, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise RequestError(f"{key} is {value!r}: write a number of 1 or more")


def _config(value: object) -> Mapping[str, Any] | None:
    if value is None or isinstance(value, Mapping):
        return value
    try:
        content = json.loads(str(value))
    except (ValueError, RecursionError):
        raise RequestError(f"serve_flags speculative-config is not JSON: {str(value)[:60]!r}") from None
    if not isinstance(content, Mapping):
        raise RequestError(f"serve_flags speculative-config is not a table: {str(value)[:60]!r}")
    return content
