"""The HostReport as a pyinfra fact: the probe's one round trip, over whatever connector pyinfra uses."""

from __future__ import annotations

import shlex

from pyinfra.api.facts import FactBase

from laoka.host.probe import script
from laoka.host.report import HostReport


def read_command() -> str:
    """Shell text that runs the probe, whatever the login shell is."""
    return f"sh -c {shlex.quote(script())}"


def read(output: list[str]) -> HostReport:
    """The report out of the lines that the probe printed."""
    return HostReport.from_probe("\n".join(output) + "\n")


class Report(FactBase[HostReport]):
    """What the host is, read by laoka's probe. It only reads, and ends within its own deadline."""

    def command(self) -> str:
        return read_command()

    def process(self, output: list[str]) -> HostReport:
        return read(output)
