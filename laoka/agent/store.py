"""Incidents on disk: one JSON file each, root only, written atomically; the oldest closed ones are pruned."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from laoka.agent.incidents import Incident, StoredError, from_json, to_json
from laoka.files import write_atomic

KEPT = 200
FILE_MODE = 0o600


def load(folder: Path) -> tuple[tuple[Incident, ...], tuple[str, ...]]:
    """All stored incidents, oldest first, and a line for each file that could not be read; such a file is set aside,
    not deleted.
    """
    found, faults = [], []
    for path in _files(folder):
        try:
            found.append(from_json(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, RecursionError) as error:
            reason = error if isinstance(error, StoredError) else type(error).__name__
            faults.append(f"{path}: not readable ({reason}); set aside as {path.name}.unreadable")
            with contextlib.suppress(OSError):
                path.rename(path.with_name(f"{path.name}.unreadable"))
    return tuple(found), tuple(faults)


def save(folder: Path, incident: Incident) -> None:
    """Write one incident. Errors: OSError, the old file intact."""
    content = json.dumps(to_json(incident), ensure_ascii=False, indent=1)
    write_atomic(folder / f"{incident.id}.json", content + "\n", FILE_MODE)


def prune(folder: Path, open_ids: frozenset[str], keep: int = KEPT) -> None:
    """Delete the oldest closed incidents beyond `keep`, and files set aside beyond it."""
    files = [path for path in _files(folder) if path.stem not in open_ids]
    aside = sorted(folder.glob("*.unreadable"))
    for path in (*files[: max(0, len(files) - keep)], *aside[: max(0, len(aside) - keep)]):
        with contextlib.suppress(OSError):
            path.unlink()


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json")) if folder.is_dir() else []
