"""Switching a link under a unit: one step, an answer or the way back, the time without an answer measured.

systemctl and journalctl are small stand-ins here; tests/served does it with the real ones and a real engine.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from laoka.process import run
from laoka.serving import switch as switch_module
from laoka.serving.switch import SwitchError, failure_in, main, served_at, servers_here, set_link, state_of, switch, target_of
from laoka.serving.unit_config import config_hash_command

# `restart` fails when what the link points to says "broken"; every call is noted.
SYSTEMCTL = """#!/bin/sh
echo "$*" >> {place}/calls
case $1 in
  is-active) test ! -e {place}/stopped ;;
  show)
    now=$(python3 -c 'import time; print(int(time.monotonic() * 1e6))')
    if grep -q broken {place}/current/kind; then echo ActiveState=activating; echo SubState=start-post; echo MainPID=0
    else echo ActiveState=active; echo SubState=running; echo MainPID=7; fi
    echo ExecMainStartTimestampMonotonic=$now; echo ExecMainExitTimestampMonotonic=$now; echo InvocationID=5eed ;;
esac
"""
# The old engine had a request in hand when it was stopped; only what the last start wrote is its failure.
JOURNALCTL = """#!/bin/sh
case "$*" in *_SYSTEMD_INVOCATION_ID=5eed*) ;; *) echo 'RuntimeError: cannot schedule new futures after shutdown' ;; esac
echo 'INFO starting'
echo 'ValueError: this model is broken'
echo 'unit.service: Failed'
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two good versions and a broken one; a server that answers as what `current` points to would."""
    for name, kind in (("one", "good"), ("two", "good"), ("three", "broken")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kind").write_text(kind)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, script in (("systemctl", SYSTEMCTL), ("journalctl", JOURNALCTL)):
        (tools / name).write_text(script.format(place=tmp_path) if name == "systemctl" else script)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    set_link(tmp_path / "current", "one")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            good = (tmp_path / "current" / "kind").read_text() == "good"
            choice = {"message": {"content": "5"}, "finish_reason": "stop"}
            body = json.dumps({"choices": [choice], "usage": {"completion_tokens": 1}}).encode()
            self.send_response(200 if good else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    config = tmp_path / "vllm.yaml"
    config.write_text(f'model: "/x"\nserved-model-name: "tiny"\nhost: 127.0.0.1\nport: {server.server_address[1]}\n')
    monkeypatch.setattr(switch_module, "SERVE_CONFIG", config)
    monkeypatch.setattr(switch_module, "ANSWER_DEADLINE_S", 2.0)
    monkeypatch.setattr(switch_module, "ASK_DEADLINE_S", 1.0)
    monkeypatch.setattr(switch_module, "ASK_EVERY_S", 0.05)
    monkeypatch.setattr(switch_module, "STAMPS", str(tmp_path))
    yield tmp_path
    with contextlib.suppress(OSError):
        server.shutdown()
        server.server_close()


def calls(place: Path, verb: str) -> int:
    text = (place / "calls").read_text() if (place / "calls").exists() else ""
    return sum(line.startswith(verb) for line in text.splitlines())


def test_a_running_unit_is_restarted_and_its_downtime_measured(place: Path) -> None:
    said: list[str] = []
    done = switch(place / "current", "two", previous=place / "previous", say=said.append)
    assert (target_of(place / "current"), target_of(place / "previous")) == ("two", "one")
    assert calls(place, "restart") == 1
    # This server answers all the time: what is measured is the pause between two questions.
    assert done.changed and done.downtime_s is not None and 0 < done.downtime_s < 2
    assert done.restart_s is not None and done.restart_s > 0
    assert any("without an answer" in line for line in said)


def test_a_version_that_does_not_come_up_is_undone(place: Path) -> None:
    set_link(place / "previous", "two")
    with pytest.raises(SwitchError, match=r"ValueError: this model is broken; it is back on one and answers after \d"):
        switch(place / "current", "three", previous=place / "previous")
    assert (target_of(place / "current"), target_of(place / "previous")) == ("one", "two")
    assert calls(place, "restart") == 2


def test_a_version_that_starts_but_does_not_answer_is_undone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (place / "bin" / "systemctl").read_text()
    (place / "bin" / "systemctl").write_text(script.replace("grep -q broken", "false &&"))
    with pytest.raises(SwitchError, match="no completion came within 2 s; it is back on one"):
        switch(place / "current", "three")
    assert target_of(place / "current") == "one"


def engine(folder: Path, script: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "vllm").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin" / "vllm").chmod(0o755)


BROKEN_ENGINE = "echo 'ImportError: libcudart.so.12: cannot open shared object file' >&2; exit 1"


def test_an_engine_that_can_not_tell_its_version_is_refused_before_anybody_is_cut_off(place: Path) -> None:
    engine(place / "one", "test $1 = --version")
    engine(place / "two", BROKEN_ENGINE)
    with pytest.raises(SwitchError, match=r"two can't even tell its version: ImportError: libcudart.*nothing was switched"):
        switch(place / "current", "two", previous=place / "previous")
    assert (target_of(place / "current"), target_of(place / "previous")) == ("one", None)
    assert calls(place, "restart") == 0
    engine(place / "two", "test $1 = --version")
    assert switch(place / "current", "two").changed


def test_a_trial_that_the_present_engine_fails_too_says_nothing(place: Path) -> None:
    engine(place / "one", BROKEN_ENGINE)
    engine(place / "two", BROKEN_ENGINE)
    assert switch(place / "current", "two").changed and calls(place, "restart") == 1


def test_neither_new_nor_old_comes_up(place: Path) -> None:
    (place / "one" / "kind").write_text("broken")
    with pytest.raises(SwitchError, match=r"came up neither with three .* nor after going back to one"):
        switch(place / "current", "three")
    assert target_of(place / "current") == "one"


def test_a_unit_that_does_not_run_is_left_alone(place: Path) -> None:
    (place / "stopped").touch()
    done = switch(place / "current", "three")
    assert done.changed and done.downtime_s is None and target_of(place / "current") == "three"
    assert calls(place, "restart") == 0


def test_nothing_is_done_twice(place: Path) -> None:
    assert not switch(place / "current", "one").changed
    assert calls(place, "restart") == 0


def test_what_is_not_there_is_not_switched_to(place: Path) -> None:
    with pytest.raises(SwitchError, match="nothing was switched"):
        switch(place / "current", "four")
    assert target_of(place / "current") == "one"


def test_a_deploy_that_follows_finds_the_configuration_noted(place: Path) -> None:
    """The stamp is renewed when it was right before the switch, and left when it was not: then a restart is still due."""
    paths = [str(place / "vllm.yaml"), str(place / "current")]
    stamp = place / "unit.service.config"

    def now() -> str:
        return run(["sh", "-c", config_hash_command(paths)], deadline_s=10).stdout.strip()

    stamp.write_text("\n".join([now(), *paths]) + "\n")
    before = now()
    switch(place / "current", "two")
    assert stamp.read_text().splitlines() == [now(), *paths] and now() != before
    stamp.write_text("\n".join(["0" * 64, *paths]) + "\n")
    switch(place / "current", "one")
    assert stamp.read_text().splitlines()[0] == "0" * 64


def test_the_command_line_tells_and_returns_the_outcome(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = str(place / "current")
    noted = place / "run" / "told"
    assert main(["--link", link, "--target", "two", "--told", str(noted)]) == 0
    assert re.search(r"answers with \S*two: [\d.]+ s without an answer, [\d.]+ s from switch to answer$", noted.read_text())
    assert main(["--link", link, "--target", "two", "--told", str(noted)]) == 0 and noted.read_text() == "\n"
    assert main(["--link", link, "--target", "three"]) == 1
    told = capsys.readouterr()
    assert f"{link} -> two" in told.out and "it is back on two" in told.err


def test_the_link_is_never_absent(place: Path) -> None:
    stop = threading.Event()
    missing: list[float] = []

    def watch() -> None:
        while not stop.is_set():
            if not (place / "current" / "kind").exists():
                missing.append(time.monotonic())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(200):
        set_link(place / "current", "two")
        set_link(place / "current", "one")
    stop.set()
    watcher.join()
    assert missing == []


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, "starting"),
        ({"ActiveState": "active", "SubState": "running"}, "up"),
        ({"ActiveState": "active", "ExecMainStartTimestampMonotonic": "9000000"}, "starting"),  # still the old one
        ({"ActiveState": "deactivating", "SubState": "stop-sigterm", "MainPID": "0"}, "starting"),
        ({"SubState": "auto-restart"}, "died"),
        ({"ActiveState": "failed", "SubState": "failed"}, "died"),
        ({"SubState": "start-post", "MainPID": "0", "ExecMainExitTimestampMonotonic": "12000000"}, "died"),
        ({"SubState": "start-post", "MainPID": "0", "ExecMainStartTimestampMonotonic": "0"}, "starting"),
        ({"ActiveState": "inactive", "SubState": "dead", "Job": "71"}, "starting"),
        ({"ActiveState": "inactive", "SubState": "dead", "Job": ""}, "died"),
    ],
)
def test_what_becomes_of_a_restart_is_read_from_the_units_properties(change: dict[str, str], state: str) -> None:
    shown = {"ActiveState": "activating", "SubState": "start", "MainPID": "9", "Job": "7",
             "ExecMainStartTimestampMonotonic": "11000000", "ExecMainExitTimestampMonotonic": "0", **change}  # fmt: skip
    assert state_of(shown, 10.0) == state


LOG = """\
INFO 12-02 06:09:16 [api_server.py:1] vLLM
(APIServer pid=2989) WARNING 12-02 06:09:16 [system_utils.py:255] errors like `OSError: [Errno 24] Too many open files`
Traceback (most recent call last):
{failure}
    For further information visit the page
unit.service: Main process exited, code=exited, status=1/FAILURE
"""


# Lines as vLLM 0.32.0 (CPU) and the sources of 0.33 print them.
@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, Model architectures ['NoSuch'] are not supported for now.",
            "ValidationError: 1 validation error for ModelConfig "
            "Value error, Model architectures ['NoSuch'] are not supported for now.",
        ),
        (
            "(EngineCore pid=7) ERROR 12-02 06:09:20 [core.py:900] ValueError: No available memory for the cache blocks.\n"
            "RuntimeError: Engine core initialization failed. See root cause above.",
            "ValueError: No available memory for the cache blocks.",
        ),
    ],
)
def test_the_cause_is_found_in_the_units_log(failure: str, told: str) -> None:
    assert failure_in(LOG.format(failure=failure)) == told


def test_a_log_without_an_exception_gives_its_last_line() -> None:
    assert failure_in("one\nvllm: error: unrecognized arguments: --nonsense\nqwen-serve.service: Failed\n").endswith("--nonsense")
    assert failure_in("") == ""


@pytest.mark.parametrize(
    ("text", "url", "name"),
    [
        ('served-model-name: "a b"\nport: 8001\n', "http://127.0.0.1:8001", "a b"),
        ("served-model-name: [qwen, other]\nport: 8000\n", "http://127.0.0.1:8000", "qwen"),
        ("", "http://127.0.0.1:8000", ""),
    ],
)
def test_where_the_server_answers_is_read_from_its_configuration(tmp_path: Path, text: str, url: str, name: str) -> None:
    (tmp_path / "c").write_text(text)
    server = served_at(tmp_path / "c")
    assert (server.url, server.model) == (url, name)
    assert served_at(tmp_path / "missing").url == "http://127.0.0.1:8000"


def test_instances_are_all_asked(tmp_path: Path) -> None:
    for name, port in (("a", 8001), ("b", 8002)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vllm.yaml").write_text(f"port: {port}\n")
    assert [server.url for server in servers_here(tmp_path / "vllm.yaml")] == ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]
    (tmp_path / "vllm.yaml").write_text("port: 8000\n")
    assert [server.url for server in servers_here(tmp_path / "vllm.yaml")] == ["http://127.0.0.1:8000"]
