"""Fixtures for all tests: sandbox labs that are taken down whatever happens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from laoka.sandbox import hosts
from laoka.sandbox.lab import HostFolder, Lab, open_lab


@pytest.fixture(scope="session")
def tests_lab() -> Iterator[Lab]:
    """The lab of the sandbox tests, empty at first. A machine that can't have one fails with the command that helps."""
    yield from _lab("tests")


@pytest.fixture(scope="session")
def ops_host() -> Iterator[HostFolder]:
    """One bare host for the operations' tests."""
    for lab in _lab("ops"):
        yield hosts.up(lab, 1, print)[0]


def _lab(name: str) -> Iterator[Lab]:
    hosts.check_machine()
    lab = open_lab(name)
    hosts.down(lab)  # what an interrupted run left
    try:
        yield lab
    finally:
        hosts.down(lab)
