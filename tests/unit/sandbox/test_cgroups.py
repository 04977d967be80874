"""Each throw-away host has a control group of its own, wherever the unified hierarchy is mounted."""

from __future__ import annotations

from pathlib import Path

from laoka.sandbox.cgroups import unified_root


def test_the_unified_hierarchy_is_found_on_hybrid_and_on_pure_machines() -> None:
    hybrid = "cgroup /sys/fs/cgroup/pids cgroup rw,pids 0 0\ncgroup /sys/fs/cgroup/unified cgroup2 rw 0 0\n"
    pure = "proc /proc proc rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n"
    assert unified_root(hybrid) == Path("/sys/fs/cgroup/unified")
    assert unified_root(pure) == Path("/sys/fs/cgroup")
    assert unified_root("tmpfs / tmpfs rw 0 0\n") is None
