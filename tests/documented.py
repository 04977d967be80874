"""The commands of README and docs/, and where each block says that it can be run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

ROOT = Path(__file__).resolve().parents[1]
PAGES = (*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").rglob("*.md")))

# operator: on the operator's machine, in a checkout, without hosts; sandbox: the same with inventories/lab.py standing for the
# sandbox's hosts; host: as root on a deployed host; hardware: needs real hardware, a network or a person, and no test runs it;
# bootstrap: README's two set-up commands, which CI itself runs. A digit after it is the exit status to expect (1: findings).
Where = Literal["operator", "sandbox", "host", "hardware", "bootstrap"]
MARKS: tuple[Where, ...] = ("operator", "sandbox", "host", "hardware", "bootstrap")

_FENCE = re.compile(r"^( *)(?:<!-- *(\w+)(?: (\d))? *-->\n\s*)?```(\S*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, first line, language, mark (None: none), text, and the exit status that its mark names."""

    page: str
    line: int
    language: str
    mark: str | None
    text: str
    status: int = 0

    @property
    def where(self) -> Where:
        return cast(Where, self.mark)

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(text: str, page: str) -> tuple[Block, ...]:
    """Every fenced block of a Markdown text."""
    return tuple(
        Block(page, text.count("\n", 0, found.start()) + 1, found[4], found[2], found[5], int(found[3] or 0))
        for found in _FENCE.finditer(text)
    )


def all_blocks() -> tuple[Block, ...]:
    """Every block of every page."""
    return tuple(block for path in PAGES for block in blocks_of(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))))


def commands(*where: Where) -> tuple[Block, ...]:
    """The command blocks that say one of `where`, each text once (both languages show the same)."""
    found = {block.text: block for block in reversed(all_blocks()) if block.language == "sh" and block.mark in where}
    return tuple(sorted(found.values(), key=lambda block: (block.page, block.line)))


def checkout(folder: Path) -> Path:
    """A copy of what a checkout has, in `folder`."""
    ignored = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info")
    for source in sorted(ROOT.iterdir()):
        if source.is_dir() and not source.name.startswith("."):
            shutil.copytree(source, folder / source.name, ignore=ignored)
        elif source.is_file():
            shutil.copy2(source, folder / source.name)
    return folder


def run(text: str, folder: Path, environment: Mapping[str, str], deadline_s: float) -> subprocess.CompletedProcess[str]:
    """Run a block as a person would paste it: in a shell, in `folder`, laoka and pyinfra on the PATH; the first failure ends it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], cwd=folder, env={**environment, "PATH": path, "LANG": "C.UTF-8"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=deadline_s,
    )  # fmt: skip
