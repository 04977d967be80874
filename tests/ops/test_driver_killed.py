"""deploys/driver.py killed at one point after the other, each run from what the one before left: the next run goes on to the end.

The packages are stand-ins, kernel and card are simulated; apt, dpkg, GRUB's menu, systemd and sshd are real. Two shorter chains are
in test_driver.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops.drivers import (
    CHANGE,
    KERNEL,
    NEW,
    NEXT,
    Pair,
    Point,
    boot_id,
    deploy,
    killed_everywhere,
    loaded,
    make_bare,
    say,
    until_booted_since,
    write_points,
)

pytestmark = pytest.mark.long
REREAD = "CUDA | systemd knows of it"
LISTS = "Base | apt lists are fresh"
KEEP_BOOT = "Kernel | The next boot takes a kernel that has its module"


def test_before_every_step_of_a_change_with_a_reboot(old_pair: Pair, tmp_path: Path) -> None:
    """An upgrade together with another kernel; each run starts from what the one before left, and is killed one step further.

    So the state before a step is that of one kill at this step, up to steps before it that were begun more than once. A run that is
    killed while it waits for the host's return leaves the same as one that is killed when it is just back.
    """
    host, points = old_pair[0], tmp_path / "points.jsonl"
    data: dict[str, object] = {"kernel": NEXT, "driver": NEW}
    # What comes before the change and has something to do anyway; between operations: the next test.
    before = deploy(host, "--dry", data=data).planned(host.name)
    write_points(points, [(name, "") for name in before if name != CHANGE])
    boots = [boot_id(host)]

    def wait_for_the_host(point: Point) -> None:
        if point[1] == "wait_for_return":  # it is on its way down, with nobody who waits for it
            until_booted_since(host, boots[-1])
            boots.append(boot_id(host))

    found = killed_everywhere(host, points, data, wait_for_the_host)
    assert found == [
        *((CHANGE, step) for step in ("begin", "drain", "install", "boot")),
        (KEEP_BOOT, ""),  # the module is proven to be there, and the boot loader does not know it: so the next run begins with that
        *((CHANGE, step) for step in ("hold", "announce_reboot", "reboot", "wait_for_return", "start", "finish")),
    ]
    assert len(boots) == 2 and boot_id(host) == boots[-1]
    state = say(host, "uname -r"), loaded(host), say(host, "systemctl is-active qwen-serve")
    assert state == (NEXT, NEW, "active")
    assert say(host, "ls /var/lib/laoka/driver").split() == ["debs", "log", "previous", "stage.log", "steps.sh"]


def test_between_any_two_operations_from_a_bare_host(old_pair: Pair, tmp_path: Path) -> None:
    """Killed when an operation that changes something is about to start, at each of them: what lies before it is done, it is not.

    All that the dry run foretold for the bare host is among them, so none that changes something is left out.
    """
    host = old_pair[1]
    make_bare(host)
    data: dict[str, object] = {"driver": NEW, "cuda_toolkit": "12-8"}
    foretold = deploy(host, "--dry", data=data).planned(host.name)
    found = [name for name, _ in killed_everywhere(host, tmp_path / "points.jsonl", data, inside="nowhere")]
    # Which a dry run can't know: apt's lists are stale once the source is written.
    assert {LISTS, REREAD} <= set(found) and REREAD in foretold
    assert [name for name in found if name != LISTS] == [name for name in foretold if name != LISTS]
    assert len(found) > 15 and CHANGE in found
    state = say(host, "uname -r"), loaded(host), say(host, "systemctl is-active qwen-serve laoka-power nvidia-persistenced")
    assert state == (KERNEL, NEW, "active\nactive\nactive")
    assert say(host, "systemctl show qwen-serve -P Environment") == "CUDA_HOME=/usr/local/cuda-12.8"
    assert deploy(host, "-y", data=data).changed(host.name) == []
