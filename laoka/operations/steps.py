"""Small operations that other ones are built of: refuse a host, run steps until a stamp says done, switch a link, run a unit."""

from __future__ import annotations

import shlex
from collections.abc import Generator

from pyinfra.api.command import StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host, state
from pyinfra.facts.files import Link

from laoka.catalog.messages import Language, text
from laoka.facts.system import (
    AptHolds,
    AptListsStale,
    ConfigNoted,
    DebFolder,
    InstalledOf,
    PathsOf,
    SameFiles,
    StampText,
    UnitFiles,
    UnitRuns,
    UnitsOutdated,
)
from laoka.operations.apt import apt_get, wait_for_apt
from laoka.operations.refusal import refusal
from laoka.serving.unit_config import STAMPS as STAMPS
from laoka.serving.unit_config import config_hash_command, stamp_of

Commands = Generator[str | StringCommand, None, None]


@operation()
def refuse(lines: list[str]) -> Commands:
    """Fail this host with a message; nothing when there is none."""
    if lines:
        yield refusal(lines)
    else:
        host.noop("nothing to refuse")


@operation()
def until_stamped(stamp: str, text: str, commands: list[str]) -> Commands:
    """Run commands once for a given text, and again when the text changes.

    + stamp: the file that says which text was reached
    + text: one line, usually a version or a hash of what the commands depend on
    + commands: shell commands; they must be safe to repeat, as a run may be killed between any two of them

    The stamp is written last, so an interrupted run starts over.
    """
    if host.get_fact(StampText, path=stamp) == text:
        host.noop(f"{stamp} says {text}")
        return
    for command in commands:
        yield locked(command)
    yield write_stamp(stamp, text)


def locked(command: str) -> str:
    """A command that waits for its like: when a run is killed, its last command goes on on the host, and two would collide."""
    return f"mkdir -p {STAMPS} && flock -w 1800 {STAMPS}/lock sh -c {shlex.quote(command)}"


def write_stamp(stamp: str, text: str) -> str:
    """Shell text that writes a stamp by rename, after everything before it has reached the disk."""
    quoted = shlex.quote(stamp)
    folder = shlex.quote(stamp.rsplit("/", 1)[0])
    written = f"printf '%s\\n' {shlex.quote(text)} > {quoted}.new && sync -f {quoted}.new"
    return f"mkdir -p {folder} && {written} && mv {quoted}.new {quoted}"


@operation()
def switch_link(path: str, target: str) -> Commands:
    """Point a symbolic link at `target` in one step: a reader sees the old target or the new one."""
    link = host.get_fact(Link, path=path)
    if link and link["link_target"] == target:
        host.noop(f"{path} points to {target}")
        return
    quoted = shlex.quote(path)
    yield f"ln -sfn {shlex.quote(target)} {quoted}.new && mv -T {quoted}.new {quoted}"


@operation()
def apt_hold(packages: list[str], certain: list[str], lock_wait_s: int, lang: Language) -> Commands:
    """Put packages on hold, so that no upgrade moves them; waits for dpkg's lock, which that takes.

    + packages: names and globs; those that are not installed are left out
    + certain: names that are installed by the time this runs; a dry run counts them although they are not there yet
    + lock_wait_s: how long it waits for whoever uses apt
    + lang: language in which it tells who that is
    """
    installed = host.get_fact(InstalledOf, patterns=packages)
    held: list[str] = host.get_fact(AptHolds)
    missing = sorted({*installed, *certain}.difference(held))
    if missing:
        yield from wait_for_apt(lang, lock_wait_s)
        yield f"apt-mark hold {' '.join(shlex.quote(name) for name in missing)}"
    else:
        host.noop("all on hold")


@operation()
def index_debs(folder: str, place: str) -> Commands:
    """Have the index that apt needs for a folder of .debs, made anew when the folder's content changed.

    + folder: where the .debs lie on the host; nothing is written there
    + place: a folder of its own for the index; its link `debs` leads to the .debs
    """
    now, noted = host.get_fact(DebFolder, folder=folder, place=place)
    if not now:
        yield refusal([f"{host.name}: {folder} holds no .deb, or is not there: mount it, or correct deb_folders in the inventory"])
    elif now == noted:
        host.noop(f"the index of {folder} is current")
    else:
        where, debs = shlex.quote(place), shlex.quote(folder)
        yield (
            f"mkdir -p {where} && ln -sfn {debs} {where}/debs && cd {where} && for d in debs/*.deb; do "
            'dpkg-deb -f "$d" && printf "Filename: %s\\nSize: %s\\nSHA256: %s\\n\\n" "$d" "$(stat -L -c %s "$d")" '
            '"$(sha256sum < "$d" | cut -d " " -f 1)" || exit 1; done > Packages.new && mv Packages.new Packages'
        )
        yield write_stamp(f"{place}/stamp", now)


@operation()
def apt_update_when_stale(lock_wait_s: int, lang: Language) -> Commands:
    """Refresh apt's lists when they are older than a day or than the sources; waits for apt's lock.

    + lock_wait_s: how long it waits for whoever uses apt
    + lang: language in which it tells who that is
    """
    if host.get_fact(AptListsStale):
        yield from wait_for_apt(lang, lock_wait_s)
        yield f"{apt_get('update', lock_wait_s)} && touch /var/lib/apt/lists/laoka-updated"
    else:
        host.noop("apt's lists are fresh")


@operation()
def apt_install(packages: list[str], lock_wait_s: int, lang: Language) -> Commands:
    """Install packages that are missing, from what the preferences allow; waits for apt's lock; asks nothing.

    + packages: names
    + lock_wait_s: how long it waits for whoever uses apt
    + lang: language in which it tells who that is
    """
    missing = [name for name in packages if name not in host.get_fact(InstalledOf, patterns=packages)]
    if not missing:
        host.noop("all installed")
        return
    yield from wait_for_apt(lang, lock_wait_s)
    names = " ".join(shlex.quote(name) for name in missing)
    yield apt_get(f"-y -o Dpkg::Options::=--force-confold --no-install-recommends install {names}", lock_wait_s)


@operation()
def run_unit(
    unit: str,
    config: list[str],
    test: str = "true",
    test_deadline_s: int = 30,
    reload: list[str] | None = None,
    restart: bool = True,
    change: str = "",
) -> Commands:
    """Have a unit enabled and running with the configuration that is on disk now, and doing its work.

    + unit: name with its suffix
    + config: files and links that make up its configuration; a change of any restarts the unit
    + test: shell command that succeeds when the unit does its work; a unit that fails it is restarted
    + test_deadline_s: how long after a start it may take until the test succeeds
    + reload: files that the unit reads again by `systemctl reload`; a change of these alone does not restart it
    + restart: False for a unit that only stands for others, which a restart of it would restart too: it is started where it is not
    + change: command that restarts it where it runs, and drains the host before (laoka.serving.rollout); call it with _serial=True,
      so that one host is changed at a time; a host where it failed stops it for those that come after

    What it started well with is noted on the host, so a run killed between writing a file and the restart is caught up.
    `systemctl restart` returns when the unit says that it is ready (Type=notify, or ExecStartPost), so a unit that dies on
    its way up fails this operation.
    """
    stamp, read_again = str(stamp_of(unit)), list(reload or ())
    reload_stamp = f"{STAMPS}/{unit}.reload"
    runs = host.get_fact(UnitRuns, unit=unit, paths=config, stamp=stamp, test=test)
    noted = host.get_fact(ConfigNoted, paths=read_again, stamp=reload_stamp)
    quoted = shlex.quote(unit)
    started_well = runs.active and runs.enabled and runs.config_sha256 == runs.running_sha256
    if started_well and runs.works and noted:
        host.noop(f"{unit} runs with the present configuration, and works")
        return
    trouble = f"{{ systemctl status --no-pager -n 0 {quoted} >&2; journalctl -u {quoted} -n 25 --no-pager -o cat >&2; exit 1; }}"
    if started_well and not noted:
        yield f"systemctl reload {quoted} || {trouble}"
    elif change and runs.active:
        failed = failed_before()
        if failed is not None:
            yield refusal([f"{host.name}: {unit} was not touched: the rollout stopped when {failed} failed"])
            return
        yield change
    else:
        yield "systemctl daemon-reload"
        yield f"systemctl reset-failed {quoted} 2>/dev/null || true"
        yield f"systemctl enable {quoted} 2>&1"
        yield f"systemctl {'restart' if restart else 'start'} {quoted} || {trouble}"
    yield f"systemctl is-active {quoted}"
    yield wait_for(test, test_deadline_s, f"{unit} runs, but after {test_deadline_s} s this still fails: {test}")
    yield note_config(config, stamp)
    if read_again:
        yield note_config(read_again, reload_stamp)


def failed_before() -> str | None:
    """The name of a host on which this very operation failed already in this run."""
    for other in state.inventory:
        data = state.ops[other].get(host.current_op_hash or "")
        if other is not host and data is not None and data.operation_meta.is_complete() and data.operation_meta.did_error():
            return str(other.name)
    return None


def note_config(paths: list[str], stamp: str) -> str:
    """Shell text that notes the hash of a configuration that works, and below it the paths, one a line."""
    # The paths below the hash let laoka.serving.switch bring it up to date when it restarts the unit itself.
    listed = " ".join(shlex.quote(path) for path in paths)
    noted = f"{{ {config_hash_command(paths)}; printf '%s\\n' {listed}; }}"
    return f"mkdir -p {STAMPS} && {noted} > {stamp}.new && mv {stamp}.new {stamp}"


@operation()
def reread_units(units: list[str], changes: bool = False) -> Commands:
    """Have systemd read its units anew where it knows one of these otherwise than its files are, whichever run wrote them.

    + units: names and globs
    + changes: whether this run writes or removes one of their files, which a fact that is read before the run can't see
    """
    if changes or host.get_fact(UnitsOutdated, units=units):
        yield "systemctl daemon-reload"
    else:
        host.noop("systemd knows them as they are")


@operation()
def checked_file(source: str, path: str, check: str) -> Commands:
    """Have a file be as another one, which a program found no fault with: a wrong one never gets where a boot would read it.

    + source: the file on the host that is to be taken over
    + path: where it goes
    + check: shell command that succeeds when `source` is right
    """
    if host.get_fact(SameFiles, pairs=[[source, path]]):
        host.noop(f"{path} is as {source}")
        return
    new = shlex.quote(f"{path}.new")
    yield f"{check} && cp -p {shlex.quote(source)} {new} && mv {new} {shlex.quote(path)}"


@operation()
def retire_units(pattern: str, keep: list[str]) -> Commands:
    """Stop, disable and remove units of ours that are no longer wanted, with what systemd keeps for them.

    + pattern: pattern of the shell for names below /etc/systemd/system
    + keep: names that stay
    """
    gone = [name for name in host.get_fact(UnitFiles, pattern=pattern) if name not in keep]
    for name in gone:
        quoted = shlex.quote(name)
        # Its caches and its record too, while systemd still knows where they are; 235 has no `clean`, and nothing hangs on it.
        clean = f"systemctl clean --what=runtime --what=cache --what=state {quoted} 2>/dev/null"
        stamps = " ".join(f"{STAMPS}/{quoted}.{kind}" for kind in ("config", "reload"))
        yield f"systemctl disable --now {quoted} 2>&1; {clean}; rm -f /etc/systemd/system/{quoted} {stamps}"
    if gone:
        yield "systemctl daemon-reload"
    else:
        host.noop("none to retire")


@operation()
def keep_only(patterns: list[str], keep: list[str], lang: Language) -> Commands:
    """Remove files of ours that no setting asks for any more: a key, a certificate, a source that the inventory had once.

    + patterns: patterns of the shell, absolute, for names that nobody but laoka gives
    + keep: paths that stay, although they match
    + lang: language in which it says what goes
    """
    gone = [path for path in host.get_fact(PathsOf, patterns=patterns) if path not in keep]
    if not gone:
        host.noop("nothing is left over")
        return
    for path in gone:
        host.log(text("serve.left_over", lang, path=path))
    yield f"rm -rf -- {' '.join(shlex.quote(path) for path in gone)}"


def wait_for(test: str, deadline_s: int, complaint: str) -> str:
    """Shell text that repeats a test every second until it succeeds; fails with a message after the deadline."""
    return (
        f"end=$(( $(date +%s) + {deadline_s} )); until ( {test} ) >/dev/null 2>&1; do "
        f'[ "$(date +%s)" -lt "$end" ] || {{ echo {shlex.quote(complaint)} >&2; exit 1; }}; sleep 1; done'
    )


def http_test(url: str, needle: str, key: str = "") -> str:
    """Shell text that succeeds when a loopback URL answers, in 5 seconds, with a text that contains `needle`.

    Arguments: `key` is a file on the host with the API key that is sent; it never gets onto a command line.
    """
    sent = f"""printf 'header = "Authorization: Bearer %s"' "$(cat {shlex.quote(key)})" | """ if key else ""
    # The certificate is that of the name that clients use, not of the loopback.
    options = ("-K - " if key else "") + ("-k " if url.startswith("https:") else "")
    return f"{sent}curl -sf -m 5 {options}{shlex.quote(url)} | grep -qF -- {shlex.quote(needle)}"


def completion_test(python: str, url: str, model: str, *, judge_text: bool, key: str = "") -> str:
    """Shell text that succeeds when a short completion comes back from the server, asked with the host's own laoka.

    Arguments: `key` is a file on the host with the API key; empty: none is sent.
    """
    words = [
        python, "-m", "laoka.serving.completion", "ask", "--url", url, "--model", model, "--max-tokens", "8", "--deadline-s", "30",
    ]  # fmt: skip
    words += ["--api-key-file", key] if key else []
    return " ".join(shlex.quote(word) for word in words) + ("" if judge_text else " --no-judge-text")
