"""Takes a host, or one engine of several, out of service without cutting a stream, and brings it back.

    python -m laoka.serving.drain on|off|status [--instance NAME]

The guard of an engine that drains says 404 to the health checks of the gateways: it gets no new request, and finishes those it has.
There is a mark for each engine beside its guard's socket, and one for the whole host. They lie in /run: a boot ends them.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from laoka.serving.guard import DRAIN_FILE, mark_beside
from laoka.serving.unix_http import UnixConnection

SOCKETS = Path("/run/qwen-guard")
SETTLE_S = 5.0
"""Two checks of every gateway (2 s each, haproxy.cfg.j2) and a second: until then one may still send a request."""
POLL_S = 0.2
ASK_S = 5.0


@dataclass(frozen=True)
class State:
    """What one guard says: HTTP `status` (None: no answer), `words` for people, requests `in_flight`, its engine's URL.

    `mark` is the one that drains this engine alone, None where the guard (of an older release) heeds the host's only.
    """

    socket: str
    status: int | None
    words: str
    in_flight: int
    engine: str = ""
    mark: Path | None = None

    def is_of(self, engine: str) -> bool:
        """Whether it stands for the engine at this URL, or may: one that does not say whose it is does. Empty: any."""
        return not engine or self.engine in ("", engine)


def states(folder: Path = SOCKETS) -> tuple[State, ...]:
    """What each guard of this host says now; empty where none listens."""
    return tuple(_state(path) for path in sorted(folder.glob("*.sock")))


def _state(path: Path) -> State:
    connection = UnixConnection(path, ASK_S)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        said = json.loads(answer.read())
        mark = mark_beside(path) if said.get("own_mark") is True else None
        return State(path.stem, answer.status, str(said["status"]), int(said["in_flight"]), str(said.get("engine", "")), mark)
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        return State(path.stem, None, f"no answer: {error}", 0)
    finally:
        connection.close()


def mark_of(engine: str, *, folder: Path = SOCKETS, mark: Path = DRAIN_FILE) -> Path:
    """The mark that takes the engine at a URL out of service: its own, so that the host's others serve on; the host's `mark` where
    no engine is named, or no guard of this host knows a mark of its own."""
    own = [item.mark for item in states(folder) if engine and item.engine == engine and item.mark is not None]
    return own[0] if own else mark


def drain(
    deadline_s: float, say: Callable[[str], None], *, engine: str = "", folder: Path = SOCKETS, mark: Path = DRAIN_FILE
) -> int:
    """Set a mark; returns how many requests were still in hand when `deadline_s` passed (0: none).

    Arguments: `engine` is the URL of the only engine whose requests are waited for. Errors: OSError when the mark can't be set.
    """
    if not any(item.status is not None for item in states(folder)):
        return 0  # no guard, so no gateway that sends requests here
    mark.touch()
    began = time.monotonic()
    told = ""
    while True:
        left = sum(item.in_flight for item in states(folder) if item.is_of(engine))
        elapsed_s = time.monotonic() - began
        if elapsed_s >= SETTLE_S and (left == 0 or elapsed_s >= deadline_s):
            return left
        line = f"draining: {left} request(s) in hand"
        if line != told and left:
            told = line
            say(line)
        time.sleep(POLL_S)


def undrain(deadline_s: float, *, engine: str = "", folder: Path = SOCKETS, mark: Path = DRAIN_FILE) -> bool:
    """Take a mark away; True when every guard found its engine well, and every gateway had the time to see it.

    Arguments: `engine` is the URL of the only engine that is waited for: of several one may be down, or be the next one's turn.
    A guard that does not say whose it is, or nothing at all, is waited for too. One that still says 404 has another mark, which
    is somebody else's: a host that a person took out of service stays out.
    """
    if not mark.exists():
        return True
    mark.unlink()
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        if all(item.status in (200, 404) for item in states(folder) if item.is_of(engine)):
            time.sleep(SETTLE_S)
            return True
        time.sleep(POLL_S)
    return False


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None, *, folder: Path = SOCKETS, mark: Path = DRAIN_FILE) -> int:
    """The command line; returns the exit status."""
    about = "Take this host, or one of its engines, out of service, or bring it back."
    parser = argparse.ArgumentParser(prog="python -m laoka.serving.drain", description=about)
    parser.add_argument("verb", choices=("on", "off", "status"))
    parser.add_argument("--instance", default="", metavar="NAME", help="this one of serve_instances alone")
    parser.add_argument("--deadline-s", type=float, default=600.0, help="how long requests in hand are waited for [600]")
    options = parser.parse_args(argv)
    found = [item for item in states(folder) if not options.instance or item.socket == options.instance]
    if options.instance and not any(item.mark for item in found):
        names = ", ".join(item.socket for item in states(folder) if item.mark) or "none"
        print(f"drain: no guard here answers for {options.instance}; those that do: {names}", file=sys.stderr)
        return 2
    engine, marks = "", [mark]
    if options.instance:
        engine, marks = found[0].engine, [mark_beside(folder / f"{found[0].socket}.sock")]
    elif options.verb == "off":
        marks += [item.mark for item in found if item.mark]  # the host is in service when each of its engines is
    try:
        if options.verb == "on":
            left = drain(options.deadline_s, _tell, engine=engine, folder=folder, mark=marks[0])
            print(f"drained, {left} request(s) still in hand")
            return 1 if left else 0
        if options.verb == "off":
            set_ones = [one for one in marks if one.exists()]
            for one in set_ones[1:]:
                one.unlink(missing_ok=True)
            if set_ones and not undrain(options.deadline_s, engine=engine, folder=folder, mark=set_ones[0]):
                print("in service, but not well yet:", file=sys.stderr)
    except OSError as error:
        print(f"drain: {error}", file=sys.stderr)
        return 2
    found = [item for item in states(folder) if not options.instance or item.socket == options.instance]
    for item in found:
        print(f"{item.socket}: {item.words}, {item.in_flight} request(s) in hand")
    return 0 if found and all(item.status in (200, 404) for item in found) else 1


if __name__ == "__main__":
    sys.exit(main())
