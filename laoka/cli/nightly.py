"""On a GPU host, by a timer: the host against its lock and inventory; what has changed since the last time is alerted.

Needs nothing of the operator's packages: `python -m laoka.cli.nightly /etc/laoka/audit.json`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from laoka.agent import channels, outbox
from laoka.catalog.messages import Language, language, text
from laoka.files import write_atomic
from laoka.fleet.audit import FORMAT, AuditTarget, Change, NotAnAudit, audit, changes, document
from laoka.fleet.expected import expected_of
from laoka.fleet.show import change_lines
from laoka.host import collect
from laoka.host.report import HostReport

LAST = "/var/lib/laoka/audit/last.json"
TOLD = ("new", "worse", "lost", "gone", "better", "back")
"""Kinds of changes that are told: a version that moved on is no news when everything is as it should be."""

Send = Callable[[str, str, str, str], bool]


def message(found: Sequence[Change], host: str, lang: Language, *, simulated: bool) -> tuple[str, str] | None:
    """(title, body) of what is to be told; None when there is nothing."""
    told = [change for change in found if change.kind in TOLD]
    if not told:
        return None
    marks = f"{text('watchdog.simulated', lang)} " if simulated else ""
    bad = sum(change.bad for change in told)
    title = text("audit.alert.title" if bad else "audit.alert.title_better", lang, marks=marks, host=host, count=bad)
    return title, "\n".join(change_lines(told, lang))


def judge_here(wishes: dict[str, Any], read: Callable[[], HostReport], now_s: float) -> dict[str, Any]:
    """The audit of this host as a document."""
    expected = expected_of(wishes["host"], wishes["data"], wishes["stack"], has_lock=wishes["has_lock"])
    result = audit([AuditTarget(wishes["host"], read, expected)])
    return document(result, language(wishes["lang"]), at_unix_s=now_s, inventory="-", lock=None)


def run(config: Path, last: Path, read: Callable[[], HostReport], send: Send, say: Callable[[str], None]) -> int:
    """Judge, tell, and remember what was told. Returns 0, or 1 when it could not be told: the next run tells it then.

    Errors: OSError, ValueError and KeyError for a config that is none.
    """
    wishes = json.loads(config.read_text(encoding="utf-8"))
    lang = language(wishes["lang"])
    now = judge_here(wishes, read, time.time())
    try:
        before = json.loads(last.read_text(encoding="utf-8"))
        found = changes(before, now)
    except (OSError, ValueError, NotAnAudit):
        # The first time, or what was kept is damaged: everything that is wrong is new.
        found = changes({"format": FORMAT, "hosts": [{**now["hosts"][0], "error": None, "findings": []}], "fleet": []}, now)
    told = message(found, wishes["host"], lang, simulated=bool(wishes["simulated"]))
    failed = False
    if told is not None:
        say(f"{told[0]}\n{told[1]}")
        severity, kind = ("warning", "opened") if any(change.bad for change in found) else ("notice", "recovered")
        addresses, _ = outbox.read_addresses(wishes["alert_urls_file"])
        urls = [url for url in addresses.urls if addresses.takes(url, severity)]
        for url in urls:
            if not (channels.is_address(url) and send(url, *told, kind)):
                say(f"{outbox.channel_name(url)}: not delivered; it is told again next time")
                failed = True
    if not failed:
        write_atomic(last, json.dumps(now, ensure_ascii=False) + "\n", 0o600)
    return 1 if failed else 0


def main() -> int:
    """Entry point of the timer's unit."""
    config = Path(sys.argv[1])
    try:
        return run(config, Path(LAST), collect.from_this_machine, channels.send, print)
    except (OSError, ValueError, KeyError) as error:
        print(f"{config}: {type(error).__name__} {error}: deploy this host again", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
