"""Draining a host: the mark, the wait for what is in hand, and the way back."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from laoka.serving import drain
from laoka.serving.unix_http import UnixServer


class Guard:
    """Stands for a guard: its answer and how many requests it has in hand."""

    def __init__(self, folder: Path) -> None:
        self.in_hand, self.well, self.mark = 0, True, folder / "drain"
        guard = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status = 404 if guard.mark.exists() else 200 if guard.well else 503
                body = json.dumps({"status": "x", "in_flight": guard.in_hand, "engine": "http://127.0.0.1:8001"}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = UnixServer(folder / "main.sock", Handler)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


@pytest.fixture
def guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    monkeypatch.setattr(drain, "SETTLE_S", 0.3)
    made = Guard(tmp_path)
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_it_waits_for_what_is_in_hand(guard: Guard, tmp_path: Path) -> None:
    guard.in_hand = 2
    said: list[str] = []
    threading.Timer(1.0, lambda: setattr(guard, "in_hand", 0)).start()
    assert drain.drain(10, said.append, folder=tmp_path, mark=guard.mark) == 0
    assert guard.mark.exists() and said == ["draining: 2 request(s) in hand"]
    assert drain.states(tmp_path)[0].status == 404


def test_it_does_not_wait_for_ever(guard: Guard, tmp_path: Path) -> None:
    guard.in_hand = 1
    assert drain.drain(0.5, lambda line: None, folder=tmp_path, mark=guard.mark) == 1


def test_a_host_without_a_guard_is_not_marked(tmp_path: Path) -> None:
    (tmp_path / "dead.sock").touch()
    assert drain.drain(5, lambda line: None, folder=tmp_path, mark=tmp_path / "drain") == 0
    assert not (tmp_path / "drain").exists()


def test_it_is_back_when_the_guard_finds_its_engine_well(guard: Guard, tmp_path: Path) -> None:
    guard.mark.touch()
    guard.well = False
    assert not drain.undrain(0.5, folder=tmp_path, mark=guard.mark)
    guard.mark.touch()
    threading.Timer(0.5, lambda: setattr(guard, "well", True)).start()
    assert drain.undrain(10, folder=tmp_path, mark=guard.mark) and not guard.mark.exists()
    assert drain.undrain(0.1, folder=tmp_path, mark=guard.mark)  # nothing to take back


def test_only_the_engine_that_was_changed_is_waited_for(guard: Guard, tmp_path: Path) -> None:
    guard.well = False
    guard.mark.touch()
    assert not drain.undrain(0.5, engine="http://127.0.0.1:8001", folder=tmp_path, mark=guard.mark)
    guard.mark.touch()
    assert drain.undrain(0.5, engine="http://127.0.0.1:8002", folder=tmp_path, mark=guard.mark) and not guard.mark.exists()


def test_a_guard_that_is_gone_is_not_taken_for_one_of_another_engine(guard: Guard, tmp_path: Path) -> None:
    guard.server.server_close()
    assert drain.states(tmp_path)[0].status is None
    guard.mark.touch()
    assert not drain.undrain(0.5, engine="http://127.0.0.1:8001", folder=tmp_path, mark=guard.mark)
