"""Health by completion: every kind of sick server gets its own name, and no question outlasts its deadline."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.serving import completion
from laoka.serving.completion import Server, judge, judge_text

OK_BODY = {
    "choices": [{"message": {"role": "assistant", "content": "5"}, "finish_reason": "stop"}],
    "usage": {"completion_tokens": 2},
}


class FakeServer:
    """A server whose answers a test sets: a status and a body by path, or a callable that does the answering."""

    def __init__(self) -> None:
        self.health: int | Callable[[http.server.BaseHTTPRequestHandler], None] = 200
        self.chat: tuple[int, object] | Callable[[http.server.BaseHTTPRequestHandler], None] = (200, OK_BODY)
        self.metrics: Callable[[], str] = str
        self.asked: list[dict[str, object]] = []
        self.keys: list[str | None] = []
        self.released = threading.Event()
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self.answer(200, fake.metrics().encode())
                elif callable(fake.health):
                    fake.health(self)
                else:
                    self.answer(fake.health, b"")

            def do_POST(self) -> None:
                fake.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                fake.keys.append(self.headers.get("Authorization"))
                if callable(fake.chat):
                    fake.chat(self)
                else:
                    status, body = fake.chat
                    self.answer(status, body.encode() if isinstance(body, str) else json.dumps(body).encode())

            def answer(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Quiet(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # clients that give up are what these tests are about

        self.server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def hang(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        """Answer nothing until the test is over."""
        self.released.wait(20)

    def drip(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        """Send a byte now and then: no read ever times out."""
        handler.send_response(200)
        handler.end_headers()
        while not self.released.wait(0.05):
            handler.wfile.write(b" ")

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# ---- the words ----


@pytest.mark.parametrize(
    "answer",
    [
        "5",
        "5.",
        "2 + 3 = 5",
        "五",
        "...",
        "The answer is 5.",
        "ha ha ha ha",
        "好的，答案是五。",
        "😀😀",
        "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12",
    ],
)
def test_answers_that_are_answers(answer: str) -> None:
    assert judge_text(answer) == ("healthy", "")


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("!!!!!!!!!!!!!!!!", "garbage"),  # what NaN logits decode to: token 0 of Qwen's vocabulary
        ("! ! ! !", "garbage"),
        ("\ufffd\ufffd\ufffda\ufffd", "garbage"),
        ("\x00\x01\x02\x03", "garbage"),
        ("", "empty"),
        (" \n\t ", "empty"),
        ("the the the the the the the the the ", "repeating"),
        ("Sure! " + "I can help. " * 8, "repeating"),
        ("你好你好你好你好你好你好你好你好你好你好你好你好", "repeating"),
    ],
)
def test_answers_that_are_none(answer: str, kind: str) -> None:
    assert judge_text(answer)[0] == kind


@given(st.text(max_size=400))
def test_no_text_breaks_the_judge(answer: str) -> None:
    kind, why = judge_text(answer)
    assert (kind == "healthy") == (why == "")


@given(st.text(alphabet=st.characters(categories=["P", "S"]), min_size=1, max_size=1), st.integers(4, 200))
def test_one_sign_for_the_whole_answer_is_never_healthy(sign: str, times: int) -> None:
    assert judge_text(sign * times)[0] == "garbage"


# ---- the HTTP answer ----


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (200, json.dumps(OK_BODY), "healthy", ""),
        (503, "<html><body><h1>503 Service Unavailable</h1></body></html>", "not_ready", "Service Unavailable"),
        (404, '{"error": {"message": "The model `x` does not exist."}}', "refused", "does not exist"),
        (401, '{"error": "Unauthorized"}', "refused", "Unauthorized"),
        (400, '{"detail": "bad"}', "refused", "bad"),
        (500, "", "server_error", "no words"),
        (302, "", "server_error", "302"),
        (200, "hello", "not_openai", "hello"),
        (200, '{"choices": []}', "not_openai", ""),
        (200, '{"choices": [{"message": null}]}', "not_openai", ""),
        (200, "[1]", "not_openai", ""),
    ],
)
def test_judge(status: int, body: str, kind: str, words: str) -> None:
    verdict = judge(status, body, 0.1)
    assert verdict.kind == kind
    assert words in verdict.detail


def chat(content: str | None, finish: str = "stop", tokens: int = 3, **message: str) -> str:
    choice = {"message": {"content": content, **message}, "finish_reason": finish}
    return json.dumps({"choices": [choice], "usage": {"completion_tokens": tokens}})


def test_thinking_is_a_completion_too() -> None:
    assert judge(200, chat(None, "length", reasoning="The user wants the sum of"), 0.1).kind == "healthy"
    assert judge(200, chat("", "length", reasoning_content="!!!!!!!!!!"), 0.1).kind == "garbage"


def test_an_engine_that_aborts_is_not_healthy() -> None:
    assert judge(200, chat("5", "abort"), 0.1).kind == "server_error"
    assert judge(200, chat("5", "abort"), 0.1, text_too=False).kind == "server_error"


def test_words_unjudged_only_asks_for_tokens() -> None:
    assert judge(200, chat("!!!!!!!!"), 0.1, text_too=False).kind == "healthy"
    assert judge(200, chat(""), 0.1, text_too=False).kind == "healthy"
    assert judge(200, chat("", tokens=0), 0.1, text_too=False).kind == "empty"
    assert not judge(200, chat("!!!!!!!!"), 0.1, text_too=False).text_judged


@given(st.integers(100, 599), st.text(max_size=300))
def test_no_answer_breaks_the_judge_and_none_is_healthy_by_accident(status: int, body: str) -> None:
    assert judge(status, body, 0.1).kind != "healthy"


@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3) | inner))
def test_no_json_breaks_the_judge(value: object) -> None:
    for body in ({"choices": value}, {"choices": [value]}, {"choices": [{"message": value}]}, {"error": value}, value):
        judge(200, json.dumps(body), 0.1)
        judge(400, json.dumps(body), 0.1)


# ---- asking ----


def test_ask_a_healthy_server(fake: FakeServer) -> None:
    verdict = completion.ask(Server(fake.url + "/v1", "qwen", "s3cret"), deadline_s=5)
    assert verdict.healthy
    assert (verdict.answer, verdict.completion_tokens) == ("5", 2)
    assert fake.asked[0]["model"] == "qwen"
    assert fake.keys == ["Bearer s3cret"]
    assert "s3cret" not in repr(verdict)


def test_frozen_engine_is_told_from_a_dead_port(fake: FakeServer) -> None:
    fake.chat = fake.hang
    started = time.monotonic()
    assert completion.ask(Server(fake.url, "m"), deadline_s=1).kind == "engine_frozen"
    fake.health = 503
    assert completion.ask(Server(fake.url, "m"), deadline_s=1).kind == "timed_out"
    assert time.monotonic() - started < 3
    assert completion.ask(Server(f"http://127.0.0.1:{closed_port()}", "m"), deadline_s=2).kind == "port_closed"
    assert completion.ask(Server("http://no-such-host.invalid:1", "m"), deadline_s=2).kind in ("unreachable", "timed_out")


def test_a_server_that_drips_does_not_outlast_the_deadline(fake: FakeServer) -> None:
    fake.chat = fake.drip
    fake.health = fake.drip
    started = time.monotonic()
    assert completion.ask(Server(fake.url, "m"), deadline_s=1).kind == "timed_out"
    assert time.monotonic() - started < 2


def test_an_answer_that_does_not_end_is_cut(fake: FakeServer) -> None:
    def flood(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(b"x" * 65536)

    fake.chat = flood
    assert completion.ask(Server(fake.url, "m"), deadline_s=5).kind == "not_openai"


def test_a_connection_that_breaks_is_the_servers_error(fake: FakeServer) -> None:
    fake.chat = lambda handler: handler.connection.shutdown(socket.SHUT_RDWR)
    assert completion.ask(Server(fake.url, "m"), deadline_s=3).kind == "server_error"


def test_a_redirect_is_not_followed(fake: FakeServer) -> None:
    def elsewhere(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(307)
        handler.send_header("Location", "http://127.0.0.1:9/steal")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    fake.chat = elsewhere
    assert completion.ask(Server(fake.url, "m", "key"), deadline_s=3).kind == "server_error"


def test_the_environments_proxy_is_not_used(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{closed_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    assert completion.ask(Server(fake.url, "m"), deadline_s=3).healthy


def test_wait_goes_on_until_the_completion_is_there(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "POLL_S", 0.05)
    answers = iter([503, 503, 200, 200])
    fake.health = lambda handler: handler.answer(next(answers), b"")  # type: ignore[attr-defined]
    bodies = iter([(500, "loading"), (200, OK_BODY)])
    fake.chat = lambda handler: handler.answer(*(lambda s, b: (s, json.dumps(b).encode()))(*next(bodies)))  # type: ignore[attr-defined]
    told: list[str] = []
    assert completion.wait(Server(fake.url, "m"), deadline_s=10, progress=told.append).healthy
    assert any("not_ready" in line for line in told)
    assert any("server_error" in line for line in told)


def test_wait_gives_up_on_a_wrong_name_and_at_its_deadline(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "POLL_S", 0.05)
    fake.chat = (404, {"error": {"message": "no such model"}})
    started = time.monotonic()
    assert completion.wait(Server(fake.url, "m"), deadline_s=60).kind == "refused"
    assert time.monotonic() - started < 5
    started = time.monotonic()
    assert completion.wait(Server(f"http://127.0.0.1:{closed_port()}", "m"), deadline_s=0.5).kind == "port_closed"
    assert time.monotonic() - started < 1.5


# ---- the command ----


def test_the_command(fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, stamp = tmp_path / "key", tmp_path / "run" / "stamp"
    key.write_text("k1\n")
    common = ["--url", fake.url, "--model", "m", "--api-key-file", str(key)]
    assert completion.main(["ask", *common, "--question", "Q?", "--max-tokens", "3", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["kind"], shown["healthy"], shown["answer"], shown["completion_tokens"]) == ("healthy", True, "5", 2)
    assert fake.asked[0]["messages"] == [{"role": "user", "content": "Q?"}]
    assert fake.asked[0]["max_tokens"] == 3
    assert fake.keys == ["Bearer k1"]
    assert completion.main(["wait", *common, "--deadline-s", "5", "--stamp", str(stamp), "--stamp-text", "v7"]) == 0
    assert stamp.read_text() == "v7\n"
    assert "asking for a completion" in capsys.readouterr().err


def test_the_command_fails_by_name(fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.chat = (200, json.loads(chat("!!!!!!!!")))
    stamp = tmp_path / "stamp"
    assert completion.main(["ask", "--url", fake.url, "--model", "m"]) == 1
    assert "garbage:" in capsys.readouterr().err
    assert completion.main(["ask", "--url", fake.url, "--model", "m", "--no-judge-text"]) == 0
    assert "words not judged" in capsys.readouterr().out
    assert completion.main(["wait", "--url", fake.url, "--model", "m", "--deadline-s", "0.3", "--stamp", str(stamp)]) == 1
    assert "garbage:" in capsys.readouterr().err
    assert not stamp.exists()


@pytest.mark.parametrize(
    "words", [["--url", "nonsense", "--model", "m"], ["--url", "http://127.0.0.1:9", "--model", "m", "--api-key-file", "/no/such"]]
)
def test_the_command_that_can_not_ask(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert completion.main(["ask", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("could not ask: ")
    assert "Traceback" not in error
