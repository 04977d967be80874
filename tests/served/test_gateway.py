"""The gateway of a served host, from the outside: each refusal in OpenAI's form, streams unbroken, tokens in the log and no text,
and a server that goes on answering others whatever one client does. HAProxy, the guard and vLLM (on CPU) are real.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from laoka.sandbox import hosts
from laoka.sandbox.lab import HostFolder
from tests.hosts import until
from tests.served.client import CHAT, Gateway, Got, chat
from tests.served.serving import record, running_requests, show

pytestmark = pytest.mark.sandbox
SECRET = "xyzzy-plugh-4711"
SEATS, WAITING = 4, 16  # max-num-seqs of the sandbox's inventory, and four places in line for each
PARALLEL = 200


class Bystander(threading.Thread):
    """Somebody else who asks for a few tokens all the time, and tries again a little later when the line is full."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(daemon=True)
        self.gateway, self.over = gateway, threading.Event()
        self.waits: list[float] = []
        self.wrong: list[Got] = []

    def run(self) -> None:
        while not self.over.is_set():
            began = time.monotonic()
            while True:
                got = self.gateway.post(chat(max_tokens=4))
                if got.status != 429:
                    break
                time.sleep(0.3)
            self.waits.append(time.monotonic() - began)
            if got.status != 200 or got.json()["usage"]["completion_tokens"] != 4:
                self.wrong.append(got)
            self.over.wait(0.3)


@pytest.fixture(scope="module")
def host(served: HostFolder) -> HostFolder:
    return served


@pytest.fixture(scope="module")
def gateway(host: HostFolder) -> Gateway:
    return Gateway(host)


@pytest.fixture(scope="module", autouse=True)
def bystander(host: HostFolder, gateway: Gateway) -> Iterator[Bystander]:
    """Was served all the time, by an engine that never had to be started again."""
    until(lambda: gateway.get("/health").status == 200, 60, "the gateway has a server")
    before = (record(host), show(host, "NRestarts"))
    somebody = Bystander(gateway)
    somebody.start()
    yield somebody
    somebody.over.set()
    somebody.join(60)
    assert not somebody.wrong and len(somebody.waits) > 10, somebody.wrong[:3]
    assert (record(host), show(host, "NRestarts")) == before
    print(f"\nbystander: {len(somebody.waits)} answers, longest wait {max(somebody.waits):.2f} s")


def test_the_right_key_gets_an_answer_and_each_answer_has_its_id(gateway: Gateway) -> None:
    got = gateway.post(chat(max_tokens=5))
    assert got.status == 200 and got.json()["usage"]["completion_tokens"] == 5 and len(got.headers["x-request-id"]) == 36
    assert [model["id"] for model in gateway.get("/v1/models").json()["data"]] == ["tiny-qwen3"]
    assert gateway.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("key", ["", "wrong-but-long-enough", "x" * 5000])
def test_a_wrong_key_and_none(host: HostFolder, key: str) -> None:
    got = Gateway(host, key).post(chat())
    assert (got.status, got.code(), got.headers["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
    assert Gateway(host, key).get("/v1/models").status == 401


@pytest.mark.parametrize(
    "path",
    ["/invocations", "/metrics", "/tokenize", "/docs", "/openapi.json", "/pause", "/v1/../metrics", "/v1/chat/completions/", "/"],
)
def test_only_the_apis_paths_are_there(gateway: Gateway, path: str) -> None:
    for got in (gateway.get(path), gateway.post(chat(), path)):
        assert (got.status, got.code()) == (404, "unknown_path")


def test_the_engine_itself_listens_to_its_host_only(host: HostFolder) -> None:
    listening = hosts.execute(host, "ss -Htln 'sport = :8000'", check=True).stdout.split("\n")
    assert [line.split()[3] for line in listening if line] == ["127.0.0.1:8000"]
    with pytest.raises(TimeoutError):  # the firewall drops what asks from elsewhere
        socket.create_connection((host.address, 8000), 5)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"{oops", "invalid_json"),
        (b"[1, 2", "invalid_json"),
        (b'"text"', "invalid_json"),
        (json.dumps(chat("x" * (8 * 4096 + 1))).encode(), "context_length_exceeded"),  # the gateway's limit in characters
        (json.dumps(chat(max_tokens=3901)).encode(), "max_tokens_too_large"),
        (json.dumps(chat(n=5)).encode(), "too_many_choices"),
    ],
)
def test_a_request_that_is_none_or_asks_for_too_much(gateway: Gateway, raw: bytes, code: str) -> None:
    got = gateway.ask("POST", CHAT, raw)
    assert (got.status, got.code()) == (400, code) and got.seconds < 5


def test_a_prompt_over_the_models_context_is_refused_by_the_engines_own_count(gateway: Gateway) -> None:
    got = gateway.post(chat("x" * 5000, max_tokens=4))  # one token a byte
    assert got.status == 400 and "4096" in got.json()["error"]["message"]
    got = gateway.stream(chat("x" * 5000, max_tokens=4))
    assert got.status == 400 and "4096" in got.body


def test_methods_and_lengths(gateway: Gateway) -> None:
    assert gateway.get(CHAT).code() == gateway.post({}, "/v1/models").code() == "method_not_allowed"
    with gateway.raw() as sock:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {gateway.key}\r\n"
        sock.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n".encode())
        assert b"411" in sock.recv(200)


def test_a_body_of_100_mb_is_refused_without_being_taken(gateway: Gateway) -> None:
    size, sent, began = 100 * 1024 * 1024, 0, time.monotonic()
    with gateway.raw() as sock:
        sock.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {gateway.key}\r\nContent-Length: {size}\r\n\r\n".encode()
        )
        piece = b"x" * 65536
        try:
            while sent < size:
                sock.sendall(piece)
                sent += len(piece)
        except OSError:
            pass  # it was told long ago
        try:
            told = sock.recv(4096).decode()
        except OSError:
            told = ""  # the answer was lost to the reset that ended the flood
    assert not told or (" 413 " in told and "request_too_large" in told)
    assert sent < size and time.monotonic() - began < 20
    # A client that asks before it sends, as curl does, reads the answer at once.
    with gateway.raw() as sock:
        sock.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {gateway.key}\r\nContent-Length: {size}\r\n"
            "Expect: 100-continue\r\n\r\n".encode()
        )
        told = sock.recv(4096).decode()
    assert " 413 " in told and "request_too_large" in told


def test_a_stream_comes_event_by_event_and_ends_as_it_should(gateway: Gateway) -> None:
    got = gateway.stream(chat(max_tokens=2000))  # so many that a late first token on a busy machine is still an early one
    assert got.status == 200 and got.headers["content-type"].startswith("text/event-stream")
    assert got.events[-1][1] == "data: [DONE]"
    contents = [json.loads(event[6:]) for _, event in got.events[:-1]]
    assert all(content["choices"] for content in contents), "an event that was not asked for"
    first, last = got.events[1][0], got.events[-1][0]
    assert len(got.events) > 100 and first < last / 2, "the stream was held back"


def log_line(host: HostFolder, request_id: str) -> dict[str, Any]:
    """The line of a request in the guard's access log."""
    command = f"journalctl -t qwen-guard -o cat --no-pager | grep {request_id}"
    found: dict[str, Any] = json.loads(until(lambda: hosts.execute(host, command).stdout, 60, "its line is in the log"))
    return found


def test_the_log_has_names_and_tokens_and_no_text(host: HostFolder, gateway: Gateway) -> None:
    got = gateway.post(chat(f"say {SECRET}", max_tokens=6))
    streamed = gateway.stream(chat(f"say {SECRET}", max_tokens=7))
    assert got.status == streamed.status == 200
    whole, stream = (log_line(host, answer.headers["x-request-id"]) for answer in (got, streamed))
    assert (whole["client"], whole["status"], whole["finish"]) == ("lab", 200, "length")
    usage = got.json()["usage"]
    assert (whole["prompt_tokens"], whole["completion_tokens"]) == (usage["prompt_tokens"], 6) and usage["completion_tokens"] == 6
    assert (stream["stream"], stream["prompt_tokens"], stream["completion_tokens"]) == (True, usage["prompt_tokens"], 7)
    everything = f"journalctl --no-pager -o export | grep -ac -e {SECRET} -e {gateway.key}"
    assert hosts.execute(host, everything).stdout.strip() == "0"


def test_200_at_once_are_all_answered(gateway: Gateway) -> None:
    gate = threading.Barrier(PARALLEL)

    def one(_number: int) -> Got:
        gate.wait(60)
        return gateway.post(chat(max_tokens=16), deadline_s=120)

    began = time.monotonic()
    with ThreadPoolExecutor(PARALLEL) as pool:
        answers = list(pool.map(one, range(PARALLEL)))
    seconds = time.monotonic() - began
    counted = Counter(got.status for got in answers)
    # One seat may be the host's own: its health checks ask for a completion too.
    assert set(counted) <= {200, 429} and counted[200] >= SEATS + WAITING - 1
    assert all(got.json()["usage"]["completion_tokens"] == 16 for got in answers if got.status == 200)
    assert all(got.code() == "too_many_requests" and got.headers["retry-after"] for got in answers if got.status == 429)
    slowest = max(got.seconds for got in answers)
    told = f"{counted[200]} answered, {counted[429]} told to come again"
    print(f"\n{PARALLEL} at once: {told}; {seconds:.1f} s in all, slowest {slowest:.1f} s")


def test_clients_that_go_away_do_not_keep_the_engine_busy(host: HostFolder, gateway: Gateway) -> None:
    def leave(_number: int) -> int:
        return gateway.stream(chat(max_tokens=3900), stop_after=3).status

    with ThreadPoolExecutor(SEATS) as pool:
        assert set(pool.map(leave, range(2 * SEATS))) == {200}
    until(lambda: running_requests(host) <= 1, 60, "nobody but the bystander is worked for")


def test_clients_that_read_slowly_get_their_stream_and_hold_up_nobody(gateway: Gateway, bystander: Bystander) -> None:
    body = json.dumps({**chat(max_tokens=1500), "stream": True}).encode()

    def read_slowly(_number: int) -> bytes:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(60)
            sock.connect((gateway.address, gateway.port))
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {gateway.key}\r\nConnection: close\r\n"
            sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            got, began = b"", time.monotonic()
            while piece := sock.recv(512 if time.monotonic() - began < 5 else 1 << 20):
                got += piece
                if time.monotonic() - began < 5:
                    time.sleep(0.05)
            return got

    served_before = len(bystander.waits)
    with ThreadPoolExecutor(SEATS - 1) as pool:
        streams = list(pool.map(read_slowly, range(SEATS - 1)))
    assert all(b" 200 " in stream[:20] and b"data: [DONE]" in stream for stream in streams)
    assert len(bystander.waits) >= served_before + 3


def test_a_client_that_sends_slowly_takes_no_seat(host: HostFolder, gateway: Gateway) -> None:
    slow = [gateway.raw() for _ in range(2 * SEATS)]
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {gateway.key}\r\n"
    try:
        for sock in slow:
            sock.sendall(f"{head}Content-Length: 500\r\n\r\n{{".encode())
        got = gateway.post(chat(max_tokens=2))
        assert got.status == 200 and got.seconds < 20
    finally:
        for sock in slow:
            sock.close()
