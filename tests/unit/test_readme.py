"""README says what is there: every command in its table, both languages alike, the set-up commands as bootstrap.sh has them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from laoka.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
READMES = ("README.md", "README.zh-CN.md")


@pytest.mark.parametrize("name", READMES)
def test_the_table_has_every_command_and_no_other(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `laoka ([a-z-]+)", text, re.MULTILINE)) == set(COMMANDS)


@pytest.mark.parametrize("name", READMES)
def test_every_named_file_is_there(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for path in re.findall(r"(?:deploys|inventories|docs)/[\w.-]+", text):
        assert path == "inventories/lab.py" or (ROOT / path).exists(), path


@pytest.mark.parametrize("name", READMES)
def test_both_languages_show_the_same_commands(name: str) -> None:
    blocks = re.findall(r"^(?:sudo|pyinfra|cp) [^#\n]+", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
    first = re.findall(r"^(?:sudo|pyinfra|cp) [^#\n]+", (ROOT / READMES[0]).read_text(encoding="utf-8"), re.MULTILINE)
    assert [line.strip() for line in blocks] == [line.strip() for line in first] and len(first) >= 6


def test_bootstrap_takes_only_the_jobs_it_names() -> None:
    for words in ([], ["nonsense"]):
        done = subprocess.run(["sh", "bootstrap.sh", *words], cwd=ROOT, capture_output=True, text=True, timeout=20)
        assert done.returncode == 2 and "bootstrap.sh demo" in done.stderr and "bootstrap.sh test" in done.stderr


def test_ci_calls_the_test_command_of_the_readme() -> None:
    assert "bootstrap.sh test" in (ROOT / ".ci" / "run").read_text() and "sh bootstrap.sh test" in (ROOT / "README.md").read_text()
