"""Changes what a served unit runs with, on this host: drain, restart, gate, undrain; back to what ran before when the gate fails.

    python -m laoka.serving.rollout --unit qwen-serve.service --config FILE ... --url http://127.0.0.1:8000 --model NAME

The new files lie beside (--stage NEW PLACE) until it begins: a host whose turn has not come, or never comes, runs on with what it
has, also when its engine dies meanwhile. What the unit last ran well with is kept as a copy, so that there is a way back.
Exit status: 0 it runs with what is on disk now, 1 it does not: what runs instead is said.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from laoka.files import why_unread, write_atomic
from laoka.process import ProcessError, run
from laoka.serving import drain
from laoka.serving.completion import Server, ask, key_in
from laoka.serving.guard import DRAIN_FILE
from laoka.serving.record import path_of, read_record
from laoka.serving.switch import set_link
from laoka.serving.unit_config import config_hash_command, stamp_of

KEPT = Path("/var/lib/laoka/rollout")
GATE_DEADLINE_S = 60.0
MANIFEST = "manifest.json"

Say = Callable[[str], None]
Gate = Callable[[], str | None]
"""Asks the unit for what it is there for; None when it did it, else why not."""


@dataclass(frozen=True)
class Change:
    """One change of one unit. `config` are the files and links it is made of; `staged` pairs of a new file and its place;
    times are seconds."""

    unit: str
    config: tuple[str, ...]
    staged: tuple[tuple[str, str], ...]
    drain_deadline_s: float
    restart_deadline_s: float
    engine: str = ""
    """URL of the unit's engine, where it has one."""


# ---- what ran well ------------------------------------------------------------------------------------------------------


def keep(paths: Sequence[str], folder: Path) -> None:
    """Keep a copy of files, and of where links point, for the way back; the old copy goes only when the new one is whole."""
    new = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True, mode=0o700)
    manifest: dict[str, dict[str, str]] = {}
    for number, name in enumerate(paths):
        path = Path(name)
        if path.is_symlink():
            manifest[name] = {"link": str(path.readlink())}
        elif path.is_file():
            shutil.copy2(path, new / str(number))
            manifest[name] = {"file": str(number)}
        else:
            manifest[name] = {}
    (new / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def bring_back(folder: Path, *, links: bool) -> bool:
    """Put kept files, and links where asked for, back in place; False when nothing was kept. Errors: OSError."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    for name, what in manifest.items():
        path = Path(name)
        if "link" in what:
            if links:
                set_link(path, what["link"])
        elif "file" in what:
            _put(folder / what["file"], path)
        elif path.is_file():
            path.unlink()
    return True


# ---- the change ---------------------------------------------------------------------------------------------------------


def change(wanted: Change, gate: Gate, say: Say, *, kept: Path = KEPT) -> int:
    """Carry it out; returns the exit status. Whatever happens, what it drained does not stay drained."""
    mark = drain.mark_of(wanted.engine)
    try:
        return _change(wanted, gate, say, kept / wanted.unit, mark)
    except BaseException:
        mark.unlink(missing_ok=True)
        raise


def _change(wanted: Change, gate: Gate, say: Say, folder: Path, mark: Path) -> int:
    # The other engines of a host with several serve on; the host's own mark takes all of them out.
    say(f"{wanted.unit}: draining {'this host' if mark == DRAIN_FILE else 'it'}")
    left = drain.drain(wanted.drain_deadline_s, say, engine=wanted.engine, mark=mark)
    if left:
        say(f"{left} request(s) were not finished within {wanted.drain_deadline_s:.0f} s; the unit's stop gives them its own time")
    for new, place in wanted.staged:
        _put(Path(new), Path(place))
    why = _restart(wanted, gate)
    if why is None:
        _note(wanted, folder)
        return _back_in_service(wanted, say, mark, 0)
    say(f"{wanted.unit} does not run with the new configuration: {why}")
    run(["systemctl", "stop", wanted.unit], deadline_s=wanted.restart_deadline_s)
    # A link that was switched since, with a gate of its own, was noted in the stamp: it stays.
    noted = stamp_of(wanted.unit)
    gated = noted.exists() and folder.exists() and noted.stat().st_mtime > folder.stat().st_mtime
    if not bring_back(folder, links=not gated):
        say(f"{wanted.unit} is down: nothing that ran before is known on this host")
        return _back_in_service(wanted, say, mark, 1)
    again = _restart(wanted, gate)
    if again is not None:
        say(f"{wanted.unit} is down: what ran before does not come up either: {again}")
        return _back_in_service(wanted, say, mark, 1)
    _note(wanted, folder)
    say(f"{wanted.unit} is back on what ran before, and answers")
    return _back_in_service(wanted, say, mark, 1)


def _put(source: Path, place: Path) -> None:
    write_atomic(place, source.read_bytes(), source.stat().st_mode & 0o777)


def _restart(wanted: Change, gate: Gate) -> str | None:
    """Restart the unit and have it do its work; None when it did, else why not."""
    began = time.time()
    run(["systemctl", "daemon-reload"], deadline_s=60)
    run(["systemctl", "reset-failed", wanted.unit], deadline_s=30)
    run(["systemctl", "enable", wanted.unit], deadline_s=60)
    done = run(["systemctl", "restart", wanted.unit], deadline_s=wanted.restart_deadline_s)
    if not done.ok:
        record = read_record(path_of(wanted.unit)) if wanted.engine else None
        if record and record.since_unix_s >= began and record.kind:
            return f"{record.kind}: {record.detail}"
        return done.last_line()
    return gate()


def _note(wanted: Change, folder: Path) -> None:
    """Note that the unit runs well with what is on disk, where a deploy looks for it; and keep that."""
    found = run(["sh", "-c", config_hash_command(wanted.config)], deadline_s=60, check=True).stdout.strip()
    write_atomic(stamp_of(wanted.unit), "\n".join([found, *wanted.config]) + "\n")
    keep(wanted.config, folder)


def _back_in_service(wanted: Change, say: Say, mark: Path, status: int) -> int:
    if not drain.undrain(GATE_DEADLINE_S, engine=wanted.engine, mark=mark):
        say("this host's guard does not find its engine well: the gateways send it nothing")
        return 1
    return status


def completion_gate(url: str, model: str, key_file: Path | None, judge_text: bool) -> Gate:
    """A short completion has to come back. The key is read when it is asked: the change itself may put it in place."""

    def gate() -> str | None:
        try:
            key = key_in(key_file)
        except (OSError, UnicodeDecodeError) as error:
            return f"{key_file}: {why_unread(error)}"
        verdict = ask(Server(url, model, key, judge_text), max_tokens=8, deadline_s=GATE_DEADLINE_S)
        return None if verdict.healthy else f"{verdict.kind}: {verdict.detail}"

    return gate


def guard_gate() -> str | None:
    """Every guard of this host has to answer, and find its engine well."""
    until = time.monotonic() + GATE_DEADLINE_S
    while True:
        found = drain.states()
        if found and all(item.status in (200, 404) for item in found):
            return None
        if time.monotonic() >= until:
            return "; ".join(f"{item.socket}: {item.words}" for item in found) or "no guard listens"
        time.sleep(0.5)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m laoka.serving.rollout", description="Change what a served unit runs with.")
    parser.add_argument("--unit", required=True)
    parser.add_argument("--config", nargs="+", required=True, help="files and links that the unit is made of")
    parser.add_argument("--stage", nargs=2, action="append", default=[], metavar=("NEW", "PLACE"), help="a new file and its place")
    parser.add_argument("--drain-deadline-s", type=float, default=120.0)
    parser.add_argument("--restart-deadline-s", type=float, default=1800.0)
    parser.add_argument("--url", help="root of the server that has to answer; without it the guard has to")
    parser.add_argument("--model", default="")
    parser.add_argument("--api-key-file", type=Path)
    parser.add_argument("--judge-text", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args(argv)
    gate: Gate = guard_gate
    try:
        if options.url:
            gate = completion_gate(options.url, options.model, options.api_key_file, options.judge_text)
        staged = tuple((new, place) for new, place in options.stage)
        wanted = Change(
            options.unit, tuple(options.config), staged, options.drain_deadline_s, options.restart_deadline_s, options.url or ""
        )
        return change(wanted, gate, lambda line: print(line, file=sys.stderr, flush=True))
    except (OSError, ValueError, ProcessError) as error:
        print(f"rollout: {options.unit}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
