"""The English of what laoka's errors say, read out of its code: for the tests that hold the Chinese against it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.documented import ROOT

# Faults of laoka itself (the catalogue's load, an internal misuse) and what only laoka's own developers see stay English.
NOT_TOLD = ("laoka/sandbox/", "laoka/catalog/", "laoka/facts/", "laoka/__init__.py", "laoka/checks/registry.py", "laoka/agent/")
TOLD_ANYWAY = ("laoka/agent/config.py", *(f"laoka/sandbox/{name}.py" for name in ("demo", "faults", "hosts", "lab")))


def template(node: ast.expr) -> str | None:
    """A text of code with its values numbered: f"{path}: no {what}" is "{0}: no {1}". None: it is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return None
    parts, number = [], 0
    for part in node.values:
        if isinstance(part, ast.Constant):
            parts.append(str(part.value))
        else:
            parts.append(f"{{{number}}}")
            number += 1
    return "".join(parts)


def raised() -> Iterator[str]:
    """Every text that an exception is raised with, where it has words of its own."""
    for path in sorted((ROOT / "laoka").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if name.startswith(NOT_TOLD) and name not in TOLD_ANYWAY:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                for text in map(template, node.exc.args):
                    if text and " " in text and re.search(r"[A-Za-z]{2}", re.sub(r"\{\d+\}", "", text)):
                        yield text
