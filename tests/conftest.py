"""Fixtures for all tests: sandbox labs that are taken down whatever happens."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from importlib import metadata
from types import FrameType

import pytest
from hypothesis import HealthCheck, settings
from packaging.requirements import Requirement

from laoka.catalog import toml
from laoka.sandbox import faults, hosts
from laoka.sandbox.lab import HostFolder, Lab, open_lab
from tests.hosts import FULL, INVENTORY, ROOT, Deployed, healthy, picture, pyinfra, until

# A busy machine is slow at times, and no test is about that: hypothesis looks for wrong answers, not for late ones.
settings.register_profile("laoka", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("laoka")


def pytest_configure() -> None:
    signal.signal(signal.SIGTERM, _as_interrupt)
    _all_installed()


def _all_installed() -> None:
    """A package that pyproject.toml has got since the last install ends the run with the line that helps."""
    project = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"), "pyproject.toml")["project"]
    for line in (*project["dependencies"], *project["optional-dependencies"]["operator"]):
        wanted = Requirement(line)
        try:
            if wanted.marker is None or wanted.marker.evaluate():
                metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            pytest.exit(f"{wanted.name} is missing: pip install -c constraints.txt -e '.[operator]' --group dev", 2)


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends a run as Ctrl-C does: fixtures are torn down, and labs with them."""
    raise KeyboardInterrupt


@pytest.fixture(scope="session")
def tests_lab() -> Iterator[Lab]:
    """The lab of the sandbox tests, empty at first. A machine that can't have one fails with the command that helps."""
    yield from new_lab("tests")


@pytest.fixture(scope="session")
def ops_host() -> Iterator[HostFolder]:
    """One bare host for the operations' tests."""
    for lab in new_lab("ops"):
        yield hosts.up(lab, 1, print)[0]


@pytest.fixture(scope="session")
def driver_hosts() -> Iterator[tuple[HostFolder, HostFolder]]:
    """Two bare hosts for the driver's tests."""
    for lab in new_lab("drv"):
        first, second = hosts.up(lab, 2, print)
        yield first, second


@pytest.fixture(scope="session")
def pair(tests_lab: Lab) -> tuple[HostFolder, HostFolder]:
    first, second = hosts.up(tests_lab, 2, print)
    faults.apply(second, "above-4g-off", clear=False)
    return first, second


@pytest.fixture(scope="session")
def untouched(pair: tuple[HostFolder, HostFolder]) -> str:
    """What v100-2 is before anything ran on it."""
    return picture(pair[1])


@pytest.fixture(scope="session")
def runs(pair: tuple[HostFolder, HostFolder], untouched: str) -> tuple[Deployed, Deployed]:
    """A dry run, then the first run, on both hosts."""
    lab = pair[0].lab
    return pyinfra(lab, "--dry", INVENTORY, FULL), pyinfra(lab, "-y", INVENTORY, FULL)


@pytest.fixture(scope="session")
def served(pair: tuple[HostFolder, HostFolder], runs: tuple[Deployed, Deployed]) -> HostFolder:
    """A host on which deploys/full.py ran and whose model answers. Who changes it puts it back."""
    until(lambda: healthy(pair[0]), 300, "the model answers")
    return pair[0]


@pytest.fixture(scope="session")
def served_pair(served: HostFolder, pair: tuple[HostFolder, HostFolder]) -> tuple[HostFolder, HostFolder]:
    """Two such hosts."""
    second = pair[1]
    if not healthy(second):
        faults.apply(second, "above-4g-off", clear=True)
        done = pyinfra(second.lab, "-y", "--limit", second.name, INVENTORY, FULL)
        assert (done.status, done.failed(second.name)) == (0, [])
    return served, second


def new_lab(name: str) -> Iterator[Lab]:
    """A lab that is empty at first, and is taken down at the end whatever happens."""
    hosts.check_machine()
    lab = open_lab(name)
    hosts.down(lab)  # what an interrupted run left
    try:
        yield lab
    finally:
        hosts.down(lab)
