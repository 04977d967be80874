"""Tells people that a served unit is down for good, where the watchdog does not: `python -m laoka.agent.down --unit UNIT`.

systemd starts it by OnFailure=. Of the unit that a running watchdog looks at it says nothing: the watchdog has an incident for it.
One of several instances is no unit that it looks at.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from laoka.agent import channels, outbox, wording
from laoka.agent.config import DEFAULT_PATH, Config, ConfigError, load_config
from laoka.agent.unit import read_unit
from laoka.catalog.messages import language, text
from laoka.serving.record import Record, path_of, read_record

WATCHDOG = "qwen-watchdog.service"


def message(config: Config, unit: str, record: Record | None) -> tuple[str, str]:
    """Title and body of the alert."""
    kind = record.kind if record and record.state == "failed" else "?"
    detail = record.detail if record else ""
    fix = (record.fix if record else "") or f"journalctl -u {unit} -n 100"
    marks = wording.marks(config)
    title = text("serve.down_title", config.lang, marks=marks, host=config.host, unit=unit)
    return title, text("serve.down_body", config.lang, kind=kind, detail=detail, fix=fix, unit=unit)


def main(argv: Sequence[str] | None = None, config_path: Path = Path(DEFAULT_PATH)) -> int:
    """The command line; 0 when somebody was told, or when nobody has to be; 1 when no channel took it."""
    parser = argparse.ArgumentParser(prog="python -m laoka.agent.down", description="Tell that a served unit is down for good.")
    parser.add_argument("--unit", required=True)
    unit = parser.parse_args(argv).unit
    if read_unit(unit).active != "failed":
        print(f"{unit} is not down for good: nothing to tell", file=sys.stderr)
        return 0
    try:
        config = load_config(config_path)
    except ConfigError:
        config = Config(host=socket.gethostname(), lang=language())
    if config.unit == unit and read_unit(WATCHDOG).active == "active":
        print(f"{unit} is down for good: the watchdog tells", file=sys.stderr)
        return 0
    title, body = message(config, unit, read_record(path_of(unit)))
    print(f"{title}\n{body}", file=sys.stderr)
    try:
        urls, _source = outbox.read_urls(config.alert_urls_file)
    except (OSError, UnicodeDecodeError) as error:
        print(f"nobody was told: {config.alert_urls_file}: {error}", file=sys.stderr)
        return 1
    sent = [channels.send(url, title, body, "opened") for url in urls]
    print(f"told by {sum(sent)} of {len(sent)} channels", file=sys.stderr)
    return 0 if any(sent) else 1


if __name__ == "__main__":
    sys.exit(main())
