"""Starts the watchdog: python -m laoka.agent --config /etc/laoka/watchdog.toml."""

from __future__ import annotations

import argparse
import sys

from laoka.agent.config import DEFAULT_PATH, ConfigError, load_config
from laoka.agent.daemon import run


def main(argv: list[str] | None = None) -> int:
    """The command line; returns only when the settings are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m laoka.agent",
        description="The watchdog: notices dropped cards and dead engines, and tells people..",
    )
    parser.add_argument("--config", default=DEFAULT_PATH, help=f"settings file (default {DEFAULT_PATH})")
    options = parser.parse_args(argv)
    try:
        config = load_config(options.config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    run(config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
