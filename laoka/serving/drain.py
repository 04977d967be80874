"""Takes a host out of service without cutting a stream, and brings it back: `python -m laoka.serving.drain on|off|status`.

The guard of a host that drains says 404 to the health checks of every gateway: it gets no new request, and finishes those it has.
The mark lies in /run: a boot ends it.
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

from laoka.serving.guard import DRAIN_FILE
from laoka.serving.unix_http import UnixConnection

SOCKETS = Path("/run/qwen-guard")
SETTLE_S = 5.0
"""Two checks of every gateway (2 s each, haproxy.cfg.j2) and a second: until then one may still send a request."""
POLL_S = 0.2
ASK_S = 5.0


@dataclass(frozen=True)
class State:
    """What one guard says: HTTP `status` (None: no answer), `words` for people, requests `in_flight`, its engine's URL."""

    socket: str
    status: int | None
    words: str
    in_flight: int
    engine: str = ""


def states(folder: Path = SOCKETS) -> tuple[State, ...]:
    """What each guard of this host says now; empty where none listens."""
    return tuple(_state(path) for path in sorted(folder.glob("*.sock")))


def _state(path: Path) -> State:
    connection = UnixConnection(path, ASK_S)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        said = json.loads(answer.read())
        return State(path.stem, answer.status, str(said["status"]), int(said["in_flight"]), str(said.get("engine", "")))
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        return State(path.stem, None, f"no answer: {error}", 0)
    finally:
        connection.close()


def drain(deadline_s: float, say: Callable[[str], None], *, folder: Path = SOCKETS, mark: Path = DRAIN_FILE) -> int:
    """Take this host out of service; returns how many requests were still in hand when `deadline_s` passed (0: none).

    Errors: OSError when the mark can't be set.
    """
    if not any(item.status is not None for item in states(folder)):
        return 0  # no guard, so no gateway that sends requests here
    mark.touch()
    began = time.monotonic()
    told = ""
    while True:
        left = sum(item.in_flight for item in states(folder))
        elapsed_s = time.monotonic() - began
        if elapsed_s >= SETTLE_S and (left == 0 or elapsed_s >= deadline_s):
            return left
        line = f"draining: {left} request(s) in hand"
        if line != told and left:
            told = line
            say(line)
        time.sleep(POLL_S)


def undrain(deadline_s: float, *, engine: str = "", folder: Path = SOCKETS, mark: Path = DRAIN_FILE) -> bool:
    """Bring this host back; True when every guard found its engine well, and every gateway had the time to see it.

    Arguments: `engine` is the URL of the only engine that is waited for: of several one may be down, or be the next one's turn.
    A guard that does not say whose it is, or nothing at all, is waited for too.
    """
    if not mark.exists():
        return True
    mark.unlink()
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        if all(item.status == 200 for item in states(folder) if not engine or item.engine in ("", engine)):
            time.sleep(SETTLE_S)
            return True
        time.sleep(POLL_S)
    return False


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    about = "Take this host out of service, or bring it back."
    parser = argparse.ArgumentParser(prog="python -m laoka.serving.drain", description=about)
    parser.add_argument("verb", choices=("on", "off", "status"))
    parser.add_argument("--deadline-s", type=float, default=600.0, help="how long requests in hand are waited for [600]")
    options = parser.parse_args(argv)
    try:
        if options.verb == "on":
            left = drain(options.deadline_s, lambda line: print(line, file=sys.stderr, flush=True))
            print(f"drained, {left} request(s) still in hand")
            return 1 if left else 0
        if options.verb == "off" and not undrain(options.deadline_s):
            print("in service, but not well yet:", file=sys.stderr)
    except OSError as error:
        print(f"drain: {error}", file=sys.stderr)
        return 2
    found = states()
    for item in found:
        print(f"{item.socket}: {item.words}, {item.in_flight} request(s) in hand")
    return 0 if found and all(item.status in (200, 404) for item in found) else 1


if __name__ == "__main__":
    sys.exit(main())
