"""The deploy lock's shell text in a real shell: one holder, one that is over is taken over, the ledger keeps a line a run."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from laoka.host.deploy_lock import LockFile, read_lock, read_owner, stale
from laoka.host.deployed import read_deploy
from laoka.operations import deploy_lock
from laoka.operations.deploy_lock import KEPT, TAKEN, WhyNot, free, give_back_command, line_of, mark_command, take_command
from laoka.operations.runs import hold_mark, is_over, operator
from tests.unit.fleet.deployed_host import deploy

DEPLOYS = sorted((Path(__file__).resolve().parents[3] / "deploys").glob("*.py"))
READ_ONLY = ("check",)
WHY_NOT = WhyNot("taken meanwhile", "removed meanwhile", "busy too long")


def line(who: str, run: str) -> str:
    held = deploy(who=who, run=run)
    return line_of({key: held[key] for key in held if key not in ("ended_unix_s", "outcome", "changed")})


def sh(command: str, status: int = 0) -> list[str]:
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=30)
    assert done.returncode == status, done.stderr
    return (done.stderr if status else done.stdout).splitlines()


def ledger(folder: Path) -> list[dict[str, Any]]:
    path = folder / "ledger"
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deploys"


@pytest.fixture
def ended() -> int:
    """The id of a process that is over."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.fixture
def mine() -> Iterator[int]:
    """A process that lives."""
    child = subprocess.Popen(["sleep", "600"])
    yield child.pid
    child.kill()
    child.wait()


def take(folder: Path, who: str, run: str, *, oust: str = "", owner: int | None = None) -> list[str]:
    return sh(take_command(line(who, run), run, oust=oust, owner=os.getpid() if owner is None else owner, folder=str(folder)))


def give(folder: Path, run: str, text: str = "") -> list[str]:
    return sh(give_back_command(text, run, folder=str(folder)))


def lock_of(folder: Path) -> LockFile:
    found = read_lock((folder / "lock").read_text().splitlines())
    assert found is not None
    return found


def why_free(said: list[str], *, take_over: bool = False) -> tuple[str, str] | None:
    assert said[0] == "held"
    return free(said[1:], take_over)


def test_a_second_run_is_told_who_the_first_one_is(folder: Path) -> None:
    assert take(folder, "ann@desk", "r1") == ["taken"]
    said = take(folder, "bob@lap", "r2")
    first = read_deploy(said[2])
    assert first is not None and (first.who, first.run) == ("ann@desk", "r1")
    assert why_free(said) is None and why_free(said, take_over=True) == ("r1", "told")
    assert take(folder, "ann@desk", "r1") == ["ours"]
    assert give(folder, "r1") == ["given back"]
    assert take(folder, "bob@lap", "r2") == ["taken"]
    assert ledger(folder) == []


def test_a_run_that_was_killed_is_taken_over_and_told(folder: Path, ended: int) -> None:
    assert take(folder, "ann@desk", "r1", owner=ended) == ["taken"]
    assert why_free(take(folder, "bob@lap", "r2")) == ("r1", "gone")
    assert take(folder, "bob@lap", "r2", oust="r1") == ["over"]
    assert [(item["run"], item["who"], item["outcome"]) for item in ledger(folder)] == [("r1", "ann@desk", "interrupted")]
    assert all(read_deploy(json.dumps(item)) for item in ledger(folder))


def test_a_run_is_ousted_only_by_name(folder: Path) -> None:
    """Two that saw the same dead run: the second one must not oust the first."""
    take(folder, "ann@desk", "r1")
    assert take(folder, "bob@lap", "r2", oust="r1") == ["over"]
    assert take(folder, "cy@box", "r3", oust="r1")[0] == "held"
    assert give(folder, "r1")[0] == "lost" and give(folder, "r2") == ["given back"]


def test_a_reboot_by_anybody_frees_the_host_and_one_that_was_announced_does_not(folder: Path, mine: int) -> None:
    take(folder, "ann@desk", "r1", owner=mine)
    said = take(folder, "bob@lap", "r2")
    owner = read_owner(said[1])
    assert owner is not None and stale(lock_of(folder), owner) is None
    text = (folder / "lock").read_text()
    (folder / "lock").write_text(text.replace(owner.boot, "0" * 36))
    assert why_free(take(folder, "bob@lap", "r2")) == ("r1", "boot")
    (folder / "lock").write_text(text)
    sh(mark_command("r1", WHY_NOT, reboot_s=600, owner=mine, folder=str(folder)))
    (folder / "lock").write_text((folder / "lock").read_text().replace(owner.boot, "0" * 36))
    assert why_free(take(folder, "bob@lap", "r2")) is None
    assert why_free(take(folder, "bob@lap", "r2"), take_over=True) == ("r1", "told")
    sh(mark_command("r1", WHY_NOT, owner=mine, folder=str(folder)))  # it is back
    assert (lock_of(folder).boot, lock_of(folder).reboot_s, lock_of(folder).pid) == (owner.boot, None, str(mine))


def test_a_run_whose_lock_another_has_stops_before_it_reboots(folder: Path) -> None:
    take(folder, "ann@desk", "r1")
    take(folder, "bob@lap", "r2", oust="r1")
    (said,) = sh(mark_command("r1", WHY_NOT, reboot_s=600, folder=str(folder)), status=TAKEN)
    assert said.startswith("taken meanwhile {") and "bob@lap" in said
    assert lock_of(folder).reboot_s is None


def test_a_run_whose_lock_somebody_removed_makes_no_reboot_and_tells_what_it_changed(folder: Path) -> None:
    assert sh(mark_command("r1", WHY_NOT, reboot_s=600, folder=str(folder)), status=1) == ["removed meanwhile"]
    take(folder, "ann@desk", "r1")
    (folder / "lock").unlink()
    assert sh(mark_command("r1", WHY_NOT, reboot_s=600, folder=str(folder)), status=1) == ["removed meanwhile"]
    assert not (folder / "lock").exists()
    assert give(folder, "r1", line_of(deploy(run="r1"))) == ["given back"]
    assert [item["run"] for item in ledger(folder)] == ["r1"]


def test_a_reboot_that_can_not_be_announced_in_time_fails_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy_lock, "BUSY_S", 1)
    take(folder, "ann@desk", "r1")
    before = (folder / "lock").read_text()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert sh(mark_command("r1", WHY_NOT, reboot_s=600, folder=str(folder)), status=1) == ["busy too long"]
        assert sh(mark_command("r1", WHY_NOT, folder=str(folder)), status=1) == ["busy too long"]
        assert take(folder, "bob@lap", "r2") == ["busy"] and give(folder, "r1") == ["busy"]
    finally:
        os.close(descriptor)
    assert (folder / "lock").read_text() == before


def test_a_ledger_that_can_not_be_written_is_told_and_the_host_is_given_back(folder: Path) -> None:
    take(folder, "ann@desk", "r1")
    (folder / "ledger.new").mkdir()
    said = sh(give_back_command(line_of(deploy(run="r1")), "r1", folder=str(folder)), status=1)
    assert "ledger.new" in said[-1] and not (folder / "lock").exists() and ledger(folder) == []


@pytest.mark.parametrize("content", ["", "\n", "{}\n", "not json\n\n", "{}\nboot\n", "{}\nboot 1 2 r1\n", "{}\nboot x 2 r1 soon\n"])
def test_a_damaged_lock_holds_nobody_up(folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / "lock").write_text(content)
    said = take(folder, "bob@lap", "r2")
    if said[0] == "held":
        assert why_free(said) == ("r1", "damaged")
        assert take(folder, "bob@lap", "r2", oust="r1") == ["over"]
    else:
        assert said == ["taken"]
    assert lock_of(folder).run == "r2"


def test_a_folder_that_can_not_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = sh(take_command(line("ann@desk", "r1"), "r1", folder=str(tmp_path / "file" / "deploys")), status=1)
    assert "Not a directory" in said[-1]


def test_the_ledger_has_one_line_a_run_and_is_bounded(folder: Path) -> None:
    folder.mkdir()
    before = "".join(line_of(deploy(run=f"old{number}")) + "\n" for number in range(KEPT))
    (folder / "ledger").write_text(before)
    for what in ("deploys/driver.py", "deploys/serve.py"):  # one run of two deploys
        take(folder, "ann@desk", "r1")
        give(folder, "r1", line_of(deploy(run="r1", what=what)))
    told = ledger(folder)
    assert [item["run"] for item in told] == [*(f"old{number}" for number in range(1, KEPT)), "r1"]
    assert told[-1]["what"] == "deploys/serve.py"


def test_of_many_at_once_one_gets_it(folder: Path) -> None:
    words: list[str] = []
    threads = [
        threading.Thread(target=lambda number=number: words.append(take(folder, "x", f"r{number}")[0]))  # type: ignore[misc]
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(words) == ["held"] * 7 + ["taken"]


def test_what_a_name_holds_can_not_break_out(folder: Path) -> None:
    assert take(folder, 'o\'ann $(touch x) "q"\n}', "r1") == ["taken"]
    first = read_deploy((folder / "lock").read_text().splitlines()[0])
    assert first is not None and first.who == 'o\'ann $(touch x) "q"\n}'


def test_a_run_of_this_machine_is_known_to_be_over_when_its_process_is(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom laoka.operations.runs import hold_mark\n"
        "assert hold_mark(Path(sys.argv[1]), 'r1') is not None\nprint('held', flush=True)\nsys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], text=True, **pipes)  # type: ignore[call-overload]
    assert child.stdout.readline() == "held\n"
    assert not is_over(tmp_path, "r1")
    child.kill()
    child.wait()
    assert is_over(tmp_path, "r1")
    assert not is_over(tmp_path, "r2") and not is_over(tmp_path, "../r1")


def test_the_same_operator_takes_over_from_a_run_that_was_killed_though_its_connection_lasts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    descriptor = hold_mark(tmp_path / "state" / "laoka" / "runs", "r1")
    assert descriptor is not None
    take(folder, operator(), "r1")
    assert why_free(take(folder, operator(), "r2")) is None  # two terminals of one operator
    os.close(descriptor)
    assert why_free(take(folder, operator(), "r2")) == ("r1", "killed")
    take(folder, "ann@desk", "r3", oust="r1")
    (tmp_path / "state" / "laoka" / "runs" / "r3").touch()
    assert why_free(take(folder, operator(), "r4")) is None  # another operator's: not ours to judge


@pytest.mark.parametrize("path", [path for path in DEPLOYS if path.stem not in READ_ONLY], ids=lambda path: path.stem)
def test_every_deploy_takes_the_lock_before_it_changes_anything_and_gives_it_back_last(path: Path) -> None:
    called = [
        node.value.func.id
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
    ]
    taken = next(number for number, name in enumerate(called) if name in ("base", "lock_host"))
    assert all(name in ("check_host", "firmware") or name.endswith("_gate") for name in called[:taken]), called
    assert called[-1] == "unlock_host" and called.count("unlock_host") == 1
