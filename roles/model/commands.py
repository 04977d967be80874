"""The commands that bring a model to a host: pure text, no I/O."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

LAOKA = "/opt/laoka/agent/current/bin/laoka"


def fetch_command(
    model_id: str,
    revision: str,
    sources: Sequence[str],
    pins: Mapping[str, str],
    engine: str | None = None,
    sm: int | None = None,
) -> str:
    """Shell text that fetches one revision into the host's store.

    Arguments: `engine` as NAME==VERSION and `sm` of the cards: what that engine can't serve there is refused before a weight comes.
    """
    words = [LAOKA, "model", "fetch", model_id, "--revision", revision]
    for source in sources:
        words += ["--from", source]
    for path, sha256 in sorted(pins.items()):
        words += ["--pin", f"{path}={sha256}"]
    words += ["--engine", engine] if engine is not None else []
    words += ["--sm", str(sm)] if sm is not None else []
    return " ".join(shlex.quote(word) for word in words)
