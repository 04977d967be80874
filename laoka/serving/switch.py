"""Switches a link that a served unit works with (the engine, the model), and switches back by itself when the unit does not answer.

Run on the host: `python -m laoka.serving.switch --link LINK --target TARGET [--unit UNIT]`.
A unit is up only when a real completion came back (that is how qwen-serve is made), so systemd's word that it is active is the
gate; beside it short completions are asked all the time, which measures for how long nobody got an answer.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from laoka.files import write_atomic
from laoka.process import run
from laoka.serving import completion
from laoka.serving.record import path_of, read_record
from laoka.serving.unit_config import STAMPS, config_hash_command

UNIT = "qwen-serve.service"
SERVE_CONFIG = Path("/etc/qwen-serve/vllm.yaml")
RESTART_DEADLINE_S = 3600.0
ANSWER_DEADLINE_S = 120.0
SETTLE_S = 2.0
"""How long a unit may look stopped before the restart that was asked for begins."""
ASK_EVERY_S = 0.2
ASK_DEADLINE_S = 5.0
TRIAL_DEADLINE_S = 300.0
"""How long an engine may take to tell its version: it imports all of itself, from a cold disk the first time."""

Say = Callable[[str], None]


class SwitchError(Exception):
    """The switch was not made, or was undone; the message says what runs now."""


@dataclass(frozen=True)
class Switched:
    """What a switch did. `downtime_s` is None when no unit ran, or when it did not answer before either."""

    changed: bool
    old: str | None
    downtime_s: float | None = None
    restart_s: float | None = None


@dataclass
class Meter:
    """Asks for short completions in the background and notes the longest time without one.

    A refusal (a wrong key, a model of another name) counts as an answer: the meter has no key, the unit's own gate has.
    """

    servers: tuple[completion.Server, ...]
    answers: list[float] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to ask."""
        self._thread = threading.Thread(target=self._work, daemon=True, name="meter")
        self._thread.start()

    def _work(self) -> None:
        while not self._stop.is_set():
            verdicts = [completion.ask(server, max_tokens=1, deadline_s=ASK_DEADLINE_S) for server in self.servers]
            if all(verdict.healthy or verdict.kind == "refused" for verdict in verdicts):
                self.answers.append(time.monotonic())
            self._stop.wait(ASK_EVERY_S)

    def wait_for_answer(self, since: float, deadline_s: float) -> bool:
        """Wait until an answer came after `since` (of time.monotonic)."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if self.answers and self.answers[-1] > since:
                return True
            time.sleep(ASK_EVERY_S / 2)
        return False

    def stop(self) -> None:
        """Ask no more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(ASK_DEADLINE_S + 1)

    def longest_gap_s(self, begin: float) -> float | None:
        """The longest time between two answers, the earlier of them given at `begin` or just before; None without two."""
        times = [at for at in self.answers if at >= begin]
        before = [at for at in self.answers if at < begin][-1:]
        marks = [*before, *times]
        return max((after - at for at, after in itertools.pairwise(marks)), default=None)


def set_link(link: Path, target: str) -> None:
    """Point a symbolic link at `target` in one step: a reader sees the old target or the new one. Errors: OSError."""
    new = link.with_name(f".{link.name}.new")
    new.unlink(missing_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    new.symlink_to(target)
    new.replace(link)


def target_of(link: Path) -> str | None:
    """Where a link points, as it is written; None when there is none."""
    return str(link.readlink()) if link.is_symlink() else None


def switch(
    link: Path, target: str, *, previous: Path | None = None, unit: str | None = UNIT, say: Say = lambda line: None
) -> Switched:
    """Point `link` at `target`; restart the unit if it runs, and go back when it does not answer afterwards.

    Arguments: `target` as written into the link (relative to its folder or absolute); `previous` a link that gets the old target;
    `unit` None leaves every unit alone.
    Errors: SwitchError when the target is not there or is an engine that can't even tell its version (the old one was not touched
    then), or when the unit did not come up with it: the old target runs again then (or the message says that it does not either).
    """
    place = link.parent / target
    if not place.exists():
        raise SwitchError(f"{place} is not there: nothing was switched")
    old = target_of(link)
    if old == target:
        return Switched(False, old)
    running = unit is not None and run(["systemctl", "is-active", "-q", unit], deadline_s=30).ok
    if not running or unit is None:
        _set_both(link, target, previous, old)
        return Switched(True, old)
    why = why_unfit(place, link)
    if why is not None:
        raise SwitchError(f"{short(target)} can't even tell its version: {why}; nothing was switched, {unit} goes on")
    return _switch_running(link, target, previous, unit, old, say)


def why_unfit(place: Path, present: Path) -> str | None:
    """Why an engine's folder can't serve, tried while the present one goes on; None for an engine that starts, and for a model.

    `vllm --version` imports what `vllm serve` begins with: libraries that are missing show without anybody being cut off, and what
    was read of the disk is read faster afterwards. It counts only where the present engine passes the same trial.
    """
    command = place / "bin" / "vllm"
    if not command.exists():
        return None
    tried = run([str(command), "--version"], deadline_s=TRIAL_DEADLINE_S, cwd="/")
    if tried.ok or tried.timed_out:
        return None
    if not run([str(present / "bin" / "vllm"), "--version"], deadline_s=TRIAL_DEADLINE_S, cwd="/").ok:
        return None
    return failure_in(tried.stderr) or tried.last_line()


def _set_both(link: Path, target: str, previous: Path | None, old: str | None) -> None:
    if previous is not None and old is not None:
        set_link(previous, old)
    set_link(link, target)


def short(target: str | None) -> str:
    """A link's target in few words: the last two parts of its path, a long hash by its first twelve digits."""
    parts = Path(target or "-").parts[-2:]
    return "/".join(re.sub(r"^([0-9a-f]{12})[0-9a-f]{28,}$", r"\1", part) for part in parts)


def _switch_running(link: Path, target: str, previous: Path | None, unit: str, old: str | None, say: Say) -> Switched:
    stamps = right_stamps(link)
    was, new = short(old), short(target)
    meter = Meter(servers_here(SERVE_CONFIG))
    meter.start()
    answered = meter.wait_for_answer(0.0, ASK_DEADLINE_S)
    say(f"{unit} runs{'' if answered else ' but does not answer'}; switching {link} from {was} to {new}")
    began = time.monotonic()
    old_previous = target_of(previous) if previous is not None else None
    _set_both(link, target, previous, old)
    try:
        why = _restart(unit, meter)
    except BaseException:
        _undo(link, old, previous, old_previous)
        raise
    restart_s = time.monotonic() - began
    if why is None:
        meter.stop()
        for stamp, paths in stamps:
            # The unit runs with the present configuration: no need for the next deploy to restart it again.
            write_atomic(stamp, "\n".join([_hash_of(paths), *paths]) + "\n")
        gap_s = meter.longest_gap_s(began) if answered else None
        downtime = f"{gap_s:.1f} s without an answer" if gap_s is not None else "it did not answer before"
        say(f"{unit} answers with {new}: {downtime}, {restart_s:.1f} s from switch to answer")
        return Switched(True, old, gap_s, restart_s)
    say(f"{unit} does not answer with {new}: {why}; going back to {was}")
    _undo(link, old, previous, old_previous)
    back = _restart(unit, meter) if old is not None else "there is nothing to go back to"
    meter.stop()
    gap_s = meter.longest_gap_s(began) if answered else None
    if back is not None:
        raise SwitchError(f"{unit} came up neither with {new} ({why}) nor after going back to {was} ({back}): journalctl -u {unit}")
    lost = f" after {gap_s:.1f} s without an answer" if gap_s is not None else ""
    raise SwitchError(f"{unit} did not come up with {new}: {why}; it is back on {was} and answers{lost}")


def _undo(link: Path, old: str | None, previous: Path | None, old_previous: str | None) -> None:
    if old is None:
        link.unlink(missing_ok=True)
    else:
        set_link(link, old)
    if previous is not None:
        if old_previous is None:
            previous.unlink(missing_ok=True)
        else:
            set_link(previous, old_previous)


def _restart(unit: str, meter: Meter) -> str | None:
    """Restart the unit and have an answer; None when it came, else why not."""
    began, began_unix_s = time.monotonic(), time.time()
    run(["systemctl", "reset-failed", unit], deadline_s=30)
    # Not waiting: a readiness check may go on for its whole deadline after the process that it asks has died.
    done = run(["systemctl", "restart", "--no-block", unit], deadline_s=60)
    state: State = "starting" if done.ok else "died"
    while state == "starting" and time.monotonic() - began < RESTART_DEADLINE_S:
        time.sleep(ASK_EVERY_S)
        shown = run(["systemctl", "show", unit, *(f"-p{name}" for name in PROPERTIES)], deadline_s=30)
        state = state_of(dict(line.split("=", 1) for line in shown.stdout.splitlines() if "=" in line), began)
    if state == "up" and meter.wait_for_answer(began, ANSWER_DEADLINE_S):
        return None
    why = why_failed(unit, began_unix_s)
    # Restart=always would try the broken one for ever, and hold up the way back.
    run(["systemctl", "stop", unit], deadline_s=120)
    if state == "died":
        return why or "it ended without a word"
    waited = f"it is not up after {RESTART_DEADLINE_S:.0f} s"
    return waited if state == "starting" else f"it started, but no completion came within {ANSWER_DEADLINE_S:.0f} s"


State = Literal["starting", "up", "died"]
PROPERTIES = (
    "ActiveState",
    "SubState",
    "MainPID",
    "Job",
    "ExecMainStartTimestampMonotonic",
    "ExecMainExitTimestampMonotonic",
)


def state_of(properties: Mapping[str, str], began: float) -> State:
    """Whether a unit that was told to restart at `began` (of time.monotonic) is up, has died on its way, or is still starting.

    Arguments: `properties` as `systemctl show` prints them; its times are microseconds of the same clock.
    """
    active, sub = properties.get("ActiveState", ""), properties.get("SubState", "")
    started = int(properties.get("ExecMainStartTimestampMonotonic") or 0) / 1e6
    ended = int(properties.get("ExecMainExitTimestampMonotonic") or 0) / 1e6
    if active == "active" and started > began:
        return "up"
    if active == "failed" or sub.startswith("auto-restart"):
        return "died"
    if active == "activating" and properties.get("MainPID") == "0" and started > began and ended >= started:
        return "died"  # its main process is gone while the readiness check still asks it
    pending = properties.get("Job", "") not in ("", "0")
    return "died" if active == "inactive" and not pending and time.monotonic() - began > SETTLE_S else "starting"


def why_failed(unit: str, since_unix_s: float) -> str:
    """Why a unit failed: as its own record names it, with the cause that its log tells of."""
    record = read_record(path_of(unit))
    named = record.kind if record is not None and record.state == "failed" and record.since_unix_s >= since_unix_s else ""
    words = last_words(unit, since_unix_s) or (record.detail if named and record is not None else "")
    return f"{named}: {words}" if named else words


def last_words(unit: str, since_unix_s: float) -> str:
    """Why a unit failed, by its log: the first exception in it with the line that follows, in at most 300 characters.

    Only what its last start wrote counts: an engine that is stopped with requests in hand ends with exceptions of its own.
    """
    shown = run(["systemctl", "show", unit, "-pInvocationID"], deadline_s=30).stdout
    started = re.search(r"^InvocationID=([0-9a-f]+)$", shown, re.MULTILINE)
    which = [f"_SYSTEMD_INVOCATION_ID={started[1]}"] if started else ["-u", unit]
    log = run(["journalctl", *which, f"--since=@{since_unix_s:.0f}", "-n", "2000", "-o", "cat", "--no-pager"], deadline_s=30)
    return failure_in(log.stdout)


def failure_in(log: str) -> str:
    """The failure that a log tells of: its first exception that is not a consequence of another, or its last line."""
    lines = [re.sub(r"^\(\w+(?: pid=\d+)?\)\s*", "", line).strip() for line in log.splitlines()]
    for number, line in enumerate(lines):
        found = re.match(r"(?:[A-Z]+ [\d-]+ [\d:]+ \[[\w.:]+\] )?((?:\w+\.)*\w*(?:Error|Exception|Refusal)): ?(.*)", line)
        if found and "WARNING" not in line and "See root cause above" not in line:
            more = lines[number + 1] if found[2].endswith(("for ModelConfig", ":")) and number + 1 < len(lines) else ""
            return f"{found[1].rsplit('.', 1)[-1]}: {found[2]} {more}".strip()[:300]
    own = [line for line in lines if line and not re.match(r"\S+\.service: ", line)]
    return (own or [""])[-1][:300]


def right_stamps(link: Path) -> list[tuple[Path, list[str]]]:
    """Stamps of units that run with the present configuration and have this link in it, with the paths that they hash."""
    found = []
    for stamp in sorted(Path(STAMPS).glob("*.config")):
        noted = stamp.read_text(encoding="utf-8").splitlines()
        if str(link) in noted[1:] and _hash_of(noted[1:]) == noted[0]:
            found.append((stamp, noted[1:]))
    return found


def servers_here(config: Path) -> tuple[completion.Server, ...]:
    """Where this host's servers answer: the one of `config`, or one for each instance, whose files lie in folders beside it."""
    files = [config] if config.is_file() else sorted(config.parent.glob(f"*/{config.name}"))
    return tuple(served_at(file) for file in files) or (served_at(config),)


def served_at(config: Path) -> completion.Server:
    """Where the unit's server answers, from its configuration; vLLM's own defaults where that does not say."""
    try:
        text = config.read_text(encoding="utf-8")
    except OSError:
        text = ""
    port = re.search(r"^port:\s*(\d+)\s*$", text, re.MULTILINE)
    name = re.search(r"^served-model-name:\s*\[?\s*[\"']?([^\"'\],\n]+)", text, re.MULTILINE)
    return completion.Server(f"http://127.0.0.1:{port[1] if port else 8000}", name[1].strip() if name else "", judge_text=False)


def _hash_of(paths: Sequence[str]) -> str:
    return run(["sh", "-c", config_hash_command(paths)], deadline_s=60, check=True).stdout.strip()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 0 switched or as it was, 1 not."""
    parser = argparse.ArgumentParser(prog="python -m laoka.serving.switch", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--link", type=Path, required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--previous", type=Path, help="a link that gets the old target")
    parser.add_argument("--unit", default=UNIT)
    parser.add_argument("--told", type=Path, help="a file that gets the last line of what was said; empty when there is none")
    options = parser.parse_args(argv)
    said = [""]

    def say(line: str) -> None:
        said.append(line)
        print(line, file=sys.stderr, flush=True)

    try:
        done = switch(options.link, options.target, previous=options.previous, unit=options.unit, say=say)
        if options.told is not None:
            write_atomic(options.told, f"{said[-1]}\n")
    except (SwitchError, OSError) as error:
        print(f"switch: {error}", file=sys.stderr)
        return 1
    print(f"{options.link} -> {options.target}{'' if done.changed else ' (as it was)'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
