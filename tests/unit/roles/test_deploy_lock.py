"""The deploy lock's shell text in a real shell: one holder, a dead one is taken over, the ledger keeps a line a run."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from laoka.host.deployed import read_deploy
from laoka.operations.deploy_lock import KEPT, give_back_command, line_of, take_command
from tests.unit.fleet.deployed_host import deploy


def line(who: str, run: str) -> str:
    held = deploy(who=who, run=run)
    return line_of({key: held[key] for key in held if key not in ("ended_unix_s", "outcome", "changed")})


def sh(command: str) -> list[str]:
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def by_a_process_that_ends(command: str) -> list[str]:
    """Run a command below a Python of its own, which is over when this returns: as a run of pyinfra that was killed."""
    program = "import subprocess, sys; subprocess.run(['sh', '-c', sys.argv[1]], check=True)"
    done = subprocess.run([sys.executable, "-c", program, command], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def ledger(folder: Path) -> list[dict[str, Any]]:
    path = folder / "ledger"
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deploys"


def take(folder: Path, who: str, run: str, **options: bool) -> str:
    return take_command(line(who, run), run, folder=str(folder), **options)


def give(folder: Path, run: str, text: str = "") -> str:
    return give_back_command(text, run, folder=str(folder))


def test_a_second_run_is_told_who_the_first_one_is(folder: Path) -> None:
    assert sh(take(folder, "ann@desk", "r1")) == ["taken"]
    word, told = sh(take(folder, "bob@lap", "r2"))
    first = read_deploy(told)
    assert word == "held" and first is not None and (first.who, first.run) == ("ann@desk", "r1")
    assert sh(take(folder, "ann@desk", "r1")) == ["ours"]
    assert sh(give(folder, "r1")) == ["given back"]
    assert sh(take(folder, "bob@lap", "r2")) == ["taken"]
    assert ledger(folder) == []


def test_a_run_that_was_killed_is_taken_over_and_told(folder: Path) -> None:
    assert by_a_process_that_ends(take(folder, "ann@desk", "r1")) == ["taken"]
    word, told = sh(take(folder, "bob@lap", "r2"))
    assert word == "over" and '"ann@desk"' in told
    assert [(item["run"], item["who"], item["outcome"]) for item in ledger(folder)] == [("r1", "ann@desk", "interrupted")]
    assert all(read_deploy(json.dumps(item)) for item in ledger(folder))


def test_a_run_that_lives_is_taken_over_only_by_force(folder: Path) -> None:
    sh(take(folder, "ann@desk", "r1"))
    assert sh(take(folder, "bob@lap", "r2", force=True))[0] == "over"
    assert sh(give(folder, "r1"))[0] == "lost"
    assert sh(give(folder, "r2")) == ["given back"]


def test_a_lock_of_the_boot_before_counts_while_the_host_may_be_rebooting(folder: Path) -> None:
    sh(take(folder, "ann@desk", "r1"))
    first, second = (folder / "lock").read_text().splitlines()
    (folder / "lock").write_text(f"{first}\n{'0' * 36} {' '.join(second.split()[1:])}\n")
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    assert sh(take(folder, "bob@lap", "r2"))[0] == ("held" if up_s < 900 else "over")


@pytest.mark.parametrize("content", ["", "\n", "{}\n", "not json\n\n", "{}\nboot\n"])
def test_a_damaged_lock_holds_nobody_up(folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / "lock").write_text(content)
    assert sh(take(folder, "bob@lap", "r2"))[0] in ("taken", "over")
    assert (folder / "lock").read_text().splitlines()[1].split()[3] == "r2"


def test_the_ledger_has_one_line_a_run_and_is_bounded(folder: Path) -> None:
    folder.mkdir()
    before = "".join(line_of(deploy(run=f"old{number}")) + "\n" for number in range(KEPT))
    (folder / "ledger").write_text(before)
    for what in ("deploys/driver.py", "deploys/serve.py"):  # one run of two deploys
        sh(take(folder, "ann@desk", "r1"))
        sh(give(folder, "r1", line_of(deploy(run="r1", what=what))))
    told = ledger(folder)
    assert [item["run"] for item in told] == [*(f"old{number}" for number in range(1, KEPT)), "r1"]
    assert told[-1]["what"] == "deploys/serve.py"


def test_of_many_at_once_one_gets_it(folder: Path) -> None:
    words: list[str] = []
    threads = [
        threading.Thread(target=lambda number=number: words.append(sh(take(folder, "x", f"r{number}"))[0]))  # type: ignore[misc]
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(words) == ["held"] * 7 + ["taken"]


def test_what_a_name_holds_can_not_break_out(folder: Path) -> None:
    assert sh(take(folder, 'o\'ann $(touch x) "q"\n}', "r1")) == ["taken"]
    first = read_deploy((folder / "lock").read_text().splitlines()[0])
    assert first is not None and first.who == 'o\'ann $(touch x) "q"\n}'
