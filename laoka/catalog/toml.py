"""Reading TOML on every Python we support (tomllib is only in 3.11 and later)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class TomlError(ValueError):
    """A TOML file that can't be read; the message is one line with the file and the place."""


def loads(text: str, name: str) -> dict[str, Any]:
    """Parse TOML text. Arguments: `name` is what an error calls it. Errors: TomlError."""
    try:
        parsed: dict[str, Any] = tomllib.loads(text)
        return parsed
    except tomllib.TOMLDecodeError as error:
        raise TomlError(f"{name}: {error}") from None


def load(path: str | Path) -> dict[str, Any]:
    """Parse a TOML file. Errors: TomlError for a file that is missing, not UTF-8 or not TOML."""
    try:
        return loads(Path(path).read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise TomlError(f"{path}: {error}") from None
