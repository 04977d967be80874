"""Draining a host: the mark, the wait for what is in hand, and the way back."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from laoka.serving import drain
from laoka.serving import guard as guard_module
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


class Two:
    """Two guards of one host, real ones, whose engines are not there: what they say of a mark is theirs all the same."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, folder / "drain"
        self.servers: list[UnixServer] = []
        for number, name in enumerate(("one", "two"), 1):
            url = f"http://127.0.0.1:800{number}"
            settings = guard_module.Settings(
                (guard_module.EngineSettings(str(folder / f"{name}.sock"), url, "m"),), 1, 1, 1, 1, 1, 1, 9, 1
            )
            made = guard_module.Guard(settings, "", self.mark)
            server = UnixServer(folder / f"{name}.sock", guard_module.make_handler(made, made.engines[0]))
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
            self.servers.append(server)

    def said(self) -> list[tuple[str, str]]:
        return [(item.socket, "draining" if item.status == 404 else "ill") for item in drain.states(self.folder)]


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    monkeypatch.setattr(drain, "SETTLE_S", 0.1)
    made = Two(tmp_path)
    yield made
    for server in made.servers:
        server.shutdown()
        server.server_close()


def test_one_engine_of_two_is_drained_by_its_own_mark(two: Two) -> None:
    mark = drain.mark_of("http://127.0.0.1:8002", folder=two.folder, mark=two.mark)
    assert mark == two.folder / "two.drain"
    assert drain.drain(2, lambda line: None, engine="http://127.0.0.1:8002", folder=two.folder, mark=mark) == 0
    assert two.said() == [("one", "ill"), ("two", "draining")] and not two.mark.exists()
    # The host's mark is for both; who takes the engine's own away leaves the host's, a person's, alone.
    two.mark.touch()
    assert two.said() == [("one", "draining"), ("two", "draining")]
    assert drain.undrain(2, engine="http://127.0.0.1:8002", folder=two.folder, mark=mark)
    assert two.said() == [("one", "draining"), ("two", "draining")] and two.mark.exists() and not mark.exists()


def test_the_hosts_mark_is_the_way_out_where_a_guard_knows_no_other(guard: Guard, two: Two, tmp_path: Path) -> None:
    assert [item.mark for item in drain.states(tmp_path)] == [None, tmp_path / "one.drain", tmp_path / "two.drain"]
    assert drain.mark_of("http://127.0.0.1:8009", folder=tmp_path, mark=guard.mark) == guard.mark
    assert drain.mark_of("http://127.0.0.1:8002", folder=tmp_path, mark=guard.mark) == tmp_path / "two.drain"
    assert drain.mark_of("", folder=tmp_path, mark=guard.mark) == guard.mark


def test_the_command_takes_one_out_and_off_brings_the_whole_host_back(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*words: str) -> int:
        return drain.main([*words, "--deadline-s", "0.3"], folder=two.folder, mark=two.mark)

    assert command("on", "--instance", "one") == 0 and two.said()[0] == ("one", "draining")
    assert command("status", "--instance", "one") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "one: draining, 0 request(s) in hand"
    assert command("on", "--instance", "three") == 2
    assert "no guard here answers for three; those that do: one, two" in capsys.readouterr().err
    assert command("on") == 0 and two.mark.exists()
    assert command("off") == 1  # in service, but their engines are not there
    assert two.said() == [("one", "ill"), ("two", "ill")] and list(two.folder.glob("*drain")) == []
    assert "in service, but not well yet" in capsys.readouterr().err
