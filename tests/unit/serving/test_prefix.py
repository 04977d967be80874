"""Hashes of prompts: nothing of the text in them, the same prefix the same hashes; what is shared and what is misplaced."""

from __future__ import annotations

import http.server
import json
import random
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from laoka.cli.main import cli
from laoka.serving.guard import parse_settings
from laoka.serving.prefix_insight import analyse
from laoka.serving.prefix_log import Noted, covered, marks, note, parse_line
from laoka.serving.prefix_noter import Noter, given_ids, question
from roles.gateway.config import guard_settings, limits

KEY = b"k" * 32
RNG = random.Random(7)


def words(count: int) -> list[int]:
    return [RNG.randrange(1000, 50000) for _ in range(count)]


SYSTEM, DOCUMENT = words(512), words(640)


def noted(*prompts: list[int], run: str = "r") -> list[Noted]:
    return [note(prompt, KEY, run, float(number)) for number, prompt in enumerate(prompts)]


def test_two_prompts_share_hashes_as_far_as_they_are_the_same() -> None:
    one, two = noted([*SYSTEM, *words(100)], [*SYSTEM, *words(100)])
    same = sum(a == b for a, b in zip(one.prefix, two.prefix, strict=True))
    assert covered(same - 1) == 512 and one.prefix[:same] == two.prefix[:same]


def test_the_log_has_nothing_of_the_prompt_and_another_key_gives_other_hashes() -> None:
    one = note(SYSTEM, KEY, "r", 1.0)
    assert set(json.loads(one.line())) == {"run", "time_s", "tokens", "prefix", "chunks"}
    assert all(len(digest) == 16 for digest in one.prefix)
    assert not set(one.prefix) & set(note(SYSTEM, b"x" * 32, "r", 1.0).prefix)
    assert parse_line(one.line()) == one


def test_the_same_text_has_the_same_chunks_wherever_it_stands() -> None:
    here, there = (dict(item.chunks) for item in noted([*words(13), *DOCUMENT], [*words(101), *DOCUMENT]))
    common = sum(length for digest, length in here.items() if digest in there)
    assert common > 0.7 * len(DOCUMENT)


def test_a_shared_beginning_is_found_with_what_it_saves() -> None:
    found = analyse(noted(*([*SYSTEM, *words(64)] for _ in range(5))), block_tokens=16)
    assert found.requests == 5 and found.tokens == 5 * 576
    assert found.reusable_tokens == 4 * 512 and found.advice == ("keep",)
    assert (found.shared[0].tokens, found.shared[0].requests, found.shared[0].saved_tokens) == (512, 5, 4 * 512)
    # A cache of large blocks keeps whole ones only.
    assert analyse(noted(*([*SYSTEM, *words(64)] for _ in range(5))), block_tokens=384).reusable_tokens == 4 * 384


def test_something_new_at_the_front_is_told_to_move() -> None:
    found = analyse(noted(*([*words(20), *SYSTEM, *DOCUMENT] for _ in range(6))))
    assert found.reusable_tokens == 0 and found.misplaced_share > 0.5 and found.advice[0] == "changes_first"


def test_something_new_in_the_middle_is_told_to_move() -> None:
    found = analyse(noted(*([*SYSTEM, *words(20), *DOCUMENT] for _ in range(6))))
    assert found.advice == ("reorder", "keep") and 0.3 < found.misplaced_share < 0.6 and found.reusable_share > 0.3


def test_prompts_with_nothing_in_common_and_too_few_of_them() -> None:
    assert analyse(noted(*(words(300) for _ in range(5)))).advice == ("nothing_shared",)
    assert analyse(noted(words(300))).advice == ("few",) and analyse([]).requests == 0
    # Hashes of another run of the guard have another key.
    assert analyse([*noted(SYSTEM, run="a"), *noted(SYSTEM, run="b")]).reusable_tokens == 0


def test_nested_beginnings_are_told_each_as_far_as_all_go_together() -> None:
    branch = [*SYSTEM, *words(128)]
    found = analyse(noted([*branch, *words(32)], [*branch, *words(32)], [*SYSTEM, *words(200)]))
    assert [(item.tokens, item.requests) for item in found.shared] == [(512, 3), (640, 2)]


@given(st.integers(0, 70000))
def test_marks_are_where_their_hashes_say(tokens: int) -> None:
    found = list(marks(tokens))
    assert [covered(index) for index in range(len(found))] == found and all(mark <= tokens for mark in found)
    assert not found or tokens - found[-1] < 256 or found[-1] == 65536


@given(st.text(max_size=200))
def test_no_line_makes_it_fail(line: str) -> None:
    assert parse_line(line) is None or isinstance(parse_line(line), Noted)


def test_what_the_engine_is_asked() -> None:
    chat = {"model": "x", "messages": [{"role": "user", "content": "hi"}], "tools": [], "temperature": 1, "stream": True}
    assert question(chat, "m") == {"model": "m", "messages": chat["messages"], "tools": []}
    assert question({"prompt": "text"}, "m") == {"model": "m", "prompt": "text"} and question({"prompt": ["a", "b"]}, "m") is None
    assert given_ids({"prompt": [1, 2]}) == [1, 2] and given_ids({"prompt": "x"}) is None and given_ids({"prompt": [-1]}) is None


@pytest.fixture
def engine() -> Iterator[tuple[int, list[Any]]]:
    """Answers /tokenize as vLLM does, a byte a token."""
    asked: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            tokens = list(json.dumps(body.get("messages") or body["prompt"]).encode())
            data = json.dumps({"count": len(tokens), "tokens": tokens}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server.server_address[1], asked
    server.shutdown()
    server.server_close()


def test_the_noter_writes_hashes_of_what_passes(engine: tuple[int, list[Any]], tmp_path: Path) -> None:
    port, asked = engine
    log = tmp_path / "prefixes.jsonl"
    noter = Noter(log, "m", lambda: HTTPConnection("127.0.0.1", port, timeout=5), dict)
    secret = "xyzzy-plugh-4711 " * 8
    for number in range(3):
        noter.take(json.dumps({"messages": [{"role": "user", "content": secret + str(number)}]}).encode())
    noter.take(b"no json")
    noter.take(json.dumps({"prompt": list(range(40))}).encode())
    end = time.monotonic() + 10
    while not log.exists() or len(log.read_text().splitlines()) < 4:
        assert time.monotonic() < end, "the noter wrote nothing"
        time.sleep(0.02)
    text = log.read_text()
    found = [parse_line(line) for line in text.splitlines()]
    assert all(found) and "xyzzy" not in text and len(asked) == 3 and {path for path, _ in asked} == {"/tokenize"}
    assert log.stat().st_mode & 0o777 == 0o600 and noter.dropped == 1
    done = CliRunner().invoke(cli, ["cache", "prompts", str(log), "--json"], standalone_mode=False)
    assert done.return_value == 0 and json.loads(done.output)["prompts"]["shared"][0]["requests"] == 3


@pytest.mark.parametrize(
    "content", [b"\x00\xff\x1f\x8b", b"ERROR: a log\r\n", b"{}", b"[]\n[]", b'{"tokens": 1e999}', b"[" * 100000]
)
def test_a_file_that_the_guard_did_not_write_is_told(tmp_path: Path, content: bytes) -> None:
    log = tmp_path / "prefixes.jsonl"
    log.write_bytes(content)
    done = CliRunner().invoke(cli, ["cache", "prompts", str(log)])
    assert done.exit_code != 0 and "no line of it is one that the guard notes" in done.output
    log.write_bytes(b"")
    assert CliRunner().invoke(cli, ["cache", "prompts", str(log)], standalone_mode=False).return_value == 0, "nothing noted yet"


def test_a_line_may_be_cut_off(tmp_path: Path) -> None:
    log = tmp_path / "prefixes.jsonl"
    line = json.dumps({"run": "r", "time_s": 1.0, "tokens": 40, "prefix": ["a", "b"], "chunks": [["c", 20]]})
    log.write_text(f'{line}\r\n\n{{"run": "r", "time_s": 1e999, "tokens": 1e999\n{line}\n{line[:-9]}')
    done = CliRunner().invoke(cli, ["cache", "prompts", str(log), "--json"], standalone_mode=False)
    assert json.loads(done.output)["prompts"]["requests"] == 2


def test_too_many_waiting_are_dropped_not_kept(tmp_path: Path) -> None:
    def nowhere() -> HTTPConnection:
        time.sleep(5)
        raise OSError

    noter = Noter(tmp_path / "log", "m", nowhere, dict)
    for _ in range(100):
        noter.take(b'{"prompt": "x"}')
    assert noter.dropped >= 30


def test_it_is_off_unless_the_inventory_asks_for_it() -> None:
    own = limits({"max-model-len": 4096}, max_tokens=5)
    assert parse_settings(guard_settings(own, [])).prefix_log == ""
    assert parse_settings(guard_settings(own, [], prefix_log=True)).prefix_log == "/var/lib/qwen-guard/prefixes.jsonl"
    old = json.loads(guard_settings(own, []))
    del old["prefix_log"]  # a file of the release before
    assert parse_settings(json.dumps(old)).prefix_log == ""
