"""A host's report as the facts of a request: its cards, release, kernel, glibc and Python. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from laoka.catalog.drivers import release
from laoka.host.report import HostReport
from laoka.host.unread import Unread
from laoka.stack.request import Card, RequestError, card_of


@dataclass(frozen=True)
class HostFacts:
    """What of a host decides on its stack; None where the report could not say (then the release's own value is taken)."""

    cards: tuple[Card, ...]
    os_release: str
    kernel: str | None
    glibc: str | None
    python: str | None


def facts_of(report: HostReport, os_release: str | None = None) -> HostFacts:
    """The facts of a report.

    Arguments: `os_release` to use where the report does not name one.
    Errors: RequestError when the cards could not be read (unknown is not "none"), or no known release is named.
    """
    if isinstance(report.gpus, Unread):
        raise RequestError(f"the report does not say which cards are there: {report.gpus.reason}; name them with --gpu")
    if not report.gpus and not report.pci_complete:
        raise RequestError("the report shows no card, but it is not a complete PCI listing; name the cards with --gpu")
    system = report.system
    named = os_release
    if named is None and not isinstance(system.os, Unread):
        named = f"{system.os.id}-{system.os.version_id}"
    if named is None:
        raise RequestError("the report does not name the system's release; name it with --os")
    if release(named) is None:
        raise RequestError(f"the release {named} is not in the catalogue; name one that is with --os")
    kernel, glibc, python = report.kernel.release, system.glibc_version, None
    if not isinstance(system.pythons, Unread):
        own = next((version for path, version in system.pythons if path.rsplit("/", 1)[-1] == "python3"), None)
        found = re.match(r"\d+\.\d+", own or "")
        python = found.group(0) if found else None
    return HostFacts(
        tuple(card_of(gpu.id_text) for gpu in report.gpus),
        named,
        None if isinstance(kernel, Unread) else kernel,
        None if isinstance(glibc, Unread) else glibc,
        python,
    )
