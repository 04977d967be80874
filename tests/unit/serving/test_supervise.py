"""qwen-serve's main process: ready by a real completion, ended by name when the engine dies, freezes or never starts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from laoka.serving.completion import Server, metrics_text
from laoka.serving.progress import parse_progress
from laoka.serving.record import Record, read_record
from laoka.serving.supervise import engine_environment, look_every_s, process_states, stopped_record
from tests.hosts import until
from tests.unit.serving.test_completion import closed_port

FAKE = Path(__file__).with_name("fake_engine.py")


class Unit:
    """The supervisor as systemd would run it, with a socket that hears what it notifies."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.heard = folder, closed_port(), ""
        self.record_file, self.control = folder / "state.json", folder / "control"
        self.control.write_text("ok")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(folder / "notify"))
        self.socket.setblocking(False)
        self.child: subprocess.Popen[str] | None = None

    def start(self, *words: str, frozen_after_s: float = 0, deadline_s: float = 20, env: dict[str, str] | None = None,
              command: tuple[str, ...] = (sys.executable, str(FAKE))) -> subprocess.Popen[str]:  # fmt: skip
        argv = [
            sys.executable, "-m", "laoka.serving.supervise", "run", "--unit", "qwen-serve.service",
            "--url", f"http://127.0.0.1:{self.port}", "--model", "m",
            *(["--start-deadline-s", str(deadline_s)] if deadline_s else []),
            "--frozen-after-s", str(frozen_after_s), "--record", str(self.record_file), "--",
            *command, str(self.port), str(self.control), *words,
        ]  # fmt: skip
        environment = {**os.environ, "NOTIFY_SOCKET": str(self.folder / "notify"), **(env or {})}
        self.child = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return self.child

    def told(self) -> str:
        """Everything that was notified so far."""
        while True:
            try:
                self.heard += self.socket.recv(65536).decode() + "\n"
            except BlockingIOError:
                return self.heard

    def ready(self) -> None:
        until(lambda: "READY=1" in self.told(), 60, "it says that it is ready")

    def record(self) -> Record:
        found = read_record(self.record_file)
        assert found is not None
        return found

    def ended(self) -> tuple[int, str]:
        """Exit status and what went to the journal."""
        assert self.child is not None
        _, err = self.child.communicate(timeout=20)
        return self.child.returncode, err


@pytest.fixture
def unit(tmp_path: Path) -> Iterator[Unit]:
    made = Unit(tmp_path)
    yield made
    made.socket.close()
    if made.child is not None:
        made.child.kill()
        made.child.communicate()


def engine_pid(unit: Unit) -> int:
    assert unit.child is not None
    children = Path(f"/proc/{unit.child.pid}/task/{unit.child.pid}/children").read_text().split()
    return int(children[0])


def test_ready_only_when_a_completion_came_back_and_stopped_when_asked(unit: Unit) -> None:
    unit.control.write_text("hang")
    child = unit.start()
    until(lambda: "asking for a completion" in unit.told(), 60, "it asks for a completion")
    assert "READY=1" not in unit.told() and unit.record().state == "starting"
    unit.control.write_text("ok")
    unit.ready()
    ready = unit.record()
    assert (ready.state, ready.pid, ready.kind) == ("ready", child.pid, "") and ready.start_s is not None
    child.send_signal(signal.SIGTERM)
    assert unit.ended()[0] == 0
    assert "STOPPING=1" in unit.told() and unit.record().state == "stopping"


def test_a_start_is_measured_and_the_next_one_has_its_deadline_from_it(unit: Unit) -> None:
    measured = unit.folder / "starts.json"
    measured.write_text('{"starts_s": [33.0, 500.5]}')
    child = unit.start(deadline_s=0, env={"STATE_DIRECTORY": str(unit.folder)})
    unit.ready()
    assert "EXTEND_TIMEOUT_USEC=60000000" in unit.told()
    until(lambda: len(json.loads(measured.read_text())["starts_s"]) == 3, 30, "the start is kept")
    assert json.loads(measured.read_text())["starts_s"] == [33.0, 500.5, unit.record().start_s]
    environment = Path(f"/proc/{engine_pid(unit)}/environ").read_text().split("\0")
    assert "VLLM_ENGINE_READY_TIMEOUT_S=1560" in environment
    child.send_signal(signal.SIGTERM)
    status, journal = unit.ended()
    assert status == 0 and "this start may take 1560 s: the longest of 2 measured was 500 s" in journal


def test_an_engine_that_still_loads_is_stopped_although_it_heeds_no_sigterm(unit: Unit) -> None:
    deaf = ("sh", "-c", "trap '' TERM; while :; do sleep 0.2; done")
    child = unit.start(command=deaf, deadline_s=100)
    until(lambda: "STATUS=starting" in unit.told(), 60, "it waits for the engine")
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) == 0 and unit.record().state == "stopping"


def test_the_engine_gets_the_key_but_not_systemds_own_things(unit: Unit, tmp_path: Path) -> None:
    (tmp_path / "api-key").write_text("sesame\n")
    child = unit.start(env={"CREDENTIALS_DIRECTORY": str(tmp_path), "WATCHDOG_USEC": "60000000"})
    unit.ready()
    env = json.loads(unit.control.with_suffix(".env").read_text())
    assert env["VLLM_API_KEY"] == "sesame"
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "CREDENTIALS_DIRECTORY"} & set(env)
    assert "sesame" not in Path(f"/proc/{child.pid}/cmdline").read_text()
    assert "WATCHDOG=1" in unit.told()


@pytest.mark.parametrize(
    ("words", "status", "kind", "says"),
    [
        (("bad-flag",), 2, "bad_flag", "unrecognized arguments: --no-such-flag"),
        (("no-model",), 1, "model_missing", "'/srv/none'"),
    ],
)
def test_a_start_that_fails_is_named_and_only_a_refused_flag_is_final(
    unit: Unit, words: tuple[str, ...], status: int, kind: str, says: str
) -> None:
    unit.start(*words)
    found, journal = unit.ended()
    record = unit.record()
    assert (found, record.state, record.kind) == (status, "failed", kind)
    assert says in record.detail and f"{kind}: " in journal and f"STATUS={kind}: " in unit.told()
    assert "READY=1" not in unit.told()


def test_an_engine_that_is_not_there_is_named(unit: Unit) -> None:
    unit.start(command=("/opt/none/bin/vllm",))
    status, _ = unit.ended()
    assert (status, unit.record().kind) == (1, "engine_missing") and "/opt/none/bin/vllm" in unit.record().detail


def test_a_port_that_is_taken_is_named_before_the_engine_starts(unit: Unit) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", unit.port))
        other.listen()
        unit.start()
        status, _ = unit.ended()
    assert (status, unit.record().kind) == (1, "port_taken")
    assert str(unit.port) in unit.record().detail and not unit.control.with_suffix(".env").exists()


def test_a_start_that_takes_too_long_is_named(unit: Unit) -> None:
    unit.start("slow=30", deadline_s=2)
    status, _ = unit.ended()
    assert (status, unit.record().kind) == (1, "start_too_slow") and "port_closed" in unit.record().detail


def test_garbage_is_no_start(unit: Unit) -> None:
    unit.control.write_text("garbage")
    unit.start()
    status, _ = unit.ended()
    assert (status, unit.record().kind) == (1, "garbage")


def test_a_server_that_ends_with_status_0_by_itself_has_failed(unit: Unit) -> None:
    unit.start("exit-0-after=1.5")
    unit.ready()
    status, journal = unit.ended()
    assert (status, unit.record().kind) == (1, "engine_died")
    assert "48966" in journal and "status 0" in unit.record().detail


def test_a_server_that_is_killed_has_failed(unit: Unit) -> None:
    unit.start()
    unit.ready()
    os.kill(engine_pid(unit), signal.SIGKILL)
    status, _ = unit.ended()
    assert (status, unit.record().kind) == (1, "server_killed") and "signal 9" in unit.record().detail


def test_a_frozen_engine_is_found_although_health_says_200(unit: Unit) -> None:
    unit.start(frozen_after_s=4)
    unit.ready()
    unit.control.write_text("hang")
    status, _ = unit.ended()
    record = unit.record()
    assert (status, record.kind) == (1, "engine_frozen")
    assert "1 requests running" in record.detail and "no token" in record.detail
    # What its process did at that moment is evidence, whatever it was.
    assert re.fullmatch(r"\S+ \d+ (sleeping|running|disk-sleep)", record.engine)


def test_a_busy_engine_is_left_alone(unit: Unit) -> None:
    child = unit.start(frozen_after_s=2)
    unit.ready()
    unit.control.write_text("busy")
    began = time.monotonic()
    # The fake counts how often its metrics were read: by the pulse once a second, and here.
    until(lambda: time.monotonic() - began > 4.5 and metrics_reads(unit) > 4, 15, "twice the time in which a silent one is ended")
    assert child.poll() is None and unit.record().state == "ready"


def metrics_reads(unit: Unit) -> float:
    progress = parse_progress(metrics_text(Server(f"http://127.0.0.1:{unit.port}", "m"), 5))
    assert progress is not None
    return progress.moved


# ---- pure ----


def test_the_environment_of_the_engine() -> None:
    given = {"PATH": "/bin", "NOTIFY_SOCKET": "/run/x", "WATCHDOG_PID": "1"}
    assert engine_environment(given, "", 1500) == {"PATH": "/bin", "VLLM_ENGINE_READY_TIMEOUT_S": "1500"}
    assert engine_environment({**given, "VLLM_ENGINE_READY_TIMEOUT_S": "9"}, "k", 1500) == {
        "PATH": "/bin", "VLLM_API_KEY": "k", "VLLM_ENGINE_READY_TIMEOUT_S": "9",
    }  # fmt: skip


def test_a_silence_is_looked_at_several_times() -> None:
    assert [look_every_s(seconds) for seconds in (3, 30, 180)] == [1.0, 5.0, 15.0]


READY = Record(unit="u", state="ready", since_unix_s=1.0, pid=5)


@pytest.mark.parametrize(
    ("before", "result", "state", "kind"),
    [
        (READY, "oom-kill", "failed", "out_of_memory"),
        (READY, "watchdog", "failed", "supervisor_hung"),
        (READY, "signal", "failed", "server_killed"),
        (READY, "exit-code", "failed", "engine_died"),
        (Record(unit="u", state="starting", since_unix_s=1.0, pid=5), "timeout", "failed", "start_too_slow"),
        (Record(unit="u", state="starting", since_unix_s=1.0, pid=5), "exit-code", "failed", "start_failed"),
        (Record(unit="u", state="stopping", since_unix_s=1.0, pid=5), "success", "stopped", ""),
        (Record(unit="u", state="failed", since_unix_s=1.0, pid=5, kind="bad_flag"), "exit-code", "failed", "bad_flag"),
        (None, "exec-condition", "failed", "engine_died"),
    ],
)
def test_what_systemd_knows_of_an_end(before: Record | None, result: str, state: str, kind: str) -> None:
    found = stopped_record(before, "u", {"SERVICE_RESULT": result, "EXIT_CODE": "killed", "EXIT_STATUS": "KILL"}, 9.0)
    assert (found.state, found.kind) == (state, kind)


def test_states_of_processes_are_words() -> None:
    assert f"{os.getpid()} running" in process_states(os.getpid())
    assert process_states(2**22 + 1) == ""
