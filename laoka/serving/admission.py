"""Whether a request to the model is let in: JSON that is one, a prompt and a number of tokens within the limits. Pure.

What is checked here is cheap and certain. The exact count of a prompt's tokens is the engine's: it answers 400 by itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from laoka.serving.openai_error import Refusal

MAX_TOKENS_KEYS = ("max_tokens", "max_completion_tokens")
MEDIA_KEYS = frozenset({"image_url", "video_url", "audio_url", "input_audio"})


@dataclass(frozen=True)
class Limits:
    """What a request may ask for. `max_tokens` None: no other ceiling than the context."""

    max_body_bytes: int
    max_prompt_chars: int
    max_tokens: int | None
    max_choices: int


@dataclass(frozen=True)
class Admitted:
    """A request that is let in. `usage_hidden`: the client did not ask for the last event of a stream that counts tokens."""

    body: bytes
    stream: bool
    usage_hidden: bool


def admit(raw: bytes, limits: Limits) -> Admitted | Refusal:
    """Judge the body of a completion request, and make a stream count its tokens in the end."""
    try:
        body = json.loads(raw)
    except UnicodeDecodeError:
        return Refusal(400, "invalid_json", "the request is not UTF-8")
    except RecursionError:
        return Refusal(400, "invalid_json", "the request is nested too deeply")
    except ValueError as error:
        # The message of the parser names a place, never the text.
        return Refusal(400, "invalid_json", f"the request is not JSON: {error}")
    if not isinstance(body, dict):
        return Refusal(400, "invalid_json", "the request is not a JSON object")
    refusal = _tokens(body, limits) or _prompt(body, limits)
    if refusal is not None:
        return refusal
    stream = body.get("stream") is True
    if not stream:
        return Admitted(raw, False, False)
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        return Refusal(400, "invalid_type", "stream_options is not an object", "stream_options")
    options = options or {}
    if options.get("include_usage") is True:
        return Admitted(raw, True, False)
    body["stream_options"] = {**options, "include_usage": True}
    return Admitted(json.dumps(body).encode(), True, True)


def _tokens(body: Mapping[str, Any], limits: Limits) -> Refusal | None:
    for key in MAX_TOKENS_KEYS:
        value = body.get(key)
        # What is no number is the engine's to refuse.
        if limits.max_tokens is not None and _is_number(value) and value > limits.max_tokens:
            said = f"{key} is {value}, and this server gives {limits.max_tokens} at most"
            return Refusal(400, "max_tokens_too_large", said, key)
    for key in ("n", "best_of"):
        value = body.get(key)
        if _is_number(value) and value > limits.max_choices:
            said = f"{key} is {value}, and this server gives {limits.max_choices} at most"
            return Refusal(400, "too_many_choices", said, key)
    return None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _prompt(body: Mapping[str, Any], limits: Limits) -> Refusal | None:
    for key in ("messages", "prompt"):
        if key in body and (length := text_length(body[key])) > limits.max_prompt_chars:
            said = f"{key} has {length} characters, and this server takes {limits.max_prompt_chars} at most"
            return Refusal(400, "context_length_exceeded", said, key)
    return None


def text_length(value: object) -> int:
    """Characters of all texts in a prompt or in messages; a token id counts as one, pictures and sound do not count."""
    total, left = 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            left.extend(part for key, part in item.items() if key not in MEDIA_KEYS)
        elif isinstance(item, list):
            left.extend(item)
        elif item is not None:
            total += 1
    return total
