"""The HostReport as a pyinfra fact: the probe's one round trip, over whatever connector pyinfra uses."""

from __future__ import annotations

import shlex

from pyinfra.api.facts import FactBase

from laoka.host.probe import script
from laoka.host.report import HostReport


class Report(FactBase[HostReport]):
    """What the host is, read by laoka's probe. It only reads, and ends within its own deadline."""

    def command(self) -> str:
        return f"sh -c {shlex.quote(script())}"

    def process(self, output: list[str]) -> HostReport:
        return HostReport.from_probe("\n".join(output) + "\n")
