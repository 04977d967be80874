"""One deploy at a time on a host, and a ledger of those that changed something: who, what, when, from which lock.

The lock is a file on the host (laoka.host.deploy_lock). It is held by the connection of the run that took it: the sshd process
that serves it. When a run is killed, its connection ends, and the next one sees that nobody holds the lock any more; whoever ran
it need not even wait for the connection, as a run leaves a mark on its own machine too. A run that reboots the host says so in
the lock, and until when; a lock that outlived any other boot is nobody's. Neither taking nor giving it back counts as a change,
and a run that changed nothing leaves no trace, so that a second run of a deploy changes nothing.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS
from pyinfra.api.command import StringCommand
from pyinfra.api.operation import operation
from pyinfra.connectors.local import LocalConnector
from pyinfra.context import host, state

from laoka.catalog.messages import Language, text
from laoka.host.deploy_lock import read_lock, read_owner, stale
from laoka.host.deployed import DEPLOYS, DeployLine, read_deploy
from laoka.operations.refusal import refusal
from laoka.operations.runs import began_s, is_over, marks, operator, run_id

KEPT = 200
"""Lines that the ledger keeps."""
CHANGED_KEPT = 60
ASK_AGAIN_S = 5
TAKEN = 3
"""How the command ends that renews a lock which another run has by now."""
BUSY_S = 20
"""How long the file lock of the folder is waited for; it is held for moments only."""

_LOCKED = """
exec 9<"$d" && flock -w "$busy_s" 9 || busy
old= r=
[ -s "$d/lock" ] && { read -r old; read -r b p t r a; } <"$d/lock"
ticks() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d ' ' -f 20; }
read -r boot </proc/sys/kernel/random/boot_id
now=$(date +%s)
"""

# Where no owner is given: the nearest sshd above us, which serves this connection and no other.
_WRITE = """
p=$$
while [ -z "$owner" ] && [ "${p:-0}" -gt 1 ]; do
    read -r comm <"/proc/$p/comm"
    case $comm in sshd* | dropbear*) owner=$p ;; esac
    p=$(awk '/^PPid:/ { print $2 }' "/proc/$p/status")
done
owner=${owner:--}
t=-
[ "$owner" = - ] || t=$(ticks "$owner")
{ printf '%s\\n' "$new" "$boot $owner ${t:--} $run $now"; [ "$reboot_s" = 0 ] || echo "reboot $now $((now + reboot_s))"; } |
    cat >"$d/lock.new" && sync -f "$d/lock.new" && mv "$d/lock.new" "$d/lock" || exit 1
"""

_TAKE = """
busy() { echo busy; exit 0; }
mkdir -p "$d" || exit 1
%(locked)s
said=taken
new=$line
if [ "$r" = "$run" ]; then
    said=ours
    new=$old
elif [ -n "$r" ] && [ "$r" != "$oust" ]; then
    echo held
    echo "$boot $now $(ticks "$p")"
    cat "$d/lock"
    exit 0
elif [ -n "$r" ]; then
    said=over
    { [ -e "$d/ledger" ] && cat "$d/ledger"; printf '%%s, "outcome": "interrupted"}\\n' "${old%%\\}}"; } |
        tail -n %(kept)d >"$d/ledger.new"
    mv "$d/ledger.new" "$d/ledger" || exit 1
fi
%(write)s
echo "$said"
"""

_AGAIN = """
refuse() { printf '%%s\\n' "$@" >&2; exit 1; }
busy() { refuse "$busy"; }
[ -e "$d/lock" ] || refuse "$removed"
%(locked)s
[ -e "$d/lock" ] || refuse "$removed"
[ "$r" = "$run" ] || { printf '%%s\\n' "$taken $old" >&2; exit %(stolen)d; }
new=$old
%(write)s
"""

_GIVE_BACK = """
busy() { echo busy; exit 0; }
%(locked)s
[ -z "$r" ] || [ "$r" = "$run" ] || { printf 'lost\\n%%s\\n' "$old"; exit 0; }
if [ -n "$line" ]; then
    # One line a run: a run of several deploys is told once, by its last one.
    { [ -e "$d/ledger" ] && grep -vF "\\"run\\": \\"$run\\"" "$d/ledger"; printf '%%s\\n' "$line"; } |
        tail -n %(kept)d >"$d/ledger.new" && mv "$d/ledger.new" "$d/ledger" || { rm -f "$d/lock"; exit 1; }
fi
rm -f "$d/lock"
echo given back
"""


@dataclass(frozen=True)
class WhyNot:
    """The lines for a lock that can't be renewed: taken by another run, whose own line follows; removed; busy."""

    taken: str
    removed: str
    busy: str


def line_of(values: Mapping[str, object]) -> str:
    """One line of JSON, without a line feed whatever a name holds."""
    return json.dumps(values, ensure_ascii=False, sort_keys=True)


def take_command(line: str, run: str, *, oust: str = "", owner: int | None = None, folder: str = DEPLOYS) -> str:
    """Shell text that takes the lock and prints a word: taken; ours, for a run that has it; over, when it was that of the run
    `oust`; busy; or held, then `boot now ticks` and the lock's lines, for the lock of any other run.

    Arguments: `owner` the process on the host that the run lives by; None: the sshd of this connection, if it has one.
    """
    return _script(_TAKE, d=folder, line=line, run=run, oust=oust, owner=_word(owner), reboot_s="0")


def mark_command(run: str, why_not: WhyNot, *, reboot_s: int = 0, owner: int | None = None, folder: str = DEPLOYS) -> str:
    """Shell text that renews the lock of a run: with the reboot that it is about to make and gives `reboot_s` to, or, with 0,
    after it, for the connection that there is now. It fails, with one line, where the lock is not this run's own any more or can't
    be had: a reboot that can't be announced must not happen, and a run that does not hold the host must not go on. Its status is
    TAKEN where another run has it.
    """
    return _script(_AGAIN, d=folder, run=run, reboot_s=str(reboot_s), owner=_word(owner), **asdict(why_not))


def give_back_command(line: str, run: str, *, folder: str = DEPLOYS) -> str:
    """Shell text that gives the lock back, and adds `line` to the ledger unless it is empty."""
    return _script(_GIVE_BACK, d=folder, line=line, run=run)


def _word(owner: int | None) -> str:
    return "" if owner is None else str(owner)


def _script(text: str, **values: str) -> str:
    given = "".join(f"{name}={shlex.quote(value)}\n" for name, value in {**values, "busy_s": str(BUSY_S)}.items())
    return f"sh -c {shlex.quote(given + text % {'locked': _LOCKED, 'write': _WRITE, 'kept': KEPT, 'stolen': TAKEN})}"


def _owner() -> int | None:
    """Without a connection a run lives by its own process."""
    return os.getpid() if isinstance(host.connector, LocalConnector) else None


def _ask(command: str) -> tuple[str, list[str]]:
    """Run a command of the lock at once, with the rights of the present operation: (its word, what else it said)."""
    given: Mapping[str, Any] = host.current_op_global_arguments or {}
    arguments = {key: value for key, value in given.items() if key in CONNECTOR_ARGUMENT_KEYS}
    done, output = host.run_shell_command(StringCommand(command), **{**arguments, "_timeout": 60})
    if not done or not output.stdout_lines:
        return "failed", [line for line in output.stderr_lines if line.strip()][-1:]
    return output.stdout_lines[0].strip(), list(output.stdout_lines[1:])


def _since(deploy: DeployLine | None) -> dict[str, str]:
    if deploy is None:
        return {"who": "?", "what": "?", "minutes": "0"}
    minutes = max(0, int((time.time() - deploy.began_unix_s) / 60))
    return {"who": deploy.who, "what": deploy.what, "minutes": str(minutes)}


def free(said: Sequence[str], take_over: bool) -> tuple[str, str] | None:
    """Of a lock that another run has: (the run, why it may be taken from it); None while that is under way.

    Arguments: `said` what the host said after "held"; `take_over` whether it is to be taken whoever holds it.
    """
    lock, owner = read_lock(said[1:]), read_owner(said[0]) if said else None
    if lock is None or owner is None:
        # The host told a run from it, but the rest of it can't be read.
        words = said[2].split() if len(said) > 2 else []
        return (words[3], "damaged") if len(words) > 3 else None
    why: str | None = stale(lock, owner)
    other = read_deploy(said[1])
    if why is None and other is not None and other.who == operator() and is_over(marks(), lock.run):
        why = "killed"
    if why is None and take_over:
        why = "told"
    return None if why is None else (lock.run, why)


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
    end_s, told, oust, why, other = time.monotonic() + wait_s, False, "", "", None
    while True:
        word, said = _ask(take_command(line, run_id(), oust=oust, owner=_owner()))
        if word == "held" and said:
            other = read_deploy(said[1]) if len(said) > 1 else None
            found = free(said, take_over)
            if found is not None and found[0] != oust:
                oust, why = found
                continue
        if word not in ("held", "busy") or time.monotonic() >= end_s:
            break
        if not told and other is not None:
            host.log(text("deploys.waiting", lang, seconds=wait_s, **_since(other)))
            told = True
        time.sleep(ASK_AGAIN_S)
    if word in ("held", "busy"):
        yield refusal([text("deploys.held", lang, host=host.name, file=f"{DEPLOYS}/lock", **_since(other))])
    elif word == "failed":
        yield refusal([text("deploys.unwritable", lang, host=host.name, folder=DEPLOYS, why="; ".join(said) or "?")])
    elif word == "over":
        host.log(text("deploys.taken_over", lang, why=text(f"deploys.why.{why}", lang), **_since(other)))
    host.noop("no other deploy is under way here")


def announce_reboot(deadline_s: int, lang: Language) -> str:
    """Shell text for just before a reboot that this run makes: the lock stays its own for `deadline_s`, until the host is back.

    It fails, and so keeps the reboot from being made, where that can't be said in the lock.
    """
    return mark_command(run_id(), _why_not("no_reboot", lang), reboot_s=deadline_s, owner=_owner())


def after_reboot(lang: Language) -> str:
    """Shell text for just after it: the lock is held by the connection that there is now."""
    return mark_command(run_id(), _why_not("after_reboot", lang), owner=_owner())


def _why_not(what: str, lang: Language) -> WhyNot:
    def line(why: str) -> str:
        said = text(f"deploys.why_not.{why}", lang, file=f"{DEPLOYS}/lock", folder=DEPLOYS, seconds=BUSY_S)
        return text(f"deploys.{what}", lang, host=host.name, why=said)

    return WhyNot(line("taken"), line("removed"), line("busy"))


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
        word, said = _ask(give_back_command(line, run_id()))
        if word == "lost":
            other = read_deploy(said[0]) if said else None
            host.log(text("deploys.lost", lang, who=other.who if other else "?"))
        elif line and word != "given back":
            why = "; ".join(said) or text("deploys.why_not.busy", lang, folder=DEPLOYS, seconds=BUSY_S)
            host.log(text("deploys.not_told", lang, host=host.name, why=why))
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
