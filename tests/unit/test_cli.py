"""The command line: help without imports, expected errors in one line with exit status 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def laoka(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "laoka.cli", *words], capture_output=True, text=True, timeout=60, env={**os.environ, **(env or {})}
    )


def test_bare_laoka_is_its_help() -> None:
    done = laoka()
    assert done.returncode == 0 and "Commands:" in done.stdout and "sandbox" in done.stdout


def test_help_needs_none_of_the_operators_packages() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "laoka.cli", "--help"], capture_output=True, text=True, timeout=60
    )
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "click" in loaded and not loaded & {"pyinfra", "rich", "requests", "gevent", "apprise", "pydantic"}


def test_an_unknown_command_is_one_line() -> None:
    done = laoka("sandbx")
    assert done.returncode == 2 and "sandbx" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("status",), ("ssh", "v100-1"), ("fault", "hot")])
def test_a_sandbox_without_hosts_says_how_to_get_some(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = laoka("sandbox", *words, env={"LAOKA_SANDBOX_DIR": str(tmp_path)})
    assert done.returncode == 2 and done.stderr.strip().endswith("laoka sandbox up") and "Traceback" not in done.stderr


def test_a_name_that_no_lab_can_have_is_refused() -> None:
    done = laoka("sandbox", "--lab", "No Lab", "status")
    assert done.returncode == 2 and "lower-case letters" in done.stderr and "Traceback" not in done.stderr


def test_faults_are_listed_with_what_they_do() -> None:
    done = laoka("sandbox", "fault")
    for name in (
        "card-gone",
        "nvml-hung",
        "hot",
        "ecc-pending",
        "driver-mismatch",
        "xid",
        "engine-killed",
        "disk-full",
        "network-cut",
    ):
        assert f"\n{name} " in f"\n{done.stdout}"
    assert done.returncode == 0 and "simulated" in done.stdout
