"""The house stands as designed: import arrows, messages in both languages, no file without a first line."""

from __future__ import annotations

import re
import string
import subprocess
import sys
from pathlib import Path

import pytest

from laoka.catalog.messages import LANGUAGES, catalogue

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path for folder in ("laoka", "roles", "deploys", "inventories", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)


def test_import_arrows() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_message_has_both_languages_with_the_same_placeholders() -> None:
    faults = []
    for key, texts in catalogue().items():
        if set(texts) != set(LANGUAGES):
            faults.append(f"{key}: has {sorted(texts)}")
            continue
        fields = [{name for _, name, _, _ in string.Formatter().parse(texts[lang]) if name} for lang in LANGUAGES]
        if fields[0] != fields[1]:
            faults.append(f"{key}: placeholders differ: {fields}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_first_line_says_what_the_file_is_for(path: Path) -> None:
    assert re.match(r'("""|# )\S.{10,}', path.read_text(encoding="utf-8")), "no line that says what it is for"
