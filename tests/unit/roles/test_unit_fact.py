"""The state of a unit as a run asks for it: in one shell, which the unit's own test must not end."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from laoka.facts.system import UnitRuns
from laoka.operations.steps import wait_for


@pytest.mark.parametrize(
    ("test", "works"), [("true", True), ("false", False), ("exit 1", False), ("for x in 1; do exit 1; done", False)]
)
def test_a_test_that_exits_is_one_that_failed(tmp_path: Path, test: str, works: bool) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text('#!/bin/sh\ncase "$1" in show) echo ActiveState=active; echo UnitFileState=enabled;; esac\n')
    systemctl.chmod(0o755)
    fact = UnitRuns()
    command = fact.command(unit="x.service", paths=[], stamp="/none", test=test)
    done = subprocess.run(
        ["sh", "-c", command], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, timeout=20
    )
    state = fact.process(done.stdout.splitlines())
    assert done.returncode == 0 and (state.active, state.enabled, state.works) == (True, True, works)


def test_waiting_for_a_test_that_exits_says_why_at_the_end() -> None:
    done = subprocess.run(["sh", "-c", wait_for("exit 1", 0, "it never came")], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (1, "it never came\n")
