"""How long this host's engine took to start, measured at each start, and how long the next one may take. Pure but for the file.

A start is measured from the engine's first process to the first completion (laoka.serving.supervise). The slowest one, after a boot
with nothing in memory or after a change that has kernels compiled anew, may take several times a usual one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from laoka.files import write_atomic

FILE = "starts.json"
KEPT = 20
UNMEASURED_S = 1200
"""Four times the 271 s that a cold start on 4 V100 took (1Cat-vLLM 1.5.1, laoka/catalog/profiles.toml)."""
TIMES_LONGEST = 3
MOST_S = 7200
"""However slow the disks: then a person has to look."""


def deadline_s(measured_s: Sequence[float]) -> int:
    """What a start may take: three times the longest that was measured on this host, whole minutes, within bounds."""
    return min(MOST_S, max(UNMEASURED_S, 60 * math.ceil(TIMES_LONGEST * max(measured_s, default=0.0) / 60)))


def read(path: Path) -> tuple[float, ...]:
    """The starts that were kept, the latest last; none where there is no file, or one that is not ours."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["starts_s"]
        return tuple(float(item) for item in found if 0 < float(item) < math.inf)
    except (OSError, ValueError, TypeError, KeyError):
        return ()


def add(path: Path, start_s: float) -> None:
    """Keep one more start; the longest stays when the oldest of KEPT go. Errors: OSError."""
    known = read(path)
    kept = [*known, start_s][-KEPT:]
    longest = max((*known, start_s))
    write_atomic(path, json.dumps({"starts_s": kept if longest in kept else [longest, *kept[1:]]}) + "\n")
