"""The guard on a real socket in front of a server that behaves as a test wants: every answer, and the log line it leaves."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from laoka.serving.guard import Entry, Events, parse_settings, pass_event
from laoka.serving.unix_http import UnixConnection
from tests.hosts import until

PROMPT = "a prompt that must never be seen in a log"
HELLO = [{"role": "user", "content": PROMPT}]
CHUNK = (
    'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"ab"},"finish_reason":null}]}\n\n'
)
LAST = 'data: {"id":"c","choices":[{"index":0,"delta":{"content":""},"finish_reason":"length"}]}\n\n'
USAGE = 'data: {"id":"c","choices":[],"usage":{"prompt_tokens":11,"total_tokens":15,"completion_tokens":4}}\n\n'


class Engine:
    """Stands for the engine: `mode` says what its completions do."""

    def __init__(self) -> None:
        self.mode, self.asked, self.gone = "ok", [], threading.Event()  # type: ignore[var-annotated]
        self.go = threading.Event()
        engine = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.whole(200, b"")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if body.get("max_tokens") == 1:  # the pulse's question
                    self.whole(
                        200, json.dumps({"choices": [{"message": {"content": "5"}}], "usage": {"completion_tokens": 1}}).encode()
                    )
                    return
                if self.path == "/tokenize":
                    self.whole(200, json.dumps({"tokens": list(json.dumps(body["messages"]).encode())}).encode())
                    return
                engine.asked.append((body, dict(self.headers)))
                getattr(self, engine.mode)(body)

            def ok(self, body: dict[str, Any]) -> None:
                if not body.get("stream"):
                    usage = {"prompt_tokens": 11, "completion_tokens": 4}
                    choice = {"message": {"content": '"usage":{"prompt_tokens":999}'}, "finish_reason": "stop"}
                    self.whole(200, json.dumps({"choices": [choice], "usage": usage}).encode())
                    return
                self.begin()
                for text in (CHUNK, CHUNK, LAST, USAGE, "data: [DONE]\n\n"):
                    self.chunk(text.encode())
                self.wfile.write(b"0\r\n\r\n")

            def slow(self, body: dict[str, Any]) -> None:
                """The first event, then nothing until the test says so."""
                self.begin()
                self.chunk(CHUNK.encode())
                engine.go.wait(20)
                self.chunk(LAST.encode())
                self.wfile.write(b"0\r\n\r\n")

            def broken(self, body: dict[str, Any]) -> None:
                self.begin()
                self.chunk(CHUNK.encode())
                self.close_connection = True

            def mute(self, body: dict[str, Any]) -> None:
                self.connection.settimeout(20)
                try:
                    if self.connection.recv(1) == b"":
                        engine.gone.set()
                except OSError:
                    pass
                self.close_connection = True

            def flood(self, body: dict[str, Any]) -> None:
                self.begin()
                try:
                    for _ in range(100_000):
                        self.chunk(CHUNK.encode() * 20)
                except OSError:
                    engine.gone.set()

            def too_long(self, body: dict[str, Any]) -> None:
                self.whole(
                    400, b'{"error":{"message":"maximum context length is 4096","type":"BadRequestError","param":null,"code":400}}'
                )

            def begin(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream; charset=utf-8")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()

            def chunk(self, data: bytes) -> None:
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

            def whole(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Quiet(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass

        self.server = Quiet(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.go.set()
        self.server.shutdown()
        self.server.server_close()


class Guarded:
    """The guard's process, its settings and its log."""

    def __init__(self, folder: Path, engine: Engine, **changed: object) -> None:
        self.engine, self.folder, self.socket = engine, folder, folder / "main.sock"
        self.file, self.log, self.drain = folder / "settings.json", folder / "log", folder / "drain"
        engines = [{"socket": str(self.socket), "url": engine.url, "model": "m"}]
        self.values: dict[str, object] = {
            "engines": engines, "max_body_bytes": 10_000, "max_prompt_chars": 500, "max_tokens": 100, "max_choices": 2,
            "first_byte_s": 1.5, "idle_s": 1.5, "dead_after_s": 3.0, "send_s": 1.0, **changed,
        }  # fmt: skip
        self.file.write_text(json.dumps(self.values))
        for name in ("gone.sock", "gone.drain"):  # of an engine that an earlier run had
            (folder / name).touch()
        code = (
            "import sys; from pathlib import Path; from laoka.serving.guard import serve; "
            "sys.exit(serve(Path(sys.argv[1]), 'k3y', Path(sys.argv[2])))"
        )
        self.child = subprocess.Popen(
            [sys.executable, "-c", code, str(self.file), str(self.drain)], stdout=self.log.open("wb"), stderr=subprocess.STDOUT
        )
        until(self.well, 30, "the guard is up and the engine was seen alive")

    def well(self) -> bool:
        try:
            return self.get("/health")[0] == 200
        except OSError:
            return False  # the socket is not there yet, or there and nobody listens yet

    def get(self, path: str) -> tuple[int, Any]:
        return self.ask("GET", path)

    def post(self, content: object = None, *, raw: bytes | None = None, path: str = "/v1/chat/completions") -> tuple[int, Any]:
        return self.ask("POST", path, json.dumps(content).encode() if raw is None else raw)

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        connection = UnixConnection(self.socket, 20)
        headers = {
            "X-Laoka-Client": "alice",
            "X-Laoka-From": "10.0.0.9",
            "X-Request-Id": "r-1",
            "Authorization": "Bearer client-key",
        }
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        kind = answer.getheader("Content-Type") or ""
        return answer.status, json.loads(text) if kind.startswith("application/json") and text else text

    def lines(self, wanted: int = 1) -> list[dict[str, Any]]:
        """The access log, once it has so many lines."""

        def found() -> list[dict[str, Any]]:
            return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

        until(lambda: len(found()) >= wanted, 30, "the line is in the log")
        return found()


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.close()


@pytest.fixture
def guarded(tmp_path: Path, engine: Engine) -> Iterator[Guarded]:
    made = Guarded(tmp_path, engine)
    yield made
    made.child.kill()
    made.child.wait()
    assert PROMPT not in made.log.read_text() and "client-key" not in made.log.read_text()


def test_its_health_names_its_engine_and_sockets_of_engines_that_are_gone_are_removed(guarded: Guarded, engine: Engine) -> None:
    assert guarded.get("/health")[1]["engine"] == engine.url
    assert [path.name for path in guarded.folder.glob("*.sock")] == ["main.sock"]


def test_a_whole_answer_is_passed_on_and_its_tokens_are_in_the_log(guarded: Guarded, engine: Engine) -> None:
    status, answer = guarded.post({"messages": HELLO})
    assert status == 200 and answer["usage"]["completion_tokens"] == 4
    body, headers = engine.asked[0]
    assert body == {"messages": HELLO} and headers["Authorization"] == "Bearer k3y"  # the client's own key stops here
    line = guarded.lines()[0]
    wanted = {
        "id": "r-1", "client": "alice", "source": "10.0.0.9", "path": "/v1/chat/completions", "status": 200, "stream": False,
        "prompt_tokens": 11, "completion_tokens": 4, "finish": "stop", "outcome": "done",
    }  # fmt: skip
    assert wanted.items() <= line.items() and line["total_ms"] >= line["first_byte_ms"] >= 0


def test_a_stream_is_passed_on_event_by_event_without_the_count_that_nobody_asked_for(guarded: Guarded, engine: Engine) -> None:
    status, text = guarded.post({"messages": HELLO, "stream": True})
    assert (status, text) == (200, CHUNK * 2 + LAST + "data: [DONE]\n\n")
    assert engine.asked[0][0]["stream_options"] == {"include_usage": True}
    line = guarded.lines()[0]
    assert (line["stream"], line["prompt_tokens"], line["completion_tokens"], line["finish"]) == (True, 11, 4, "length")
    _, text = guarded.post({"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}})
    assert USAGE in text


def test_the_first_event_does_not_wait_for_the_second(guarded: Guarded, engine: Engine) -> None:
    engine.mode = "slow"
    connection = UnixConnection(guarded.socket, 20)
    connection.request("POST", "/v1/chat/completions", json.dumps({"messages": HELLO, "stream": True}).encode())
    answer = connection.getresponse()
    assert answer.read1(1000).decode() == CHUNK and not engine.go.is_set()
    engine.go.set()
    assert answer.read().decode() == LAST


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (b"{oops", 400, "invalid_json"),
        (b'{"max_tokens": 500}', 400, "max_tokens_too_large"),
        (json.dumps({"prompt": "x" * 501}).encode(), 400, "context_length_exceeded"),
        (b" " * 10_001, 413, "request_too_large"),
        (b" " * 900_000, 413, "request_too_large"),  # more than the socket's buffers hold
    ],
)
def test_what_is_refused_never_reaches_the_engine(guarded: Guarded, engine: Engine, raw: bytes, status: int, code: str) -> None:
    found, answer = guarded.post(raw=raw)
    assert (found, answer["error"]["code"], engine.asked) == (status, code, [])
    assert (guarded.lines()[0]["status"], guarded.lines()[0]["outcome"]) == (status, f"refused: {code}")


def test_other_paths_are_not_served(guarded: Guarded) -> None:
    assert guarded.post({}, path="/invocations")[0] == guarded.get("/metrics")[0] == 404


def test_a_refusal_of_the_engine_is_passed_on(guarded: Guarded, engine: Engine) -> None:
    engine.mode = "too_long"
    status, answer = guarded.post({"messages": HELLO, "stream": True})
    assert status == 400 and "4096" in answer["error"]["message"]


def test_an_engine_that_is_down_is_said_to_be_and_health_says_so(guarded: Guarded, engine: Engine) -> None:
    engine.close()
    status, answer = guarded.post({"messages": HELLO})
    assert (status, answer["error"]["code"]) == (503, "model_down")
    until(lambda: guarded.get("/health")[0] == 503, 30, "health says that it is down")


def test_a_stream_that_breaks_off_ends_with_an_error_not_as_if_it_were_whole(guarded: Guarded, engine: Engine) -> None:
    engine.mode = "broken"
    status, text = guarded.post({"messages": HELLO, "stream": True})
    assert status == 200 and text.startswith(CHUNK) and "answer_broke_off" in text and "[DONE]" not in text
    assert guarded.lines()[0]["outcome"] == "engine: answer_broke_off"


def test_an_engine_that_stops_in_the_middle_and_one_that_never_begins(guarded: Guarded, engine: Engine) -> None:
    engine.mode = "slow"
    assert "answer_stopped" in guarded.post({"messages": HELLO, "stream": True})[1]
    engine.mode = "mute"
    status, answer = guarded.post({"messages": HELLO})
    assert (status, answer["error"]["code"]) == (504, "no_answer_in_time")


def test_a_client_that_goes_away_ends_the_request_at_the_engine(guarded: Guarded, engine: Engine) -> None:
    engine.mode = "mute"
    connection = UnixConnection(guarded.socket, 20)
    connection.request("POST", "/v1/chat/completions", json.dumps({"messages": HELLO}).encode())
    until(lambda: engine.asked, 30, "the engine has the request")
    connection.close()
    assert engine.gone.wait(1.4), "the engine still works for nobody"
    assert guarded.lines()[0]["outcome"] == "client gone"


def test_a_client_that_goes_away_in_the_middle_of_a_stream_too(guarded: Guarded, engine: Engine) -> None:
    engine.mode = "flood"
    connection = UnixConnection(guarded.socket, 20)
    connection.request("POST", "/v1/chat/completions", json.dumps({"messages": HELLO, "stream": True}).encode())
    connection.getresponse().read1(100)
    connection.close()
    assert engine.gone.wait(5)


def test_a_client_that_takes_nothing_is_let_go(guarded: Guarded, engine: Engine) -> None:
    engine.mode = "flood"
    connection = UnixConnection(guarded.socket, 20)
    connection.request("POST", "/v1/chat/completions", json.dumps({"messages": HELLO, "stream": True}).encode())
    assert engine.gone.wait(8), "it keeps its seat"
    assert guarded.lines()[0]["outcome"] == "client gone"
    connection.close()


def test_half_a_body_is_not_waited_for_forever_and_no_length_is_refused(guarded: Guarded) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(guarded.socket))
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        sock.shutdown(socket.SHUT_WR)
        assert b" 408 " in sock.recv(100)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(guarded.socket))
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
        assert b" 411 " in sock.recv(100)


def test_draining_is_404_for_the_balancer_and_no_end_for_what_runs(guarded: Guarded, engine: Engine) -> None:
    engine.mode = "slow"
    done: list[tuple[int, Any]] = []
    thread = threading.Thread(target=lambda: done.append(guarded.post({"messages": HELLO, "stream": True})))
    thread.start()
    until(lambda: guarded.get("/health")[1]["in_flight"] == 1, 30, "the request runs")
    guarded.drain.touch()
    status, state = guarded.get("/health")
    assert (status, state["status"], state["in_flight"]) == (404, "draining", 1)
    engine.go.set()
    thread.join(10)
    assert done[0][0] == 200 and done[0][1] == CHUNK + LAST
    until(lambda: guarded.get("/health")[1]["in_flight"] == 0, 30, "its seat is free")
    guarded.drain.unlink()
    assert guarded.get("/health")[0] == 200
    own = guarded.socket.with_suffix(".drain")  # this engine's alone
    own.touch()
    assert guarded.get("/health")[0] == 404
    own.unlink()
    assert guarded.get("/health")[0] == 200


def test_limits_are_read_again_without_a_restart_and_a_broken_file_changes_nothing(guarded: Guarded) -> None:
    guarded.file.write_text("{broken")
    os.kill(guarded.child.pid, signal.SIGHUP)
    until(lambda: "old limits stay" in guarded.log.read_text(), 30, "it says so")
    assert guarded.post({"max_tokens": 150})[0] == 400
    guarded.file.write_text(json.dumps({**guarded.values, "max_tokens": 200}))
    os.kill(guarded.child.pid, signal.SIGHUP)
    until(lambda: guarded.post({"max_tokens": 150})[0] == 200, 30, "the new limit is in force")


def test_sigterm_finishes_what_is_in_hand(guarded: Guarded, engine: Engine) -> None:
    engine.mode = "slow"
    done: list[tuple[int, Any]] = []
    thread = threading.Thread(target=lambda: done.append(guarded.post({"messages": HELLO, "stream": True})))
    thread.start()
    until(lambda: engine.asked, 30, "the request runs")
    guarded.child.terminate()
    time.sleep(0.3)
    assert guarded.child.poll() is None
    engine.go.set()
    thread.join(10)
    assert done[0] == (200, CHUNK + LAST) and guarded.child.wait(5) == 0


# ---- pure ----


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_events_are_whole_however_the_stream_is_cut(cut: int) -> None:
    text = (CHUNK + LAST + USAGE).encode()
    events = Events()
    found = [event for start in range(0, len(text), cut) for event in events.feed(text[start : start + cut])]
    assert found == [CHUNK.encode(), LAST.encode(), USAGE.encode()] and events.rest == b""


def test_only_the_usage_event_is_hidden() -> None:
    entry = Entry("", "", "", "", 0.0)
    assert [pass_event(text.encode(), entry, usage_hidden=True) for text in (CHUNK, LAST, USAGE, "data: [DONE]\n\n")] == [
        True, True, False, True,
    ]  # fmt: skip
    assert pass_event(USAGE.encode(), entry, usage_hidden=False)
    assert pass_event(b'data: {"usage":{broken\n\n', entry, usage_hidden=True)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"engines": [{}]}', '{"engines": [3]}', '{"engines": []}'])
def test_settings_that_are_none(text: str) -> None:
    with pytest.raises(ValueError):
        parse_settings(text)


def test_hashes_of_prompts_are_noted_when_the_settings_say_so_and_only_then(tmp_path: Path, engine: Engine) -> None:
    noted = tmp_path / "prefixes.jsonl"
    guarded = Guarded(tmp_path, engine, prefix_log=str(noted))
    try:
        for _ in range(2):
            assert guarded.post({"messages": HELLO})[0] == 200
        until(lambda: noted.exists() and len(noted.read_text().splitlines()) == 2, 30, "two prompts were noted")
        first, second = (json.loads(line) for line in noted.read_text().splitlines())
        assert first["prefix"] == second["prefix"] and first["tokens"] == len(json.dumps(HELLO)) and PROMPT not in noted.read_text()
        guarded.file.write_text(json.dumps({**guarded.values, "prefix_log": ""}))
        guarded.child.send_signal(signal.SIGHUP)
        until(lambda: "read again" in guarded.log.read_text(), 30, "the settings were read again")
        assert guarded.post({"messages": HELLO})[0] == 200
        guarded.lines(3)
        assert len(noted.read_text().splitlines()) == 2
    finally:
        guarded.child.kill()
        guarded.child.wait()
