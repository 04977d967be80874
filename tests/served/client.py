"""A client of a host's gateway, as somebody on its network would be one: real connections, streams read as they come."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laoka.sandbox.lab import HostFolder, Lab

PORT = 8080
CHAT = "/v1/chat/completions"


def key_of(lab: Lab) -> str:
    """The key that the lab's gateways know."""
    return lab.gateway_keys.read_text().split()[1]


@dataclass
class Got:
    """An answer: `events` of a stream with the time each came at, in seconds since the request."""

    status: int
    body: str
    seconds: float
    headers: dict[str, str] = field(default_factory=dict)
    events: list[tuple[float, str]] = field(default_factory=list)

    def json(self) -> Any:
        return json.loads(self.body)

    def code(self) -> str:
        """The code of an error in OpenAI's form."""
        error = self.json()["error"]
        assert set(error) >= {"message", "type", "param", "code"}, self.body
        return str(error["code"])


def chat(prompt: str = "Hi", **body: object) -> dict[str, object]:
    return {"model": "tiny-qwen3", "messages": [{"role": "user", "content": prompt}], "temperature": 0, "ignore_eos": True, **body}


class Gateway:
    """One host's gateway."""

    def __init__(self, host: HostFolder, key: str | None = None, port: int = PORT, tls_ca: Path | None = None) -> None:
        """`tls_ca`: the certificate that its own has to be signed by; None: no TLS."""
        self.address, self.port, self.tls_ca = host.address, port, tls_ca
        self.key = key_of(host.lab) if key is None else key
        self.hop = False
        """Whether to ask as another host's gateway would: for this very host."""

    def connect(self, deadline_s: float = 60) -> http.client.HTTPConnection:
        if self.tls_ca is not None:
            trusted = ssl.create_default_context(cafile=str(self.tls_ca))
            return http.client.HTTPSConnection(self.address, self.port, timeout=deadline_s, context=trusted)
        return http.client.HTTPConnection(self.address, self.port, timeout=deadline_s)

    def headers(self) -> dict[str, str]:
        own = {"Content-Type": "application/json", **({"X-Laoka-Hop": "1"} if self.hop else {})}
        return {**own, "Authorization": f"Bearer {self.key}"} if self.key else own

    def ask(self, method: str, path: str, body: bytes | None = None, deadline_s: float = 60) -> Got:
        began = time.monotonic()
        connection = self.connect(deadline_s)
        try:
            connection.request(method, path, body, self.headers())
            answer = connection.getresponse()
            text = answer.read().decode()
            return Got(answer.status, text, time.monotonic() - began, {k.lower(): v for k, v in answer.getheaders()})
        finally:
            connection.close()

    def post(self, body: object, path: str = CHAT, deadline_s: float = 60) -> Got:
        return self.ask("POST", path, json.dumps(body).encode(), deadline_s)

    def get(self, path: str) -> Got:
        return self.ask("GET", path)

    def stream(
        self,
        body: dict[str, object],
        *,
        stop_after: int | None = None,
        begun: threading.Event | None = None,
        deadline_s: float = 120,
    ) -> Got:
        """Ask for a stream; `stop_after` so many events the client goes away; `begun` is set at the first event."""
        began = time.monotonic()
        connection = self.connect(deadline_s)
        try:
            connection.request("POST", CHAT, json.dumps({**body, "stream": True}).encode(), self.headers())
            answer = connection.getresponse()
            got = Got(answer.status, "", 0.0, {k.lower(): v for k, v in answer.getheaders()})
            rest = ""
            while piece := answer.read1(65536).decode():
                rest += piece
                got.body += piece
                while "\n\n" in rest:
                    event, rest = rest.split("\n\n", 1)
                    got.events.append((time.monotonic() - began, event))
                    if begun is not None:
                        begun.set()
                if stop_after is not None and len(got.events) >= stop_after:
                    break
            got.seconds = time.monotonic() - began
            return got
        finally:
            connection.close()

    def raw(self, deadline_s: float = 60) -> socket.socket:
        """A bare connection, for what no HTTP library would send."""
        return socket.create_connection((self.address, self.port), deadline_s)
