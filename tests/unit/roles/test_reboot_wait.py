"""Waiting for a host that boots: what its ssh says on the way down, and a wait that was itself asleep."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest
from paramiko.ssh_exception import SSHException
from pyinfra.api.host import Host
from pyinfra.api.state import State

from laoka.operations.driver import wait_for_return

BEFORE, AFTER = "4f6c", "9e1b"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


@dataclass
class Booting:
    """A host that gives these answers, one each time that it is asked for its boot: an id, an error, or None for no connection."""

    answers: list[str | Exception | None]
    name: str = "v100-1"
    connected: bool = False
    told: list[str] = field(default_factory=list)

    def connect(self, show_errors: bool) -> None:
        self.connected = self.answers[0] is not None
        if not self.connected:
            self.answers.pop(0)

    def disconnect(self) -> None:
        self.connected = False

    def run_shell_command(self, command: str, _timeout: int) -> tuple[bool, SimpleNamespace]:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return True, SimpleNamespace(stdout=f"{answer}\n")

    def log_styled(self, line: str, fg: str) -> None:
        self.told.append(line)


def waited(host: Booting, deadline_s: int) -> bool:
    return wait_for_return(cast(State, None), cast(Host, host), BEFORE, deadline_s, "en")


@pytest.mark.parametrize(
    "gone", [SSHException("SSH session not active"), EOFError(), OSError("Socket is closed"), TimeoutError(), BEFORE, None]
)
def test_a_host_on_its_way_down_is_asked_again(gone: str | Exception | None) -> None:
    host = Booting([gone, AFTER])
    assert waited(host, 60) and host.connected and not host.told


def test_a_host_that_came_back_while_nobody_looked_is_back() -> None:
    assert waited(Booting([AFTER]), 0)


def test_a_host_that_does_not_come_back_is_told() -> None:
    host = Booting([None, None])
    assert not waited(host, 0)
    assert host.told == ["v100-1 did not come back within 0 s: look at its screen or its power; the rollout stops here"]
    assert not host.connected
