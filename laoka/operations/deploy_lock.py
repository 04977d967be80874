"""One deploy at a time on a host, and a ledger of those that changed something: who, what, when, from which lock.

The lock is a file on the host. It is held by the connection of the run that took it: the sshd process that serves it. When a run
is killed, its connection ends, and the next one sees that nobody holds the lock any more. Neither taking nor giving it back counts
as a change, and a run that changed nothing leaves no trace, so that a second run of a deploy changes nothing.
"""

from __future__ import annotations

import getpass
import json
import os
import shlex
import socket
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from functools import cache
from typing import Any

from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS
from pyinfra.api.command import StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host, state

from laoka.catalog.messages import Language, text
from laoka.host.deployed import DEPLOYS, DeployLine, read_deploy
from laoka.operations.refusal import refusal

KEPT = 200
"""Lines that the ledger keeps."""
BOOTING_S = 900
"""A lock of another boot still counts for this long after a boot: the run that holds it may be waiting for this very reboot."""
CHANGED_KEPT = 60
ASK_AGAIN_S = 5

# The process that a run lives by: the sshd of its connection, or without one the Python that runs pyinfra.
_OWNER = """
ticks() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d ' ' -f 20; }
boot=$(cat /proc/sys/kernel/random/boot_id)
owner=
p=$$
while [ "${p:-0}" -gt 1 ]; do
    read -r comm <"/proc/$p/comm"
    case $comm in
    sshd*) owner=$p; break ;;
    pyinfra* | python*) [ -n "$owner" ] || owner=$p ;;
    esac
    p=$(awk '/^PPid:/ { print $2 }' "/proc/$p/status")
done
[ -n "$owner" ] || owner=$PPID
"""

_TAKE = """
alive() {
    if [ "$1" != "$boot" ]; then
        read -r up rest </proc/uptime
        [ "${up%%.*}" -lt %(booting)d ]
        return
    fi
    [ -n "$3" ] && [ "$(ticks "$2")" = "$3" ]
}
mkdir -p "$d" && exec 9<"$d" && flock -w 20 9 || { echo busy; exit 0; }
said=taken
new=$line
if [ -s "$d/lock" ]; then
    { read -r old; read -r b p t r; } <"$d/lock"
    if [ "$r" = "$run" ]; then
        said=ours
        new=$old
    elif [ -n "$r" ] && [ "$force" = no ] && alive "$b" "$p" "$t"; then
        printf 'held\\n%%s\\n' "$old"
        exit 0
    else
        said="over
$old"
        { [ -e "$d/ledger" ] && cat "$d/ledger"; printf '%%s, "outcome": "interrupted"}\\n' "${old%%\\}}"; } |
            tail -n %(kept)d >"$d/ledger.new"
        mv "$d/ledger.new" "$d/ledger"
    fi
fi
printf '%%s\\n%%s %%s %%s %%s\\n' "$new" "$boot" "$owner" "$(ticks "$owner")" "$run" >"$d/lock.new" && sync -f "$d/lock.new"
mv "$d/lock.new" "$d/lock" && printf '%%s\\n' "$said"
"""

_GIVE_BACK = """
exec 9<"$d" && flock -w 20 9 || { echo busy; exit 0; }
r=
[ -s "$d/lock" ] && { read -r old; read -r b p t r; } <"$d/lock"
[ "$r" = "$run" ] || { printf 'lost\\n%%s\\n' "${old:-}"; exit 0; }
if [ -n "$line" ]; then
    # One line a run: a run of several deploys is told once, by its last one.
    { [ -e "$d/ledger" ] && grep -vF "\\"run\\": \\"$run\\"" "$d/ledger"; printf '%%s\\n' "$line"; } |
        tail -n %(kept)d >"$d/ledger.new"
    mv "$d/ledger.new" "$d/ledger"
fi
rm -f "$d/lock"
echo given back
"""


@cache
def run_id() -> str:
    """The id of this run of pyinfra, the same for all hosts and deploys of it."""
    return uuid.uuid4().hex


@cache
def began_s() -> int:
    """When this run came to its first host, Unix time in seconds."""
    return round(time.time())


@cache
def operator() -> str:
    """Who runs this: user@machine."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = f"uid-{os.getuid()}"
    return f"{name}@{socket.gethostname()}"


def line_of(values: Mapping[str, object]) -> str:
    """One line of JSON, without a line feed whatever a name holds."""
    return json.dumps(values, ensure_ascii=False, sort_keys=True)


def take_command(line: str, run: str, *, force: bool = False, folder: str = DEPLOYS) -> str:
    """Shell text that takes the lock and prints one word: taken, ours, over (and the line of a run that ended without giving it
    back), held (and the line of the run that has it), or busy.
    """
    return _script(
        _OWNER + _TAKE % {"booting": BOOTING_S, "kept": KEPT}, d=folder, line=line, run=run, force="yes" if force else "no"
    )


def give_back_command(line: str, run: str, *, folder: str = DEPLOYS) -> str:
    """Shell text that gives the lock back, and adds `line` to the ledger unless it is empty."""
    return _script(_GIVE_BACK % {"kept": KEPT}, d=folder, line=line, run=run)


def _script(text: str, **values: str) -> str:
    given = "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())
    return f"sh -c {shlex.quote(given + text)}"


def _ask(command: str) -> tuple[str, DeployLine | None]:
    """Run a command of the lock at once, with the rights of the present operation: (its word, the deploy that it names)."""
    given: Mapping[str, Any] = host.current_op_global_arguments or {}
    arguments = {key: value for key, value in given.items() if key in CONNECTOR_ARGUMENT_KEYS}
    done, output = host.run_shell_command(StringCommand(command), **{**arguments, "_timeout": 60})
    lines = output.stdout_lines
    if not done or not lines:
        return "failed", None
    return lines[0].strip(), read_deploy(lines[1]) if len(lines) > 1 else None


def _since(deploy: DeployLine) -> dict[str, str]:
    minutes = max(0, int((time.time() - deploy.began_unix_s) / 60))
    return {"who": deploy.who, "what": deploy.what, "minutes": str(minutes)}


@operation()
def take_deploy_lock(what: Mapping[str, str], wait_s: int, take_over: bool, lang: Language) -> Generator[str, None, None]:
    """Have this host to ourselves for this run; refuse it with the name of who has it. Never counts as a change.

    + what: deploy, inventory, lock and laoka version, for whoever looks
    + wait_s: how long another deploy is waited for
    + take_over: take the lock whoever holds it
    + lang: language of messages
    """
    if not state.is_executing:
        host.noop("a dry run takes no lock")
        return
    line = line_of({**what, "run": run_id(), "who": operator(), "began_unix_s": began_s()})
    end_s, told = time.monotonic() + wait_s, False
    while True:
        word, other = _ask(take_command(line, run_id(), force=take_over))
        if word not in ("held", "busy") or time.monotonic() >= end_s:
            break
        if not told and other is not None:
            host.log(text("deploys.waiting", lang, seconds=wait_s, **_since(other)))
            told = True
        time.sleep(ASK_AGAIN_S)
    if word in ("held", "busy"):
        facts = _since(other) if other else {"who": "?", "what": "?", "minutes": "0"}
        yield refusal([text("deploys.held", lang, host=host.name, **facts)])
    elif word == "failed":
        yield refusal([text("deploys.unwritable", lang, host=host.name, folder=DEPLOYS)])
    elif word == "over" and other is not None:
        host.log(text("deploys.taken_over", lang, **_since(other)))
    host.noop("no other deploy is under way here")


@operation()
def give_back_deploy_lock(what: Mapping[str, str], lang: Language) -> Generator[str, None, None]:
    """Give the host back; what this run changed is told in the ledger. Never counts as a change.

    + what: as for the lock
    + lang: language of messages
    """
    if state.is_executing:
        names = changed_here()
        line = ""
        if names:
            now_s = round(time.time())
            line = line_of({
                **what, "run": run_id(), "who": operator(), "began_unix_s": began_s(), "ended_unix_s": now_s, "outcome": "done",
                "changed": names[:CHANGED_KEPT],
            })  # fmt: skip
        word, other = _ask(give_back_command(line, run_id()))
        if word == "lost":
            host.log(text("deploys.lost", lang, who=other.who if other else "?"))
    host.noop("the deploy is over")
    yield from ()


def changed_here() -> Sequence[str]:
    """Names of the operations that have changed this host in this run, in order."""
    found = []
    for op_hash, data in state.ops[host].items():
        meta = data.operation_meta
        if meta.is_complete() and meta.did_change():
            found += sorted(state.get_op_meta(op_hash).names)
    return found
