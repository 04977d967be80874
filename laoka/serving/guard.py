"""The guard of a model server: stands between HAProxy and the engine, on sockets that only HAProxy may use.

    python -m laoka.serving.guard --settings /etc/qwen-guard/settings.json

It does what HAProxy can't: it reads the request (JSON, max_tokens, length of the prompt), knows by signs of life whether the engine
works, counts the tokens of each answer, and writes the access log - who, when, how long, how many tokens, never what was said.
HAProxy does the rest: TLS, keys, paths, sizes, the queue, the choice of a server. SIGHUP reads the limits again.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import http.server
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from datetime import datetime, timezone
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from laoka.notify import Notifier
from laoka.serving.admission import Admitted, Limits, admit
from laoka.serving.completion import Server, read_key
from laoka.serving.openai_error import Refusal
from laoka.serving.prefix_noter import Noter
from laoka.serving.pulse import Pulse
from laoka.serving.unix_http import UnixServer

DRAIN_FILE = Path("/run/qwen-guard/drain")
"""The host's mark: while it is there, all of its engines are out of service."""
COMPLETION_PATHS = ("/v1/chat/completions", "/v1/completions")
CLIENT_HEADER, FROM_HEADER, ID_HEADER = "X-Laoka-Client", "X-Laoka-From", "X-Request-Id"
CONNECT_S = 5.0
BODY_S = 30.0
"""How long the rest of a body may take that HAProxy had not received whole."""
READ_PAST_BYTES, READ_PAST_S = 1024 * 1024, 2.0
"""How much of a refused body is taken, so that its sender lives to see the refusal; HAProxy lets no larger one through."""
PIECE_BYTES = 65536
WHOLE_MAX_BYTES = 16 * 1024 * 1024
LOOK_S = 1.0
PET_S = 5.0

ENGINE_DOWN = Refusal(503, "model_down", "the model server is down or starting: try again", None, 10)
NO_FIRST_BYTE = Refusal(504, "no_answer_in_time", "the model server did not begin to answer in time", None, 10)
STOOD_STILL = Refusal(504, "answer_stopped", "the model server stopped in the middle of the answer")
BROKE_OFF = Refusal(502, "answer_broke_off", "the model server broke the answer off")
BODY_LATE = Refusal(408, "request_timeout", "the request did not arrive in time")


@dataclass(frozen=True)
class EngineSettings:
    """One engine: the socket that HAProxy reaches it by, and where it listens on loopback."""

    socket: str
    url: str
    model: str


@dataclass(frozen=True)
class Settings:
    """Everything that the guard is told; times are seconds. See roles/gateway for what each is for."""

    engines: tuple[EngineSettings, ...]
    max_body_bytes: int
    max_prompt_chars: int
    max_tokens: int | None
    max_choices: int
    first_byte_s: float
    idle_s: float
    dead_after_s: float
    send_s: float
    """How long a client may take nothing of an answer before it is let go: it must not keep its seat for ever."""
    prefix_log: str = ""
    """File for keyed hashes of prompts' token blocks (laoka cache); empty: nothing is noted."""

    def limits(self) -> Limits:
        return Limits(self.max_body_bytes, self.max_prompt_chars, self.max_tokens, self.max_choices)


def mark_beside(socket: str | Path) -> Path:
    """The mark that takes one engine out of service, and no other of its host: it lies beside the engine's socket."""
    return Path(socket).with_suffix(".drain")


def parse_settings(text: str) -> Settings:
    """Read the settings file. Errors: ValueError."""
    try:
        raw = json.loads(text)
        engines = tuple(EngineSettings(**engine) for engine in raw.pop("engines"))
        return Settings(
            engines=engines,
            **{item.name: raw[item.name] for item in fields(Settings) if item.name != "engines" and _has(raw, item)},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not the guard's settings: {error}") from None


def _has(raw: Mapping[str, Any], item: Field[Any]) -> bool:
    """Whether a setting is to be read: one that has a default may be absent in a file of an older release."""
    return item.name in raw or item.default is MISSING


@dataclass
class Entry:
    """One line of the access log. It has no field that a prompt or an answer could get into."""

    id: str
    client: str
    source: str
    path: str
    started_s: float
    status: int = 0
    stream: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    first_byte_ms: int | None = None
    total_ms: int = 0
    finish: str | None = None
    outcome: str = "done"

    def line(self) -> str:
        """As JSON; a client's own name for its request is cut, so that a log line stays one."""
        values = asdict(self)
        began = datetime.fromtimestamp(values.pop("started_s"), timezone.utc)
        return json.dumps({"time": began.isoformat(timespec="milliseconds"), **values, "id": self.id[:64]})


# ---- the answer's tokens: pure -------------------------------------------------------------------------------------------


def count(content: object, entry: Entry) -> None:
    """Note what an answer, or one event of a stream, says of its tokens and its end."""
    if not isinstance(content, dict):
        return
    usage = content.get("usage")
    if isinstance(usage, dict):
        for name in ("prompt_tokens", "completion_tokens"):
            if isinstance(usage.get(name), int):
                setattr(entry, name, usage[name])
    choices = content.get("choices")
    if isinstance(choices, list):
        for choice in choices:
            finish = choice.get("finish_reason") if isinstance(choice, dict) else None
            if isinstance(finish, str):
                entry.finish = finish[:20]


def pass_event(event: bytes, entry: Entry, *, usage_hidden: bool) -> bool:
    """Whether an event of a stream goes on to the client; what it says of tokens is noted.

    Only events that can have something to count are parsed: a stream has thousands.
    """
    if b'"usage":{' not in event and b'"usage": {' not in event and b'"finish_reason":"' not in event:
        return True
    try:
        content = json.loads(event.removeprefix(b"data:").strip())
    except ValueError:
        return True
    count(content, entry)
    return not (usage_hidden and isinstance(content, dict) and content.get("choices") == [])


class Events:
    """Cuts a stream into its events, each with its blank line; `rest` is what has no end yet."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Take a piece, and give the events that it completes."""
        self.rest += piece
        while (end := self.rest.find(b"\n\n")) >= 0:
            event, self.rest = self.rest[: end + 2], self.rest[end + 2 :]
            yield event


# ---- one engine ---------------------------------------------------------------------------------------------------------


@dataclass
class Engine:
    """One engine as the guard knows it: where it is, whether it lives, how many requests it has in hand."""

    settings: EngineSettings
    key: str
    pulse: Pulse
    noter: Noter | None = None
    """Notes hashes of prompts; None: nothing is noted."""
    in_flight: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.settings.url)
        return http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=CONNECT_S)

    def note_as(self, whole: Settings) -> None:
        """Begin or end to note hashes of prompts, as the settings say."""
        if not whole.prefix_log:
            self.noter = None
        elif self.noter is None:
            self.noter = Noter(Path(whole.prefix_log), self.settings.model, self.connection, self.headers)

    def headers(self) -> dict[str, str]:
        """What the engine is sent beside the body; the client's own headers stop here."""
        own = {"Content-Type": "application/json", "Connection": "close"}
        return {**own, "Authorization": f"Bearer {self.key}"} if self.key else own


class Guard:
    """What all threads share: the settings in force, the engines, whether this host or one engine is being drained."""

    def __init__(self, settings: Settings, key: str, drain_file: Path = DRAIN_FILE) -> None:
        self.settings = settings
        self.drain_file = drain_file
        self.engines = tuple(_engine(item, settings, key) for item in settings.engines)
        self._log_lock = threading.Lock()

    def draining(self, engine: Engine) -> bool:
        return self.drain_file.exists() or mark_beside(engine.settings.socket).exists()

    def log(self, entry: Entry) -> None:
        with self._log_lock:
            print(entry.line(), flush=True)

    def watch(self, engine: Engine) -> None:
        """Look after one engine's pulse, for ever; its thread's work."""
        while True:
            engine.pulse.look()
            time.sleep(LOOK_S)

    def health(self, engine: Engine) -> tuple[int, dict[str, Any]]:
        """What HAProxy is told: 200 in service, 404 draining (no new requests, the old ones go on), 503 ill."""
        silent_s, draining = engine.pulse.silent_s(), self.draining(engine)
        state = {
            "engine": engine.settings.url,
            "own_mark": True,  # a guard of an older release knows the host's mark alone, and does not say this
            "draining": draining,
            "silent_s": round(silent_s, 1),
            "in_flight": engine.in_flight,
        }
        if draining:
            return 404, {**state, "status": "draining"}
        if engine.pulse.down or not engine.pulse.seen:
            return 503, {**state, "status": engine.pulse.down or "not seen alive yet"}
        if silent_s > self.settings.dead_after_s:
            return 503, {**state, "status": "no sign of life"}
        return 200, {**state, "status": "ok"}


def _engine(settings: EngineSettings, whole: Settings, key: str) -> Engine:
    server = Server(settings.url, settings.model, key, judge_text=False)
    engine = Engine(settings, key, Pulse(server, ask_after_s=max(1.0, whole.dead_after_s / 3)))
    engine.note_as(whole)
    return engine


# ---- one request --------------------------------------------------------------------------------------------------------


class ClientGone(Exception):
    """The client closed its connection, or takes nothing any more."""


class EngineFailed(Exception):
    """The engine did not answer, or not to the end."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal
        super().__init__(refusal.message)


def make_handler(guard: Guard, engine: Engine) -> type[http.server.BaseHTTPRequestHandler]:
    """The handler of one engine's socket."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = BODY_S

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if path == "/health":
                status, state = guard.health(engine)
                self._json(status, json.dumps(state))
            elif path == "/v1/models":
                self._relay(None)
            else:
                self._refuse(Refusal(404, "unknown_path", "this path is not served here"))

        def do_POST(self) -> None:
            if urlsplit(self.path).path not in COMPLETION_PATHS:
                self._refuse(Refusal(404, "unknown_path", "this path is not served here"))
                self._read_past()
                return
            entry = self._entry()
            body = self._body()
            judged = body if isinstance(body, Refusal) else admit(body, guard.settings.limits())
            if isinstance(judged, Refusal):
                self._refuse(judged, entry)
                if judged is body and judged.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
                    self._read_past()
            else:
                self._relay(judged, entry)

        def _entry(self) -> Entry:
            given = self.headers
            return Entry(
                id=given.get(ID_HEADER, ""), client=given.get(CLIENT_HEADER, ""), source=given.get(FROM_HEADER, ""),
                path=urlsplit(self.path).path, started_s=time.time(),
            )  # fmt: skip

        def _body(self) -> bytes | Refusal:
            length = self.headers.get("Content-Length", "")
            if not length.isascii() or not length.isdecimal():
                self.close_connection = True
                return Refusal(411, "length_required", "send the request with a Content-Length")
            limit = guard.settings.max_body_bytes
            if int(length) > limit:
                self.close_connection = True
                return Refusal(413, "request_too_large", f"the request is larger than {limit} bytes")
            try:
                body = self.rfile.read(int(length))
            except OSError:
                body = b""
            if len(body) < int(length):
                self.close_connection = True
                return BODY_LATE
            return body

        def _read_past(self) -> None:
            """Take what a client that was refused still sends, within bounds, and close: who is cut off while it sends sees a
            broken connection, not the answer; and what is left of a body can't be taken for the next request."""
            self.close_connection = True
            length = self.headers.get("Content-Length", "")
            left = min(int(length), READ_PAST_BYTES) if length.isascii() and length.isdecimal() else 0
            with suppress(OSError):
                self.connection.settimeout(READ_PAST_S)
                while left > 0 and (taken := len(self.rfile.read1(left))):
                    left -= taken

        def _refuse(self, refusal: Refusal, entry: Entry | None = None) -> None:
            if entry is not None:
                entry.status, entry.outcome = refusal.status, f"refused: {refusal.code}"
                self._finish(entry)
            try:
                self._json(refusal.status, refusal.body(), refusal.headers())
            except OSError:
                self.close_connection = True

        def _json(self, status: int, body: str, headers: Mapping[str, str] | None = None) -> None:
            content = body.encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _finish(self, entry: Entry) -> None:
            entry.total_ms = round((time.time() - entry.started_s) * 1000)
            guard.log(entry)

        def _relay(self, admitted: Admitted | None, entry: Entry | None = None) -> None:
            """Ask the engine and pass its answer on; `admitted` None: a GET."""
            self.close_connection = True  # one request, one connection: what is left of a broken one can't be taken for the next
            entry = entry or self._entry()
            with engine.lock:
                engine.in_flight += 1
            try:
                _Exchange(self, guard, engine, entry).run(admitted)
            except ClientGone:
                entry.outcome = "client gone"
            finally:
                with engine.lock:
                    engine.in_flight -= 1
                if admitted is not None:
                    self._finish(entry)
                if admitted is not None and engine.noter is not None and entry.status == HTTPStatus.OK:
                    engine.noter.take(admitted.body)

        def log_message(self, format: str, *args: object) -> None:
            """The access log has its own lines."""

    return Handler


class _Exchange:
    """One answer on its way from the engine to the client."""

    def __init__(self, handler: http.server.BaseHTTPRequestHandler, guard: Guard, engine: Engine, entry: Entry) -> None:
        self._handler, self._guard, self._engine, self._entry = handler, guard, engine, entry
        self._client: socket.socket = handler.connection
        self._begun = False

    def run(self, admitted: Admitted | None) -> None:
        """Errors: ClientGone."""
        connection = self._engine.connection()
        try:
            answer = self._ask(connection, admitted)
            self._engine.pulse.note()
            self._entry.status = answer.status
            self._entry.stream = "text/event-stream" in (answer.getheader("Content-Type") or "")
            self._client.settimeout(self._guard.settings.send_s)
            if self._entry.stream:
                self._stream(answer, usage_hidden=admitted is not None and admitted.usage_hidden)
            else:
                self._whole(answer)
        except EngineFailed as error:
            self._entry.outcome = f"engine: {error.refusal.code}"
            self._tell(error.refusal)
        finally:
            connection.close()  # the engine sees that nobody listens any more, and ends the request

    def _ask(self, connection: http.client.HTTPConnection, admitted: Admitted | None) -> http.client.HTTPResponse:
        """Send the request, and wait for the answer to begin. Errors: EngineFailed, ClientGone."""
        method, body = ("GET", None) if admitted is None else ("POST", admitted.body)
        try:
            connection.request(method, self._entry.path, body, self._engine.headers())
            engine: socket.socket = connection.sock
            self._wait(engine)
            engine.settimeout(self._guard.settings.idle_s)
            return connection.getresponse()
        except (OSError, http.client.HTTPException):
            raise EngineFailed(ENGINE_DOWN) from None

    def _wait(self, engine: socket.socket) -> None:
        """Wait until the engine begins to answer; nothing of it is read yet. Errors: EngineFailed when late, ClientGone."""
        poll = select.poll()
        for sock in (engine, self._client):
            poll.register(sock, select.POLLIN)
        ready = [descriptor for descriptor, _event in poll.poll(self._guard.settings.first_byte_s * 1000)]
        if engine.fileno() in ready:
            return
        if ready:
            raise ClientGone  # HAProxy sends nothing after a request: it closed
        raise EngineFailed(NO_FIRST_BYTE)

    def _pieces(self, answer: http.client.HTTPResponse) -> Iterator[bytes]:
        """The body, piece by piece as it comes. Errors: EngineFailed."""
        while True:
            try:
                piece = answer.read1(PIECE_BYTES)
            except TimeoutError:
                raise EngineFailed(STOOD_STILL) from None
            except (OSError, http.client.HTTPException):
                raise EngineFailed(BROKE_OFF) from None
            if not piece:
                if answer.length:
                    raise EngineFailed(BROKE_OFF)
                return
            self._engine.pulse.note()
            if self._entry.first_byte_ms is None:
                self._entry.first_byte_ms = round((time.time() - self._entry.started_s) * 1000)
            yield piece

    def _stream(self, answer: http.client.HTTPResponse, *, usage_hidden: bool) -> None:
        """Each event goes on as soon as it is whole. Errors: EngineFailed, ClientGone."""
        self._head(answer.status, {"Content-Type": "text/event-stream; charset=utf-8", "Transfer-Encoding": "chunked"})
        events = Events()
        for piece in self._pieces(answer):
            passed = [event for event in events.feed(piece) if pass_event(event, self._entry, usage_hidden=usage_hidden)]
            self._chunk(b"".join(passed))
        self._chunk(events.rest)
        self._send(b"0\r\n\r\n")

    def _whole(self, answer: http.client.HTTPResponse) -> None:
        """An answer in one piece. Errors: EngineFailed, ClientGone."""
        body = b""
        for piece in self._pieces(answer):
            body += piece
            if len(body) > WHOLE_MAX_BYTES:
                raise EngineFailed(BROKE_OFF)
        with contextlib.suppress(ValueError):  # an error page of the engine: nothing to count
            count(json.loads(body), self._entry)
        kind = answer.getheader("Content-Type") or "application/json"
        self._head(answer.status, {"Content-Type": kind, "Content-Length": str(len(body))})
        self._send(body)

    def _tell(self, refusal: Refusal) -> None:
        """Say why there is no answer, or no end of it. Errors: ClientGone."""
        if not self._begun:
            self._entry.status = refusal.status
            body = refusal.body().encode()
            self._head(refusal.status, {**refusal.headers(), "Content-Length": str(len(body))})
            self._send(body)
        elif self._entry.stream:
            self._chunk(refusal.event())
            self._send(b"0\r\n\r\n")

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        self._begun = True
        reason = HTTPStatus(status).phrase if status in set(HTTPStatus) else ""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._send(f"HTTP/1.1 {status} {reason}\r\n{lines}Connection: close\r\n\r\n".encode())

    def _chunk(self, data: bytes) -> None:
        if data:
            self._send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _send(self, data: bytes) -> None:
        try:
            self._client.sendall(data)
        except OSError:
            raise ClientGone from None


# ---- the process --------------------------------------------------------------------------------------------------------


def serve(settings_file: Path, key: str, drain_file: Path = DRAIN_FILE) -> int:
    """Run until SIGTERM; then no new request is taken, and those in hand are finished. Errors: OSError, ValueError."""
    guard = Guard(parse_settings(settings_file.read_text(encoding="utf-8")), key, drain_file)
    notifier = Notifier()
    asked: list[int] = []
    wake = threading.Event()

    def note(number: int, frame: object) -> None:
        asked.append(number)
        wake.set()

    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGHUP, note)
    servers = []
    _forget_sockets(guard)
    for engine in guard.engines:
        threading.Thread(target=guard.watch, args=(engine,), name="pulse", daemon=True).start()
        server = UnixServer(engine.settings.socket, make_handler(guard, engine))
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="serve", daemon=True).start()
        servers.append(server)
    notifier.send("READY=1", f"STATUS=guarding {len(servers)} engine(s)")
    while signal.SIGTERM not in asked:
        if signal.SIGHUP in asked:
            asked.remove(signal.SIGHUP)
            _read_again(guard, settings_file)
        notifier.send("WATCHDOG=1")
        wake.wait(PET_S)
        wake.clear()
    notifier.send("STOPPING=1")
    for server in servers:
        server.shutdown()
        server.server_close()
    while any(engine.in_flight for engine in guard.engines):  # systemd's TimeoutStopSec is the limit
        time.sleep(0.05)
    return 0


def _forget_sockets(guard: Guard) -> None:
    """Remove the sockets of engines that an earlier run had and this one has not, with their marks: nobody answers there."""
    kept = {Path(engine.settings.socket) for engine in guard.engines}
    for folder in {path.parent for path in kept}:
        for path in set(folder.glob("*.sock")) - kept:
            path.unlink(missing_ok=True)
        for mark in set(folder.glob("*.drain")) - {mark_beside(path) for path in kept}:
            with suppress(OSError):  # it is root's, who may have taken it away just now
                mark.unlink()


def _read_again(guard: Guard, settings_file: Path) -> None:
    """The limits as they are now; engines are what a restart changes."""
    try:
        new = parse_settings(settings_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"{settings_file}: {error}: the old limits stay in force", file=sys.stderr, flush=True)
        return
    guard.settings = new
    for engine in guard.engines:
        engine.note_as(new)
    print("the limits were read again", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m laoka.serving.guard", description="Guard a model server behind HAProxy.")
    parser.add_argument("--settings", type=Path, required=True)
    options = parser.parse_args(argv)
    try:
        return serve(options.settings, read_key(os.environ))
    except (OSError, ValueError) as error:
        print(f"could not guard: {options.settings}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
