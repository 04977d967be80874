"""Writing files so that a reader sees the old content or the new one, never half of it; why one can't be read, in words."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomic(path: str | Path, content: str | bytes, mode: int = 0o644) -> None:
    """Write `content` to `path` by way of a temporary file beside it, fsync and rename; parents are created.

    Arguments: `mode` the permission bits of the new file. Errors: OSError as the system reports it, the old file intact.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def why_unread(error: OSError | UnicodeDecodeError) -> str:
    """Why a text file can't be read, without its path or content."""
    return "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror or type(error).__name__
