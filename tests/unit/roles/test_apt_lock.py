"""apt's lock while somebody else has it: every operation that needs it waits in words, as long as it is told, and then fails."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from pyinfra.context import ctx_host, ctx_state

from laoka.facts.driver import AptLockHolders
from laoka.facts.system import AptHolds, AptListsStale, InstalledOf
from laoka.host.apt import LockHolder
from laoka.operations.cuda import clear_toolkits
from laoka.operations.steps import apt_hold, apt_install, apt_update_when_stale

HOLDER = LockHolder("/var/lib/dpkg/lock-frontend", 4711, "unattended-upgr")
TOLD = "apt is busy: process 4711 (unattended-upgr) holds /var/lib/dpkg/lock-frontend; waiting, at most {} s more"
GIVEN_UP = "v100-1: apt was busy for 40 s: process 4711 (unattended-upgr) holds /var/lib/dpkg/lock-frontend; let it end, "


@dataclass
class Clock:
    """Time that passes only where somebody sleeps."""

    now: float = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Host:
    """A host on which somebody has apt's lock until a time, and where everything is still to be done."""

    clock: Clock
    free_at: float
    name: str = "v100-1"
    told: list[str] = field(default_factory=list)

    def get_fact(self, fact: type, **_: object) -> object:
        holders = (HOLDER,) if self.clock.now < self.free_at else ()
        return {AptLockHolders: holders, AptListsStale: True, AptHolds: [], InstalledOf: {"cuda-13-0": "13.0.1-1"}}[fact]

    def log(self, line: str) -> None:
        self.told.append(line)

    def log_styled(self, line: str, fg: str) -> None:
        self.told.append(line)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "sleep", made.sleep)
    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    return made


def commands(operation: Any, host: Host, arguments: dict[str, object], *, executing: bool = True) -> Iterator[str]:
    with ctx_state.use(SimpleNamespace(is_executing=executing)), ctx_host.use(host):
        yield from (str(command) for command in operation._inner(**arguments))


OPERATIONS = [
    (apt_update_when_stale, {}, "-q update && "),
    (apt_install, {"packages": ["nftables"]}, "--no-install-recommends install nftables"),
    (apt_hold, {"packages": ["cuda-13-0"], "certain": []}, "apt-mark hold cuda-13-0"),
    (clear_toolkits, {"wanted": None, "remove": True}, "purge cuda-13-0"),
]


@pytest.mark.parametrize(("operation", "arguments", "does"), OPERATIONS)
def test_a_lock_that_gets_free_was_waited_for_in_words(
    clock: Clock, operation: Any, arguments: dict[str, object], does: str
) -> None:
    host = Host(clock, free_at=clock.now + 35)
    (done,) = commands(operation, host, {**arguments, "lock_wait_s": 40, "lang": "en"})
    assert does in done
    # apt waits as long itself, for a lock that is taken between the question and its start.
    assert "DPkg::Lock::Timeout=40 " in done or operation is apt_hold
    assert host.told[-2:] == [TOLD.format(40), TOLD.format(10)]  # at once, and every half minute
    assert 1035 <= clock.now < 1040


@pytest.mark.parametrize(("operation", "arguments", "does"), OPERATIONS)
def test_a_lock_that_stays_fails_the_host_before_anything_is_done(
    clock: Clock, operation: Any, arguments: dict[str, object], does: str
) -> None:
    first = next(commands(operation, Host(clock, free_at=float("inf")), {**arguments, "lock_wait_s": 40, "lang": "en"}))
    done = subprocess.run(["sh", "-c", first], capture_output=True, text=True, timeout=10)
    assert done.returncode == 1 and done.stderr.startswith(GIVEN_UP) and len(done.stderr.splitlines()) == 1
    assert does not in first


@pytest.mark.parametrize(("operation", "arguments", "does"), OPERATIONS)
def test_a_dry_run_waits_for_nobody(clock: Clock, operation: Any, arguments: dict[str, object], does: str) -> None:
    host = Host(clock, free_at=float("inf"))
    (done,) = commands(operation, host, {**arguments, "lock_wait_s": 40, "lang": "en"}, executing=False)
    assert does in done and clock.now == 1000.0 and not [line for line in host.told if "busy" in line]


def test_it_is_told_in_the_operators_language(clock: Clock) -> None:
    host = Host(clock, free_at=clock.now + 1)
    list(commands(apt_install, host, {"packages": ["nftables"], "lock_wait_s": 5, "lang": "zh"}))
    assert host.told == ["apt 正忙：进程 4711（unattended-upgr）持有 /var/lib/dpkg/lock-frontend；等待中，最多再等 5 秒"]
