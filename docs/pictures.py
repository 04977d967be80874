"""Draws what commands print as SVG files in docs/pictures: `python -m docs.pictures`, beside a sandbox that serves.

The hosts are those of `laoka sandbox demo` (or `up` and a deploy): simulated cards and a tiny model, as the pictures' titles say.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

from laoka.files import write_atomic
from laoka.process import run
from laoka.sandbox.lab import hosts, open_lab

ROOT = Path(__file__).resolve().parent
COLUMNS = 114
MAX_LINES = 70


@dataclass(frozen=True)
class Picture:
    """One picture: file name, the laoka command that is shown, and how long it may take."""

    name: str
    words: tuple[str, ...]
    deadline_s: float = 120


def pictures(gateway_url: str, key_file: str) -> tuple[Picture, ...]:
    """What is drawn."""
    return (
        Picture("check", ("check", "inventories/sandbox.py")),
        Picture("check-above-4g", ("check", "--file", "dmesg=tests/data/captures/dmesg_bar1_0m_legacy_format.txt")),
        Picture("plan", ("plan", "--gpu", "2xv100-pcie-16gb")),
        Picture("audit", ("audit", "inventories/sandbox.py")),
        Picture("bench", ("bench", gateway_url, "--api-key-file", key_file), 600),
    )


def svg(title: str, printed: str) -> str:
    """Terminal output with its colours as an SVG that loads nothing from elsewhere."""
    lines = printed.rstrip().splitlines()
    kept = lines[:MAX_LINES] + ([f"({len(lines) - MAX_LINES} more lines)"] if len(lines) > MAX_LINES else [])
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    console.print(Text.from_ansi("\n".join(kept)))
    drawn = console.export_svg(title=title, unique_id="laoka")
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL).replace("Fira Code", "monospace")
    return re.sub(r"[ \t]+$", "", drawn, flags=re.MULTILINE)


def main() -> int:
    """Run each command and draw it; 1 when a command could not run."""
    lab = open_lab()
    up = hosts(lab)
    if not up:
        print("no sandbox host is up: laoka sandbox demo, then again", file=sys.stderr)
        return 2
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "LANG": "C.UTF-8", "TERM": "xterm-256color"}
    failed = False
    (ROOT / "pictures").mkdir(exist_ok=True)
    for picture in pictures(f"http://{up[0].address}:8080", str(lab.gateway_keys)):
        argv = [sys.executable, "-m", "laoka.cli", *picture.words]
        done = run(argv, deadline_s=picture.deadline_s, env=environment, cwd=str(ROOT.parent))
        shown = " ".join("KEY" if word == str(lab.gateway_keys) else word for word in picture.words)
        if done.status not in (0, 1) or not done.stdout.strip():
            print(f"laoka {shown}: status {done.status}: {done.stderr.strip()[-300:]}", file=sys.stderr)
            failed = True
            continue
        write_atomic(ROOT / "pictures" / f"{picture.name}.svg", svg(f"laoka {shown}", done.stdout))
        print(f"docs/pictures/{picture.name}.svg")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
