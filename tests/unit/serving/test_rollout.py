"""A change of a served unit and its way back, with a systemctl that fails when the configuration is bad."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from laoka.serving import rollout
from laoka.serving.completion import Server, Verdict
from laoka.serving.rollout import Change, bring_back, change, keep

SYSTEMCTL = """\
#!/bin/sh
echo "$@" >> {folder}/calls
case $1 in restart) ! grep -q bad {folder}/flags;; esac
"""


class Host:
    """A unit's files below a folder, and what was said and asked of systemd."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.flags, self.link, self.kept = folder, folder / "flags", folder / "current", folder / "kept"
        self.stamp, self.said, self.new = folder / "stamp", [""], folder / "new"
        (folder / "bin").mkdir()
        (folder / "bin/systemctl").write_text(SYSTEMCTL.format(folder=folder))
        (folder / "bin/systemctl").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
        monkeypatch.setattr(rollout, "stamp_of", lambda unit: self.stamp)
        monkeypatch.setattr(rollout, "path_of", lambda unit: folder / "state.json")
        self.set("one", "engine-1")

    def set(self, flags: str, engine: str) -> None:
        self.new.write_text(flags)
        self.link.unlink(missing_ok=True)
        self.link.symlink_to(engine)

    def change(self, answers: bool = True) -> int:
        wanted = Change("u.service", (str(self.flags), str(self.link)), ((str(self.new), str(self.flags)),), 5, 10)
        return change(wanted, lambda: None if answers else "no answer", self.said.append, kept=self.kept)

    def state(self) -> tuple[str, str]:
        return self.flags.read_text(), str(self.link.readlink())


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_what_runs_well_is_noted_and_kept(host: Host) -> None:
    assert host.change() == 0
    assert host.stamp.read_text().splitlines()[1:] == [str(host.flags), str(host.link)]
    assert len(host.stamp.read_text().splitlines()[0]) == 64
    assert (host.folder / "calls").read_text().splitlines() == [
        "daemon-reload", "reset-failed u.service", "enable u.service", "restart u.service",
    ]  # fmt: skip


def test_nothing_is_in_place_before_its_turn(host: Host) -> None:
    host.change()
    host.set("two", "engine-1")
    assert host.state()[0] == "one"
    assert host.change() == 0 and host.state()[0] == "two"


def test_one_that_does_not_start_goes_back_to_what_ran_before(host: Host) -> None:
    host.change()
    before = host.stamp.read_text()
    host.set("bad", "engine-2")
    assert host.change() == 1
    assert host.state() == ("one", "engine-1") and host.stamp.read_text() == before
    assert "back on what ran before" in host.said[-1]


def test_one_that_starts_but_does_not_answer_goes_back_too(host: Host) -> None:
    host.change()
    host.set("two", "engine-2")
    assert host.change(answers=False) == 1
    assert host.state() == ("one", "engine-1")
    assert "does not come up either" in host.said[-1]  # in this test nothing ever answers


def test_a_link_that_was_switched_with_its_own_gate_since_stays(host: Host) -> None:
    host.change()
    host.set("bad", "engine-2")
    os.utime(host.stamp, (2e9, 2e9))  # the switch noted the unit's configuration after it was kept
    assert host.change() == 1
    assert host.state() == ("one", "engine-2")


def test_the_first_start_has_no_way_back_and_says_so(host: Host) -> None:
    host.set("bad", "engine-1")
    assert host.change() == 1
    assert "nothing that ran before is known" in host.said[-1] and not host.stamp.exists()


def test_files_links_and_absence_are_brought_back(tmp_path: Path) -> None:
    secret, link, absent = tmp_path / "key", tmp_path / "link", tmp_path / "absent"
    secret.write_text("k")
    secret.chmod(0o600)
    link.symlink_to("a")
    keep([str(secret), str(link), str(absent)], tmp_path / "kept")
    secret.write_text("other")
    absent.write_text("new")
    assert bring_back(tmp_path / "kept", links=True)
    assert secret.read_text() == "k" and secret.stat().st_mode & 0o777 == 0o600 and not absent.exists()
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700
    assert not bring_back(tmp_path / "none", links=True)


def test_the_key_is_read_when_the_change_has_put_it_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(server: Server, **_limits: float) -> Verdict:
        asked.append(server.api_key)
        return Verdict("healthy", "2 tokens")

    monkeypatch.setattr(rollout, "ask", ask)
    key = tmp_path / "api-key"
    gate = rollout.completion_gate("http://127.0.0.1:1", "m", key, True)
    assert gate() == f"{key}: No such file or directory" and asked == []
    key.write_bytes(b"\xff")
    assert gate() == f"{key}: not UTF-8" and asked == []
    key.write_text("k3y\n")
    assert gate() is None and asked == ["k3y"]
