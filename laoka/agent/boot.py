"""The boot sensor, once per start: did the boot before this one end in order, and if not, does its journal say why?

A power supply that trips under load leaves no word: the journal stops in the middle of ordinary lines. An orderly end says so:
journald notes that it stops (message ids: systemd's sd-messages.h).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from laoka.agent.signals import Reading, Signal
from laoka.process import run

JOURNAL_STARTED = "f77379a8490b408bbe5f6940505a777b"
JOURNAL_STOPPED = "d93fb3c9c24d451a97cea615ce59c00b"
DEADLINE_S = 20.0
LINES = 400
# What a kernel or the machine says before it goes down by its own fault.
_DEATHS = re.compile(
    r"Kernel panic|Oops:|BUG: |Out of memory|watchdog: BUG|hard LOCKUP|Machine [Cc]heck|Hardware Error|NVRM: Xid|fallen off the bus"
    r"|thermal.*critical|critical temperature",
)


@dataclass(frozen=True)
class LastWords:
    """The end of a boot's journal. `orderly`: journald noted that it stops. `death`: the last line that tells of a fault."""

    found: bool
    orderly: bool = False
    death: str = ""
    last: str = ""
    last_unix_s: float = 0.0


def parse_journal(text: str) -> LastWords:
    """The output of `journalctl -o json`, oldest first. Lines that are not JSON (a journal cut in the middle) are passed over."""
    found, orderly, death, last, last_unix_s = False, False, "", "", 0.0
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if not isinstance(entry, dict):
            continue
        message = entry.get("MESSAGE")
        words = message if isinstance(message, str) else ""
        found = True
        # journald can be restarted in mid-boot: only a stop that no start follows is the end.
        orderly = {JOURNAL_STOPPED: True, JOURNAL_STARTED: False}.get(str(entry.get("MESSAGE_ID")), orderly)
        if _DEATHS.search(words) and entry.get("_TRANSPORT") == "kernel":
            death = words
        last = words or last
        stamp = str(entry.get("__REALTIME_TIMESTAMP", ""))
        last_unix_s = int(stamp) / 1e6 if stamp.isdecimal() else last_unix_s
    return LastWords(found, orderly, death[:300], last[:300], last_unix_s)


def read_last_words() -> LastWords:
    """The end of the journal of the boot before this one."""
    argv = ["journalctl", "-b", "-1", "-n", str(LINES), "-o", "json", "--no-pager"]
    done = run(argv, deadline_s=DEADLINE_S, max_output_bytes=8 * 1024 * 1024)
    return parse_journal(done.stdout) if done.ok else LastWords(False)


def judge(boot_id: str, known_boot_id: str, words: LastWords, *, power_was_cut: bool) -> Reading:
    """Signals (events): psu_trip, unclean_boot. Only a boot that is new to the watchdog is judged; `power_was_cut` by itself."""
    if not known_boot_id or boot_id == known_boot_id:
        return Reading("boot", "ok", detail="no boot since the last look")
    if not words.found:
        return Reading("boot", "unknown", detail="the journal of the last boot can't be read: is it persistent?")
    if words.orderly:
        return Reading("boot", "ok", detail="the last boot ended in order")
    if power_was_cut:
        return Reading("boot", "ok", detail="the last boot ended by the watchdog's own power cut")
    values: dict[str, str | int | float] = {"last": words.death or words.last}
    kind = "unclean_boot" if words.death else "psu_trip"
    detail = f"the last boot did not end in order; last: {words.death or words.last}"
    signal = Signal(kind, "boot", seen=detail, values=values, lasting=False, origin=f"boot:{boot_id}")
    return Reading("boot", "bad", (signal,), detail)
