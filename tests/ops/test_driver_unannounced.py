"""A reboot in the middle of a driver change that can't be announced, as the run does not hold the host any more: it is not made.

The packages are stand-ins, kernel and card are simulated; apt, dpkg, GRUB's menu, systemd and sshd are real.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from laoka.host.deployed import DEPLOYS
from laoka.sandbox.lab import HostFolder
from tests.ops.drivers import (
    KERNEL,
    NEW,
    NEXT,
    OLD,
    Pair,
    boot_id,
    deploy,
    driver_packages,
    loaded,
    no_requests,
    read_all,
    say,
    while_requests_end,
)

pytestmark = pytest.mark.long
DATA: Mapping[str, object] = {"kernel": NEXT, "driver": NEW}
BOOTS = "grub-editenv - list; cat /etc/default/grub.d/zz-laoka-kernel.cfg"


def changed_without_the_host(host: HostFolder, command: str) -> tuple[int, str]:
    """A change with a reboot, while whose requests end a command makes the host not the run's own: (its status, what it said)."""
    with while_requests_end(host, DATA) as run:
        say(host, command)
        no_requests(host)
        return read_all(run)


def test_a_lock_that_somebody_removed_takes_the_change_back_and_the_engine_runs(old_pair: Pair) -> None:
    host = old_pair[0]
    before = driver_packages(host), boot_id(host), say(host, BOOTS)
    status, said = changed_without_the_host(host, f"rm {DEPLOYS}/lock")
    assert status == 1
    assert "no reboot was made, as it could not be announced: somebody has removed" in said, said[-2500:]
    assert f"it is back on {OLD}, and runs as before" in said, said[-2500:]
    assert (driver_packages(host), boot_id(host), say(host, BOOTS)) == before
    assert (say(host, "uname -r"), loaded(host), say(host, "systemctl is-active qwen-serve")) == (KERNEL, OLD, "active")
    done = deploy(host, "-y", data=DATA)
    assert (done.status, say(host, "uname -r"), loaded(host)) == (0, NEXT, NEW), done.stderr[-2500:]
    assert deploy(host, "-y", data=DATA).changed(host.name) == []


def test_a_host_that_another_run_took_is_left_to_it_and_what_is_stopped_is_told(old_pair: Pair) -> None:
    """Going back would go under the feet of that run, which ends the change if it is one of the driver too."""
    host = old_pair[1]
    before = boot_id(host)
    status, said = changed_without_the_host(host, f"sed -i '2s/ [^ ]* [0-9]*$/ another 1/' {DEPLOYS}/lock")
    assert status == 1
    assert "no reboot was made, as it could not be announced: another run has taken this host over" in said, said[-2500:]
    assert "nothing more was done here; what was stopped is not started again: " in said and "qwen-serve.service" in said
    assert "going back to" not in said
    assert (boot_id(host), loaded(host), say(host, "systemctl is-active qwen-serve; true")) == (before, OLD, "inactive")
    say(host, f"rm {DEPLOYS}/lock")  # that run is over
    done = deploy(host, "-y", data=DATA)
    assert done.status == 0, done.stderr[-2500:]
    assert (say(host, "uname -r"), loaded(host), say(host, "systemctl is-active qwen-serve")) == (NEXT, NEW, "active")
    assert deploy(host, "-y", data=DATA).changed(host.name) == []
