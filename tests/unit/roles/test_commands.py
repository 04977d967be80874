"""Commands and package patterns of the roles, as text."""

from __future__ import annotations

import subprocess

from laoka.operations.refusal import refusal
from laoka.operations.steps import write_stamp
from laoka.serving.unit_config import config_hash_command
from roles.engine.commands import with_env


def test_environment_is_quoted_and_ordered() -> None:
    assert with_env({"B": "x y", "A": "1"}, "run") == "A=1 B='x y' run"
    assert with_env({}, "run") == "run"


def sh(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=10)


def test_a_refusal_prints_its_lines_and_fails() -> None:
    done = sh(refusal(["it's off", "$HOME stays"]))
    assert (done.returncode, done.stderr) == (1, "it's off\n$HOME stays\n")


def test_a_stamp_is_written_whole(tmp_path: object) -> None:
    path = f"{tmp_path}/a/stamp"
    assert sh(write_stamp(path, "one 'two'")).returncode == 0
    assert sh(f"cat {path}; ls {tmp_path}/a").stdout == "one 'two'\nstamp\n"


def test_the_configuration_hash_follows_content_links_and_absence(tmp_path: object) -> None:
    file, link, gone = (f"{tmp_path}/{name}" for name in ("file", "link", "gone"))
    command = config_hash_command([file, link, gone])
    seen = []
    for change in (f"echo 1 > {file}; mkdir {tmp_path}/x {tmp_path}/y; ln -s {tmp_path}/x {link}", f"echo 2 > {file}",
                   f"ln -sfn {tmp_path}/y {link}", f"echo 3 > {gone}", ":"):  # fmt: skip
        sh(change)
        seen.append(sh(command).stdout.strip())
    assert len(set(seen[:4])) == 4 and seen[3] == seen[4] and all(len(value) == 64 for value in seen)
