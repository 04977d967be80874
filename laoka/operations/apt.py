"""apt on a host that others use too: its lock is waited for in words, and a wait that ends in vain fails clearly."""

from __future__ import annotations

import time
from collections.abc import Generator

from pyinfra.context import host, state

from laoka.catalog.messages import Language, text
from laoka.facts.driver import AptLockHolders
from laoka.operations.refusal import refusal
from laoka.stack.message import Message, message

_POLL_S = 3
_TELL_S = 30


def wait_for_apt(lang: Language, wait_s: int) -> Generator[str, None, None]:
    """Wait until nobody holds a lock of apt or dpkg, telling who does; yields a command that fails when that takes too long.

    In a dry run nothing is waited for.
    """
    busy = still_busy(lang, wait_s) if state.is_executing else None
    if busy is not None:
        yield refusal([f"{host.name}: {busy.say(lang)}"])


def still_busy(lang: Language, wait_s: int) -> Message | None:
    """The same for where nothing may simply fail: who holds a lock even after the wait, or None."""
    begun = time.monotonic()
    told = -1.0
    while holders := host.get_fact(AptLockHolders):
        first, waited = holders[0], time.monotonic() - begun
        values = {"pid": first.pid, "name": first.name, "path": first.path}
        if waited >= wait_s:
            return message("driver.apt_still_busy", waited_s=int(waited), **values)
        if told < 0 or waited - told >= _TELL_S:
            host.log(text("driver.apt_busy", lang, left_s=int(wait_s - waited), **values))
            told = waited
        time.sleep(min(_POLL_S, max(0.2, wait_s - waited)))
    return None


def apt_get(words: str, wait_s: int) -> str:
    """A command of apt that asks nothing. A lock that somebody takes after `wait_for_apt` apt waits for itself, without words."""
    return f"DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout={wait_s} -q {words}"
