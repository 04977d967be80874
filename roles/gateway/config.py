"""What the gateway is made of, as values: limits out of the engine's flags, keys, error pages, who else serves. Pure."""

from __future__ import annotations

import hashlib
import ipaddress
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laoka.serving.openai_error import gateway_refusals
from roles.serve.unit import longest_silence_s, tokens_of

POST_PATHS = ("/v1/chat/completions", "/v1/completions")
GET_PATHS = ("/v1/models", "/health")
ERROR_CODES = ("400", "401", "404", "405", "408", "413", "429", "500", "502", "503", "504")
"""Of the answers that HAProxy itself gives, those that its `http-error` takes."""
SEND_S = 60
"""How long a client may take nothing of an answer that is there."""
DEFAULT_CONTEXT_TOKENS = 32768
DEFAULT_SEATS = 8
MIN_KEY_CHARS = 16
SLOWEST_PREFILL_TOKENS_S = 300
"""About a fifth of the slowest published prefill of V100s (1602 tokens/s, laoka/catalog/profiles.toml)."""


@dataclass(frozen=True)
class Limits:
    """The gateway's limits, all of them set. Times are seconds."""

    seats: int
    waiting: int
    queue_s: int
    max_body_bytes: int
    max_prompt_chars: int
    max_tokens: int | None
    first_byte_s: int
    idle_s: int
    dead_after_s: int


def limits(
    flags: Mapping[str, Any],
    *,
    seats: int | None = None,
    waiting: int | None = None,
    queue_s: int = 60,
    max_body_bytes: int | None = None,
    max_prompt_chars: int | None = None,
    max_tokens: int | None = None,
    first_byte_s: int | None = None,
    idle_s: int | None = None,
    dead_after_s: int | None = None,
) -> Limits:
    """The limits of a gateway, from the flags of its engine (those of the lock and the plan) where they are not given.

    Seats: max-num-seqs. Places in line: four for each seat. A prompt: 8 characters for each token of the context (texts have
    1.5 to 5). A body: 6 bytes for each of those characters (JSON may escape them), and a MiB. The first byte: every seat
    prefills a whole context before it, at SLOWEST_PREFILL_TOKENS_S, and a minute.
    """
    context = tokens_of(flags.get("max-model-len"), DEFAULT_CONTEXT_TOKENS)
    seats = seats or tokens_of(flags.get("max-num-seqs"), DEFAULT_SEATS)
    chars = max_prompt_chars or 8 * context
    silence_s = longest_silence_s(flags)
    return Limits(
        seats=seats,
        waiting=4 * seats if waiting is None else waiting,
        queue_s=queue_s,
        max_body_bytes=max_body_bytes or 6 * chars + 1024 * 1024,
        max_prompt_chars=chars,
        max_tokens=max_tokens,
        first_byte_s=first_byte_s or 60 + seats * context // SLOWEST_PREFILL_TOKENS_S,
        idle_s=idle_s or max(60, silence_s),
        dead_after_s=dead_after_s or silence_s,
    )


@dataclass(frozen=True)
class Key:
    """A client's name and key."""

    name: str
    key: str


def parse_keys(text: str, where: str) -> tuple[Key, ...]:
    """Read a file of keys: `NAME KEY` a line, # for comments.

    Errors: ValueError with file and line; the key itself is never in it.
    """
    found: list[Key] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        if len(words) != 2:
            raise ValueError(f"{where}:{number}: write NAME KEY")
        name, key = words
        if not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"{where}:{number}: the name may have letters, digits, - and _")
        if len(key) < MIN_KEY_CHARS or not key.isascii():
            raise ValueError(f"{where}:{number}: the key of {name} has less than {MIN_KEY_CHARS} ASCII characters")
        if any(item.key == key for item in found):
            raise ValueError(f"{where}:{number}: the key of {name} is another one's too")
        found.append(Key(name, key))
    if not found:
        raise ValueError(f"{where}: no key in it: write NAME KEY, one a line")
    return tuple(found)


def key_map(keys: Sequence[Key]) -> str:
    """HAProxy's map of keys: by their SHA-256, so that the file itself opens nothing."""
    return "".join(f"{hashlib.sha256(item.key.encode()).hexdigest().upper()} {item.name}\n" for item in keys)


def refusals(found: Limits) -> dict[str, dict[str, str | int]]:
    """What HAProxy answers itself: status, body and headers in HAProxy's own words, by name; `own`: without a rule of ours."""
    told = gateway_refusals(max_body_bytes=found.max_body_bytes, queue_s=found.queue_s, paths=(*POST_PATHS, *GET_PATHS))
    return {
        name: {
            "status": item.status,
            "body": quoted(item.body()),
            "headers": "".join(f" hdr {key} {value}" for key, value in item.headers().items() if key != "Content-Type"),
            "own": int(name in ERROR_CODES),
        }
        for name, item in told.items()
    }


def quoted(text: str) -> str:
    """A text as one word of HAProxy's configuration. Within single quotes everything but a single quote stands for itself."""
    return "'" + text.replace("'", "'\\''") + "'"


PREFIX_LOG = "/var/lib/qwen-guard/prefixes.jsonl"


def guard_settings(found: Limits, engines: Sequence[Mapping[str, str]], *, prefix_log: bool = False) -> str:
    """The guard's settings file."""
    values = {
        "engines": list(engines), "max_body_bytes": found.max_body_bytes, "max_prompt_chars": found.max_prompt_chars,
        "max_tokens": found.max_tokens, "max_choices": found.seats, "first_byte_s": found.first_byte_s, "idle_s": found.idle_s,
        "dead_after_s": found.dead_after_s, "send_s": SEND_S, "prefix_log": PREFIX_LOG if prefix_log else "",
    }  # fmt: skip
    return json.dumps(values, indent=1, sort_keys=True) + "\n"


def split_listen(listen: str) -> tuple[str, int]:
    """Address and port of `0.0.0.0:8080` or `[::]:8080`. Errors: ValueError."""
    address, _, port = listen.rpartition(":")
    bare = address.strip("[]")
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        raise ValueError(f"{listen!r} is not like 0.0.0.0:8080 or 127.0.0.1:8080") from None
    if not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{listen!r} has no port between 1 and 65535")
    return address, int(port)


def is_loopback(listen: str) -> bool:
    """Whether only the host itself can connect there. Errors: ValueError."""
    return ipaddress.ip_address(split_listen(listen)[0].strip("[]")).is_loopback
