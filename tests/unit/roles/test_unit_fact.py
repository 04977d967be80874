"""The state of a unit as a run asks for it: in one shell, which the unit's own test must not end."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from laoka.facts.system import UnitRuns, UnitsOutdated
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


def shown(unit: str, *, load: str = "loaded", stale: str = "no", drop_ins: str = "") -> str:
    """What `systemctl show` prints of a unit."""
    return f"Id={unit}\nLoadState={load}\nDropInPaths={drop_ins}\nNeedDaemonReload={stale}\n"


CONF = "/etc/systemd/system/{}.d/laoka-cuda.conf"


@pytest.mark.parametrize(
    ("units", "files", "outdated"),
    [
        ([shown("a.service", drop_ins=CONF.format("a.service"))], [CONF.format("a.service")], False),
        ([shown("a.service", stale="yes")], [], True),
        # Its folder came after systemd made its list of folders, so that systemd itself sees no difference.
        ([shown("a.service")], [CONF.format("a.service")], True),
        ([shown("b.service"), shown("a.service")], [CONF.format("a.service")], True),
        ([shown("a.service")], [CONF.format("b.service"), CONF.format("a@.service")], False),
        # A unit that is not there knows of no drop-in, whatever is read anew.
        ([shown("a.service", load="not-found")], [CONF.format("a.service")], False),
        ([shown("a@x.service")], [CONF.format("a@.service")], True),
        ([shown("a@x.service")], [CONF.format("a@x.service")], True),
        ([shown("a@x.y.service", drop_ins=CONF.format("a@.service"))], [CONF.format("a@.service")], False),
        # An instance's own has the name of its template's and takes its place.
        (
            [shown("a@x.service", drop_ins=CONF.format("a@x.service"))],
            [CONF.format("a@.service"), CONF.format("a@x.service")],
            False,
        ),
        ([shown("a.service", drop_ins="/run/systemd/system/a.service.d/own.conf")], [], False),
        ([], [CONF.format("a.service")], False),
    ],
)
def test_systemd_knows_a_unit_otherwise_than_its_files_are(units: list[str], files: list[str], outdated: bool) -> None:
    output = ["\n".join(units), "drop-ins:", *files]
    assert UnitsOutdated().process("\n".join(output).splitlines()) is outdated
