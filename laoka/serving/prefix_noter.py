"""Notes hashes of the prompts that pass the guard, where the inventory asks for it: beside the requests, never in their way.

The engine's own /tokenize (on loopback) says which tokens a prompt has; what is written is laoka.serving.prefix_log's. A prompt
waits in memory until then and is dropped when too many wait; no text and no token id reaches the disk.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from laoka.serving.prefix_log import note

WAITING = 64
MAX_BYTES = 16 * 1024 * 1024
"""Of the log; then it becomes `.1`, and what was that is gone."""
ANSWER_MAX_BYTES = 64 * 1024 * 1024
KEY_BYTES = 32
# What of a chat request has a part in how it becomes tokens.
CHAT_KEYS = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "chat_template")


def question(body: Mapping[str, Any], model: str) -> dict[str, Any] | None:
    """What /tokenize is asked about a request; None for one that it can't tell of (several prompts in one)."""
    if "messages" in body:
        return {"model": model, **{key: body[key] for key in CHAT_KEYS if key in body}}
    prompt = body.get("prompt")
    return {"model": model, "prompt": prompt} if isinstance(prompt, str) else None


def given_ids(body: Mapping[str, Any]) -> list[int] | None:
    """The token ids of a request that sends ids itself."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) and 0 <= token < 2**32 for token in prompt):
        return prompt
    return None


class Noter:
    """One thread that tokenizes and writes. `connect` gives a connection to the engine."""

    def __init__(
        self, path: Path, model: str, connect: Callable[[], http.client.HTTPConnection], headers: Callable[[], Mapping[str, str]]
    ) -> None:
        self._path, self._model, self._connect, self._headers = path, model, connect, headers
        self._waiting: queue.Queue[tuple[float, bytes]] = queue.Queue(WAITING)
        self._key, self._run = secrets.token_bytes(KEY_BYTES), secrets.token_hex(6)
        self.dropped = 0
        threading.Thread(target=self._work, name="prefixes", daemon=True).start()

    def take(self, body: bytes) -> None:
        """Have a request noted, or drop it when too many wait; takes no time."""
        try:
            self._waiting.put_nowait((time.time(), body))
        except queue.Full:
            self.dropped += 1

    def _work(self) -> None:
        while True:
            time_s, body = self._waiting.get()
            try:
                ids = self._ids(json.loads(body))
                if ids:
                    self._write(note(ids, self._key, self._run, time_s).line())
            except (OSError, ValueError, http.client.HTTPException, RecursionError):
                self.dropped += 1

    def _ids(self, body: Any) -> list[int]:
        """Errors: OSError, ValueError, HTTPException when the engine does not tell."""
        own = given_ids(body)
        if own is not None:
            return own
        asked = question(body, self._model)
        if asked is None:
            return []
        connection = self._connect()
        try:
            connection.request("POST", "/tokenize", json.dumps(asked).encode(), dict(self._headers()))
            answer = connection.getresponse()
            content = json.loads(answer.read(ANSWER_MAX_BYTES))
        finally:
            connection.close()
        tokens = content.get("tokens") if isinstance(content, dict) and answer.status == 200 else None
        return [token for token in tokens if isinstance(token, int)] if isinstance(tokens, list) else []

    def _write(self, line: str) -> None:
        if self._path.exists() and self._path.stat().st_size > MAX_BYTES:
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        with os.fdopen(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8") as stream:
            stream.write(f"{line}\n")
