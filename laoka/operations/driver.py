"""A driver change on one host after the other: fetch, drain, install, prove, reboot if that is needed and allowed, prove again,
start again; and the way back when anything on that way is not as it has to be."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

from paramiko.ssh_exception import SSHException
from pyinfra.api.command import FunctionCommand, PyinfraCommand
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host, state

from laoka.catalog.messages import Language, text
from laoka.facts.driver import FOLDER, AptRoom, AptSimulations, BootId, ChangeJournal, EnrolledKeys, HostBasics, Said
from laoka.facts.report import Report
from laoka.host.unread import Unread
from laoka.operations import driver_commands as commands
from laoka.operations.apt import still_busy, wait_for_apt
from laoka.operations.deploy_lock import TAKEN, after_reboot, announce_reboot
from laoka.operations.refusal import refusal
from laoka.operations.steps import failed_before
from laoka.stack.driver_change import (
    Change,
    DriverState,
    Journal,
    Offer,
    boot_kernel,
    grub_entry,
    known_bad,
    moved,
    plan_change,
    state_of,
    unfinished,
    unready,
)
from laoka.stack.driver_target import DriverTarget
from laoka.stack.message import Message, message

Steps = Generator[str | PyinfraCommand, None, None]
APT_DEADLINE_S = 3600
START_DEADLINE_S = 1800
UNITS_UP_S = 180
STEP_DEADLINE_S = 120
# Room beyond what apt asks for: DKMS builds in /var/lib/dkms, and an initramfs is made anew.
MARGIN_BYTES, BUILD_BYTES = 300 * 10**6, 1200 * 10**6
# A kernel with its initramfs, which is written beside the one that it takes the place of; asked for where /boot is a file system.
BOOT_BYTES = 200 * 10**6
# Kept on the host during a change, for the way back of one that fills the disk.
RESERVE_BYTES = 200 * 10**6


@dataclass(frozen=True)
class Wish:
    """How a change is to go.

    `reboot` "allowed", "never", or "ask": then pyinfra's own --yes is the permission. `preferences` the text of the pins, so
    that a plan made before they are written reckons with them.
    """

    target: DriverTarget
    expected_gpus: int
    preferences: str
    reboot: str
    reboot_deadline_s: int
    drain_deadline_s: int
    lock_wait_s: int
    metrics_url: str
    lang: Language


class Unplannable(Exception):
    """The host's state could not be read; the message says what."""


def _say(key: str, lang: Language, **values: object) -> None:
    host.log(text(f"driver.{key}", lang, **values))


def _step(key: str, lang: Language, **values: object) -> None:
    _say("step", lang, what=text(f"driver.{key}", lang, **values))


def _words(messages: Iterable[Message], lang: Language) -> str:
    return "; ".join(item.say(lang) for item in messages)


def look() -> DriverState:
    """The driver's state as it is now. Errors: Unplannable when something that decides could not be read."""
    report = host.get_fact(Report)
    found = state_of(report, host.get_fact(EnrolledKeys))
    if isinstance(found, Unread):
        raise Unplannable(found.reason)
    return found


def plan(wish: Wish) -> tuple[Change | None, DriverState, Journal]:
    """The plan for this host by what it is now. Errors: Unplannable."""
    now = look()
    journal = host.get_fact(ChangeJournal)
    target = wish.target
    plain = plan_change(now, target, Offer(), journal)
    if plain is None or not plain.install:
        return plain, now, journal
    ask = [
        "-o",
        "APT::Ignore-Hold=true",
        "install",
        "--no-install-recommends",
        "--allow-downgrades",
        "--allow-change-held-packages",
    ]
    # apt simulates with the pins of this run, whether they are written yet or not.
    requests = {
        label: [*ask, *plain.kernel, *target.packages(built=built), *(f"{name}-" for name in plain.remove)]
        for label, built in (("built", True), ("dkms", False))
    }
    answers = host.get_fact(AptSimulations, requests=requests, preferences=wish.preferences)
    offer = Offer(**{label: answers[label] for label in ("built", "dkms") if label in answers})
    return plan_change(now, target, offer, journal), now, journal


@operation()
def driver_gate(wish: Wish) -> Steps:
    """Tell the plan, and refuse a host where it can't be carried out, before anything is changed or stopped.

    In a dry run it only tells: the sources that the packages come from may be among what the run would set up.
    """
    yield from wait_for_apt(wish.lang, wish.lock_wait_s)  # a step that a killed run left may still be at work
    try:
        change, _, _ = plan(wish)
    except Unplannable as error:
        yield _refuse(message("driver.unread", reason=str(error)), wish.lang)
        return
    if change is None:
        host.noop("the driver is as wanted")
        return
    for line in change.lines():
        host.log(line.say(wish.lang))
    if not state.is_executing:
        return
    why = _against(change, wish)
    if why is None and change.install:
        room = host.get_fact(AptRoom, packages=change.install)
        all_of_it = (room.needs or 0) + MARGIN_BYTES + RESERVE_BYTES + (0 if change.built else BUILD_BYTES)
        for path, free, need in ((FOLDER, room.free, all_of_it), ("/boot", room.boot_free, BOOT_BYTES)):
            if why is None and free is not None and free < need:
                why = message("driver.no_space", free_mb=free // 10**6, need_mb=need // 10**6, path=path)
    if why is not None:
        yield _refuse(why, wish.lang)


def _refuse(why: Message, lang: Language) -> str:
    return refusal([text("driver.refused", lang, host=host.name, why=why.say(lang))])


def _against(change: Change, wish: Wish) -> Message | None:
    """Why a change can't be begun."""
    target = wish.target
    bad = known_bad(change.version, target.kernel)
    if bad is not None:
        return message("driver.known_bad", version=change.version, kernel=target.kernel, source=bad)
    if change.refused:
        way = message("driver.way_apt", repository=target.source.repository or target.source.name, name=change.install[-1])
        said = message("driver.apt_refuses", names=", ".join(change.install), said=change.refused)
        return Message("driver.both", (("first", said), ("second", way)))
    if change.reboots and not _may_reboot(wish):
        return message("driver.reboot_needed")
    return None


def _may_reboot(wish: Wish) -> bool:
    """Whether a reboot is permitted. pyinfra looks for changes first, and asks, unless it was given --yes."""
    asks: bool = state.should_check_for_changes()  # type: ignore[no-untyped-call]
    return wish.reboot == "allowed" or (wish.reboot == "ask" and not asks)


@operation()
def driver_stage(wish: Wish) -> Steps:
    """Fetch what the change and the way back need, on all hosts at once, while they go on serving."""
    try:
        change, _, _ = plan(wish)
    except Unplannable as error:
        yield _refuse(message("driver.unread", reason=str(error)), wish.lang)
        return
    if change is None or not change.install:
        host.noop("nothing to fetch")
        return
    yield from wait_for_apt(wish.lang, wish.lock_wait_s)
    fetch = commands.step("stage", *wish.target.first, *change.install, *(f"{name}-" for name in change.remove))
    yield commands.quietly(fetch, text("driver.stage_failed", wish.lang), f"{FOLDER}/stage.log")


@operation()
def driver_change(wish: Wish) -> Steps:
    """Change the driver; call it with _serial=True, so that one host is changed at a time.

    A host that fails here stops the rollout: the hosts after it are left as they are. Nothing happens where all is as wanted.
    """
    try:
        change, before, journal = plan(wish)
    except Unplannable as error:
        yield _refuse(message("driver.unread", reason=str(error)), wish.lang)
        return
    if change is None:
        host.noop("the driver is as wanted")
        return
    failed = failed_before()
    if failed is not None:
        yield _refuse(message("driver.rollout_stopped", failed=failed), wish.lang)
        return
    if not change.install and change.activation == "none" and not journal.begun and not journal.stopped:
        yield commands.step("hold")
        return
    yield from wait_for_apt(wish.lang, wish.lock_wait_s)
    yield commands.step("begin", str(RESERVE_BYTES if change.install else 0), *change.kernel)
    # A command that fails ends the operation there and then. Once something is stopped none may: each says how it ended.
    if not change.quiet and (change.install or change.activation in ("reload", "reboot")):
        yield from _drain(wish)
    if change.install:
        busy = still_busy(wish.lang, wish.lock_wait_s)  # by somebody who came while the requests ended
        if busy is not None:
            yield from _go_back(wish, before, busy, lock_wait_s=0)
            return
        _step("doing_apt", wish.lang)
        said = yield from _failed(APT_DEADLINE_S, *commands.install(wish.target.first, change.install, change.remove))
        why = _both(_unproven(wish), _apt_failed(said))
        if why is not None:
            yield from _go_back(wish, before, _both(why, message("driver.no_reboot")) or why)
            return
    else:
        said = yield from _failed(STEP_DEADLINE_S, "hold")
        why = _both(_unproven(wish), _apt_failed(said))
        if why is not None:
            yield from _go_back(wish, before, why)
            return
    why = yield from _pin(wish, wish.target.kernel)
    if why is None and change.quiet:
        yield from _drain(wish)
    if why is None:
        why = yield from _activate(wish)
    if why is None:
        why = _unserving(wish)
    if why is None:
        why = yield from _start(wish)
    if why is not None:
        yield from _go_back(wish, before, why)
        return
    now = look()
    yield commands.step("finish", f"driver {now.loaded} on {now.running_kernel}, was {before.loaded or 'none'}")
    _say("done", wish.lang, version=now.loaded, kernel=now.running_kernel, gpus=now.gpus)


def _drain(wish: Wish) -> Steps:
    _step("doing_drain", wish.lang, deadline_s=wish.drain_deadline_s)
    yield commands.step("drain", wish.metrics_url, str(wish.drain_deadline_s))


def _last(said: str) -> str:
    """The line of a log that tells most: an error of DKMS, dpkg or apt, else its last one."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("Error!", "E: ", "dpkg: error", "modprobe: ", "rmmod: "))]
    return "; ".join((told or lines)[-3:])[:400] or "?"


def _apt_failed(said: str | None) -> Message | None:
    return None if said is None else message("driver.apt_failed", said=said)


def _both(first: Message | None, second: Message | None) -> Message | None:
    return Message("driver.both", (("first", first), ("second", second))) if first and second else first or second


def _failed(deadline_s: int, verb: str, *arguments: str) -> Generator[str | PyinfraCommand, None, str | None]:
    """Run a step as a unit. Returns its last words when it failed, or None."""
    yield commands.step_as_unit(deadline_s, verb, *arguments)
    status, said = host.get_fact(Said, step=verb)
    return None if status == 0 else _last(said)


def _look() -> DriverState | Message:
    try:
        return look()
    except Unplannable as error:
        return message("driver.unread", reason=str(error))


def _unproven(wish: Wish) -> Message | None:
    """Why the wanted module would not run after the next boot."""
    now = _look()
    if isinstance(now, Message):
        return now
    found = unready(now, wish.target)
    return message("driver.all", all=_words(found, wish.lang)) if found else None


def _unserving(wish: Wish) -> Message | None:
    """Why the wanted driver does not run now."""
    now = _look()
    if isinstance(now, Message):
        return now
    found = unfinished(now, wish.target, wish.expected_gpus)
    return message("driver.all", all=_words(found, wish.lang)) if found else None


def _pin(wish: Wish, kernel: str) -> Generator[str | PyinfraCommand, None, Message | None]:
    """The boot loader's default, after the module was proven and before any reboot. Returns why it could not be set, or None."""
    report = host.get_fact(Report)
    menu = report.kernel.menu
    entry = None if isinstance(menu, Unread) else grub_entry(menu, kernel)
    if entry is None or report.kernel.grub_default == entry:
        return None
    said = yield from _failed(STEP_DEADLINE_S, "boot", entry)
    return None if said is None else message("driver.boot_failed", kernel=kernel, said=said)


def _activate(wish: Wish) -> Generator[str | PyinfraCommand, None, Message | None]:
    """Have the module that is on disk run: load it, change it for the old one, or reboot. Returns why it could not be, or None."""
    now = _look()
    if isinstance(now, Message):
        return now
    target = wish.target
    if now.running_kernel == target.kernel and not now.nouveau:
        if now.loaded is not None and now.loaded == now.module(target.kernel) and now.loaded_open == (target.flavour == "open"):
            return None
        _step("doing_reload", wish.lang)
        yield commands.step_as_unit(STEP_DEADLINE_S, "load")
        status, said = host.get_fact(Said, step="load")
        if status == 0:
            return None
        if status != 3:
            return message("driver.load_failed", said=_last(said))
        if not _may_reboot(wish):
            return message("driver.module_held", said=_last(said))
    elif not _may_reboot(wish):
        return message("driver.reboot_needed")
    return (yield from _reboot(wish))


def _reboot(wish: Wish) -> Generator[str | PyinfraCommand, None, Message | None]:
    """Boot the host anew. Returns why that could not be announced, and so was not done, or None.

    Where another run has the host by now, nothing more is done here: what goes back would go under its feet.
    """
    lang = wish.lang
    yield commands.noted("announce", announce_reboot(wish.reboot_deadline_s + UNITS_UP_S, lang))
    status, said = host.get_fact(Said, step="announce")
    if status == TAKEN:
        units = ", ".join(host.get_fact(ChangeJournal).stopped) or text("driver.none", lang)
        yield refusal([said, text("driver.left_to_them", lang, units=units)])
    if status != 0:
        return message("driver.unannounced", said=_last(said))
    _step("doing_reboot", lang, deadline_s=wish.reboot_deadline_s)
    yield from _boot_anew(wish.reboot_deadline_s, lang)
    return None


def reboot(deadline_s: int, lang: Language) -> Steps:
    """Boot the host anew, and go on when its units have come up; the deploy's lock stays this run's own meanwhile."""
    yield announce_reboot(deadline_s + UNITS_UP_S, lang)
    yield from _boot_anew(deadline_s, lang)


def _boot_anew(deadline_s: int, lang: Language) -> Steps:
    boot = host.get_fact(BootId)
    yield "( sleep 1; systemctl reboot ) </dev/null >/dev/null 2>&1 &"
    yield FunctionCommand(wait_for_return, (boot, deadline_s, lang), {})
    yield after_reboot(lang)
    # Units of the boot have come up, or failed, before anything is judged.
    yield f"timeout {UNITS_UP_S} systemctl is-system-running --wait >/dev/null 2>&1; true"


def wait_for_return(state: State, host: Host, boot: str, deadline_s: int, lang: Language) -> bool:
    """Wait until a host answers that has booted since. False, with a line that says so, when it does not within `deadline_s`.

    The host is asked once more after the deadline: whoever waits may have slept over it, as a laptop does with its lid closed.
    """
    end = time.monotonic() + deadline_s
    host.disconnect()
    late = False
    while not late:
        late = time.monotonic() >= end
        time.sleep(1)
        if _boot_of(host) not in ("", boot):
            return True
        host.disconnect()
    host.log_styled(text("driver.not_back", lang, host=host.name, deadline_s=deadline_s), fg="red")
    return False


def _boot_of(host: Host) -> str:
    """The boot id that a host tells over a new connection, which is left open; empty when it tells none."""
    host.connect(show_errors=False)
    if not host.connected:
        return ""
    try:
        done, output = host.run_shell_command("cat /proc/sys/kernel/random/boot_id", _timeout=10)
    except (OSError, EOFError, SSHException):  # a host on its way down takes connections, and then ends them in any of these ways
        done = False
    return output.stdout.strip() if done else ""


def _start(wish: Wish) -> Generator[str | PyinfraCommand, None, Message | None]:
    units = host.get_fact(ChangeJournal).stopped
    if not units:
        return None
    _step("doing_start", wish.lang, units=", ".join(units))
    said = yield from _failed(START_DEADLINE_S, "start")
    return None if said is None else message("driver.not_serving", units=said)


def _go_back(wish: Wish, before: DriverState, why: Message, lock_wait_s: int | None = None) -> Steps:
    """Bring the packages, the boot entry and the module of before back, start what was stopped, and fail the host.

    What was stopped is started even where the rest fails: what is there may be whole enough to serve.
    """
    lang = wish.lang
    old = before.module(before.running_kernel) or before.loaded or text("driver.none", lang)
    _step("doing_undo", lang, before=old, why=why.say(lang))
    still_busy(lang, wish.lock_wait_s if lock_wait_s is None else lock_wait_s)  # where nothing has to go back, no lock is needed
    said = yield from _failed(APT_DEADLINE_S, "undo")
    kernel = host.get_fact(ChangeJournal).kernel or before.running_kernel
    problem = _both(_apt_failed(said), (yield from _pin(wish, kernel)))
    now = _look()
    if isinstance(now, Message):
        problem = problem or now
    elif problem is None and before.loaded is not None and (now.loaded != before.loaded or now.running_kernel != kernel):
        yield commands.step_as_unit(STEP_DEADLINE_S, "load")
        held = host.get_fact(Said, step="load")[0] == 3
        if (held or now.running_kernel != kernel) and _may_reboot(wish):
            problem = yield from _reboot(wish)
    stopped = yield from _start(wish)
    lines = [text("driver.failed", lang, host=host.name, why=why.say(lang))]
    if problem is None and stopped is None:
        yield commands.step("finish", f"back on {old}: the change failed")
        lines.append(text("driver.undone", lang, host=host.name, before=old))
    else:
        key = "undo_failed" if stopped else "undo_failed_but_runs"
        told = _both(problem, stopped)
        lines.append(
            text(f"driver.{key}", lang, host=host.name, why=told.say(lang) if told else "", log=f"{FOLDER}/change/undo.log")
        )
    yield refusal(lines)


@operation()
def keep_boot(wish: Wish) -> Steps:
    """Have the boot loader take by default the exact entry of a kernel that has its module: the wanted or else the running one."""
    report = host.get_fact(Report)
    menu = report.kernel.menu
    now = state_of(report, host.get_fact(EnrolledKeys))
    if isinstance(menu, Unread) or isinstance(now, Unread):
        host.noop(f"no boot menu that could be read: {menu.reason if isinstance(menu, Unread) else now}")
        return
    kernel = boot_kernel(now, wish.target)
    entry = grub_entry(menu, kernel)
    if entry is None:
        host.noop(f"kernel {kernel} is not in the boot menu")
    elif report.kernel.grub_default == entry and report.kernel.grub_saved_entry == entry:
        host.noop(f"the boot loader takes {kernel}")
    else:
        yield commands.step("boot", entry)


@operation()
def prove_pins(wish: Wish, typed: Mapping[str, Sequence[str]], also: Sequence[str]) -> Steps:
    """Try with `apt-get -s` what somebody may type, and refuse when any of it would move the driver or the kernel.

    + typed: what is tried, by its label
    + also: packages whose installation is tried where apt has a candidate for them

    Settings that give cards to vfio-pci are told here too. It reads only, and in a dry run nothing: the pins are not written yet.
    """
    if not state.is_executing:
        return
    simulations = host.get_fact(AptSimulations, requests=typed, also=also)
    try:
        now = look()
    except Unplannable as error:
        yield _refuse(message("driver.unread", reason=str(error)), wish.lang)
        return
    found = moved(simulations, now, wish.target)
    if now.vfio:
        host.log_styled(text("driver.vfio", wish.lang, told="; ".join(now.vfio)), fg="yellow")
    if found or len(simulations) < len(typed):
        head = text("driver.pins_refused", wish.lang, host=host.name)
        yield refusal([head, *(f"  {item.say(wish.lang)}" for item in found)])
    else:
        host.log(text("driver.pins_hold", wish.lang, count=len(simulations)))


@operation()
def refuse_release(release: str, locked: str, lang: Language) -> Steps:
    """Refuse a host whose release is not that of its lock."""
    if release != locked:
        yield _refuse(message("driver.release_differs", found=release, locked=locked), lang)
    else:
        host.noop(f"the host is {release}, as locked")


def basics() -> tuple[str, str]:
    """(release, running kernel) of this host."""
    found = host.get_fact(HostBasics)
    return found.release, found.kernel
