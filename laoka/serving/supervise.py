"""Main process of qwen-serve: runs the engine, tells systemd that it is ready when a real completion came back, and ends when the
engine is dead or stands still, so that systemd clears away what is left and starts it again.

    python -m laoka.serving.supervise run --url http://127.0.0.1:8000 --model NAME ... -- vllm serve --config FILE
    python -m laoka.serving.supervise stopped ...     # ExecStopPost: notes what systemd knows of the end

vLLM itself does not speak sd_notify, exits with status 0 when its engine process dies (vLLM issue 48966), and answers /health with
200 while its engine is frozen. Exit status: 0 stopped when asked, 1 failed, 2 failed and would fail again (a flag that it refuses).
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

import psutil

from laoka.notify import Notifier
from laoka.serving import starts
from laoka.serving.completion import KEY_CREDENTIAL, Server, Verdict, read_key, wait
from laoka.serving.failure import FAILED_STATUS, Failure, name_end, name_start_failure
from laoka.serving.pulse import Beat, Pulse
from laoka.serving.record import Record, path_of, read_record, write_record

TAIL_LINES = 400
POLL_S = 0.2
PET_S = 5.0
EXTEND_S = 60
"""How much longer than TimeoutStartSec systemd is asked to wait, again and again, while the deadline here has not passed."""
READY_ENV = "VLLM_ENGINE_READY_TIMEOUT_S"
STARTING_STOP_S = 5.0
"""How long an engine that was not ready yet may take to stop."""
NOT_FOR_THE_ENGINE = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "CREDENTIALS_DIRECTORY")


@dataclass(frozen=True)
class Options:
    """What the unit is told. Times are seconds; `frozen_after_s` 0 leaves a frozen engine to others.

    `measured` is the file of the starts that were measured; None: none are kept.
    """

    unit: str
    server: Server
    start_deadline_s: float
    frozen_after_s: float
    record: Path
    command: tuple[str, ...]
    measured: Path | None = None


def say(line: str) -> None:
    """A line for the journal."""
    print(line, file=sys.stderr, flush=True)


# ---- pure ---------------------------------------------------------------------------------------------------------------


def engine_environment(env: Mapping[str, str], api_key: str, start_deadline_s: float) -> dict[str, str]:
    """The engine's environment: ours without what is between systemd and us; how long its own parts wait for each other, unless
    the inventory says it; the key, which no command line may hold."""
    found = {name: value for name, value in env.items() if name not in NOT_FOR_THE_ENGINE}
    found.setdefault(READY_ENV, f"{start_deadline_s:.0f}")
    return {**found, "VLLM_API_KEY": api_key} if api_key else found


def look_every_s(frozen_after_s: float) -> float:
    """How often the pulse is looked at: a silence has to be seen, not guessed, so several looks go into it."""
    return max(1.0, min(15.0, frozen_after_s / 6))


def stopped_record(before: Record | None, unit: str, env: Mapping[str, str], now_s: float) -> Record:
    """The record after an end, by what systemd gives to ExecStopPost. A failure that was named before stays as it was named."""
    result, code, status = (env.get(name, "") for name in ("SERVICE_RESULT", "EXIT_CODE", "EXIT_STATUS"))
    base = before or Record(unit=unit, state="stopped", since_unix_s=now_s, pid=0)
    if base.state == "failed":
        return base
    if result == "success":
        return replace(base, state="stopped", since_unix_s=now_s, kind="", detail="stopped when asked", fix="", engine="")
    kind, detail = {
        "oom-kill": ("out_of_memory", "the kernel ended it: memory of the host ran out, or serve_memory_max was reached"),
        "timeout": ("start_too_slow", "it was not ready, or not down, within its deadline"),
        "watchdog": ("supervisor_hung", "laoka's supervisor of the engine gave no sign of life"),
        "signal": ("server_killed", f"its main process was ended by signal {status or '?'}"),
    }.get(result, ("start_failed" if base.state == "starting" else "engine_died", f"{code or 'ended'} {status}".strip()))
    fix = f"journalctl -u {unit} -n 100"
    return replace(base, state="failed", since_unix_s=now_s, kind=kind, detail=f"systemd says {result or '?'}: {detail}", fix=fix)


# ---- what the machine says ----------------------------------------------------------------------------------------------


def port_failure(url: str) -> Failure | None:
    """Whether somebody else has the engine's port; asked before the engine spends a minute on finding out."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            return Failure("port_taken", f"{host}:{port}: {error.strerror}", f"see who has it: ss -ltnp 'sport = :{port}'")
    return None


def process_states(pid: int) -> str:
    """The engine's processes and what each does ("stopped", "disk-sleep", ...): evidence of what stands still."""
    found = []
    try:
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            try:
                found.append(f"{process.name()} {process.pid} {process.status()}")
            except psutil.Error:
                continue
    except psutil.Error:
        return ""
    return ", ".join(found)


class Engine:
    """The engine's process; its output goes on to ours, and the last lines are kept to name a failure by."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(command, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._reader = threading.Thread(target=self._pass_on, name="output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            self._lines.append(line.decode("utf-8", "replace").rstrip("\n"))

    def status(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.poll()

    def tail(self) -> tuple[str, ...]:
        """Its last lines; what was still on its way is waited for a moment."""
        self._reader.join(1.0)
        return tuple(self._lines)

    def terminate(self) -> None:
        """Ask it to stop: it finishes what it has in hand first, as long as its --shutdown-timeout says."""
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        if self._process.poll() is None:
            self._process.kill()


# ---- the run ------------------------------------------------------------------------------------------------------------


class Supervisor:
    """One life of the unit: start, ready, watched, end."""

    def __init__(self, options: Options, notifier: Notifier) -> None:
        self._options = options
        self._notifier = notifier
        self._stopping = threading.Event()
        self._petted_s = float("-inf")
        self._record = Record(unit=options.unit, state="starting", since_unix_s=time.time(), pid=os.getpid())

    def run(self) -> int:
        """Run to the end; returns the exit status."""
        options = self._options
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        self._note(self._record)
        taken = port_failure(options.server.url)
        if taken:
            return self._fail(taken)
        started_s = time.monotonic()
        try:
            engine = Engine(options.command, engine_environment(os.environ, options.server.api_key, options.start_deadline_s))
        except OSError as error:
            fix = "pyinfra INVENTORY deploys/engine.py"
            return self._fail(Failure("engine_missing", f"{options.command[0]}: {error.strerror}", fix))
        failure = self._until_ready(engine)
        if failure is None and not self._stopping.is_set():
            start_s = round(time.monotonic() - started_s, 1)
            self._note(replace(self._record, state="ready", since_unix_s=time.time(), start_s=start_s))
            self._measured(start_s)
            self._notifier.send("READY=1", f"STATUS=ready: the first completion came back after {start_s:.0f} s")
            say(f"ready: the first completion came back after {start_s:.0f} s")
            failure = self._watch(engine)
        if failure is not None:
            return self._fail(failure)
        return self._end(engine)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping.set()

    def _pet(self, *, starting: bool = False) -> None:
        if time.monotonic() - self._petted_s >= PET_S:
            self._petted_s = time.monotonic()
            self._notifier.send("WATCHDOG=1", *([f"EXTEND_TIMEOUT_USEC={EXTEND_S * 1_000_000}"] if starting else []))

    def _measured(self, start_s: float) -> None:
        """Keep what the start took: the next one's deadline comes of it."""
        if self._options.measured is not None:
            try:
                starts.add(self._options.measured, start_s)
            except OSError as error:
                say(f"{self._options.measured}: {error.strerror}: this start is not kept, the model is served all the same")

    def _until_ready(self, engine: Engine) -> Failure | None:
        """None when a completion came back, or when it is asked to stop before one did."""
        options = self._options
        verdicts: list[Verdict] = []

        def ask() -> None:
            verdicts.append(wait(options.server, deadline_s=options.start_deadline_s, progress=self._progress))

        thread = threading.Thread(target=ask, name="ready", daemon=True)
        thread.start()
        while thread.is_alive() and not self._stopping.is_set():
            status = engine.status()
            if status is not None:
                return name_start_failure(status, engine.tail(), options.unit)
            self._pet(starting=True)
            thread.join(POLL_S)
        if self._stopping.is_set():
            return None
        verdict = verdicts[-1]
        if verdict.healthy:
            return None
        status = engine.status()
        if status is not None:
            return name_start_failure(status, engine.tail(), options.unit)
        waited = verdict.kind in ("port_closed", "not_ready", "unreachable", "timed_out")
        if waited:
            detail = f"no completion within {options.start_deadline_s:.0f} s: {verdict.kind}: {verdict.detail}"
            return Failure("start_too_slow", detail, "raise serve_start_deadline_s, or see what it waits for in the journal")
        return Failure(verdict.kind, verdict.detail, f"journalctl -u {options.unit} -n 100")

    def _progress(self, line: str) -> None:
        say(f"starting: {line}")
        self._notifier.send(f"STATUS=starting: {line}")

    def _watch(self, engine: Engine) -> Failure | None:
        """None when it is asked to stop; otherwise what became of it."""
        options = self._options
        every_s = look_every_s(options.frozen_after_s)
        pulse = Pulse(options.server, ask_after_s=options.frozen_after_s / 3)
        looked_s = float("-inf")
        while not self._stopping.is_set():
            status = engine.status()
            if status is not None:
                return name_end(status, engine.tail(), options.unit)
            self._pet()
            if options.frozen_after_s > 0 and time.monotonic() - looked_s >= every_s:
                looked_s = time.monotonic()
                beat = pulse.look()
                if beat.silent_s >= options.frozen_after_s:
                    return self._frozen(engine, beat)
            self._stopping.wait(POLL_S)
        return None

    def _frozen(self, engine: Engine, beat: Beat) -> Failure:
        states = process_states(engine.pid)
        self._record = replace(self._record, engine=states)
        say(f"processes: {states}")
        return Failure("engine_frozen", beat.words(), "it is restarted; if it comes again: laoka watchdog status, journalctl -k")

    def _end(self, engine: Engine) -> int:
        """Asked to stop: the engine finishes what it has in hand; systemd's TimeoutStopSec is the limit.

        One that was not ready has nothing in hand, and vLLM heeds no SIGTERM while it loads.
        """
        started = self._record.state == "ready"
        self._notifier.send("STOPPING=1", "STATUS=stopping: requests in flight are finished" if started else "STATUS=stopping")
        self._note(replace(self._record, state="stopping", since_unix_s=time.time()))
        engine.terminate()
        kill_s = time.monotonic() + STARTING_STOP_S
        while engine.status() is None:
            if not started and time.monotonic() >= kill_s:
                engine.kill()
            self._pet()
            time.sleep(POLL_S)
        engine.tail()
        return 0

    def _fail(self, failure: Failure) -> int:
        """Say what is wrong and end; systemd ends whatever of the engine is left (KillMode=mixed), so none keeps its memory."""
        say(f"{failure.kind}: {failure.detail}")
        if failure.fix:
            say(f"next: {failure.fix}")
        self._notifier.send(f"STATUS={failure.kind}: {failure.detail}")
        self._note(
            replace(
                self._record, state="failed", since_unix_s=time.time(), kind=failure.kind, detail=failure.detail, fix=failure.fix
            )
        )
        return failure.status

    def _note(self, record: Record) -> None:
        self._record = record
        try:
            write_record(self._options.record, record)
        except OSError as error:
            say(f"{self._options.record}: {error.strerror}: the record is not written, the model is served all the same")


# ---- the command --------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m laoka.serving.supervise", description="Run a model server for systemd.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="run the engine until it ends")
    run.add_argument("--url", required=True, help="where the engine will answer")
    run.add_argument("--model", required=True, help="served model name")
    run.add_argument(
        "--start-deadline-s", type=float, help="seconds from start to the first completion at most [by the starts measured so far]"
    )
    run.add_argument("--frozen-after-s", type=float, required=True, help="seconds without a sign of life (0: never mind)")
    run.add_argument("--judge-text", action=argparse.BooleanOptionalAction, default=True)
    run.add_argument("command", nargs="+", help="the engine's command, after --")
    stopped = verbs.add_parser("stopped", help="note an end, from ExecStopPost")
    for sub in (run, stopped):
        sub.add_argument("--unit", required=True)
        sub.add_argument("--record", type=Path, help="where the readiness record is kept [below /run/qwen-serve]")
    return parser


def main(argv: Sequence[str] | None = None, exit_at_once: Callable[[int], None] = os._exit) -> int:
    """The command line; returns the exit status."""
    options = _parser().parse_args(argv)
    record = options.record or path_of(options.unit)
    if options.verb == "stopped":
        write_record(record, stopped_record(read_record(record), options.unit, os.environ, time.time()))
        return 0
    try:
        key = read_key(os.environ)
    except (OSError, UnicodeDecodeError) as error:
        say(f"could not read the credential {KEY_CREDENTIAL}: {error}")
        return FAILED_STATUS
    server = Server(options.url, options.model, key, options.judge_text)
    # Only systemd's own: a supervisor that is run by hand leaves no file behind.
    folder = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    measured = Path(folder, starts.FILE) if folder else None
    deadline_s = options.start_deadline_s
    if deadline_s is None:
        known = starts.read(measured) if measured else ()
        deadline_s = float(starts.deadline_s(known))
        longest = f"the longest of {len(known)} measured was {max(known):.0f} s" if known else "none was measured yet"
        say(f"this start may take {deadline_s:.0f} s: {longest}")
    told = Options(options.unit, server, deadline_s, options.frozen_after_s, record, tuple(options.command), measured)
    status = Supervisor(told, Notifier()).run()
    # A thread may still wait for an answer that never comes: it must not hold up the end.
    sys.stdout.flush()
    exit_at_once(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
