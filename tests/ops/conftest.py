"""Two hosts with a driver, for all tests that need one: bare at first, then with the older version and an engine that runs."""

from __future__ import annotations

import pytest

from tests.hosts import Deployed
from tests.ops.drivers import KERNEL, OLD, RELEASES, Pair, deploy, name_release, serve_metrics


@pytest.fixture(scope="session")
def first_runs(driver_hosts: Pair) -> tuple[Deployed, Deployed, Deployed]:
    """A dry run on two bare hosts, the first run and the second."""
    for host, release in zip(driver_hosts, RELEASES, strict=True):
        name_release(host, release)
    data: dict[str, object] = {"driver": OLD}
    one = driver_hosts[0]
    return tuple(deploy(one, how, only=False, data=data) for how in ("--dry", "-y", "-y"))  # type: ignore[return-value]


@pytest.fixture(scope="session")
def driver_pair(driver_hosts: Pair, first_runs: tuple[Deployed, Deployed, Deployed]) -> Pair:
    """Two hosts with the older driver, whose engine (a stand-in that only has metrics) runs."""
    assert first_runs[1].status == 0, first_runs[1].stderr[-2000:]
    for host in driver_hosts:
        serve_metrics(host)
    return driver_hosts


@pytest.fixture
def old_pair(driver_pair: Pair) -> Pair:
    """The same, on the older driver and kernel whatever the tests before did."""
    done = deploy(driver_pair[0], "-y", only=False, data={"kernel": KERNEL, "driver": OLD})
    assert done.status == 0, done.stderr[-2000:]
    return driver_pair
