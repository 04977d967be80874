"""Whether an engine moves: the few counters of its /metrics that tell a busy engine from one that stands still. Pure parsing.

A frozen vLLM still answers /health, /v1/models and /metrics with 200, and its gauges look idle; but no counter moves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Names of vLLM 0.20 to 0.33 and of 1Cat-vLLM (its list is that of 0.22.1). One engine has one line of each; a server with several
# engines (data parallel) one of each for every engine, and the sums move when any of them does.
MOVING = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:iteration_tokens_total_count")
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_LINE = re.compile(r"^([a-z_:]+)(?:\{[^}]*\})? ([0-9.eE+-]+|NaN|\+Inf)", re.MULTILINE)


@dataclass(frozen=True)
class Progress:
    """What the engine had done when it was asked. `moved` is the sum of counters that only grow while it works."""

    running: int
    waiting: int
    moved: float


def parse_progress(metrics: str) -> Progress | None:
    """Read the text of /metrics; None when it has none of the counters (another engine, or not its metrics at all)."""
    sums: dict[str, float] = {}
    for name, value in _LINE.findall(metrics):
        if name in (*MOVING, RUNNING, WAITING) and value not in ("NaN", "+Inf"):
            try:
                sums[name] = sums.get(name, 0.0) + float(value)
            except ValueError:
                continue
    if not any(name in sums for name in MOVING):
        return None
    return Progress(int(sums.get(RUNNING, 0)), int(sums.get(WAITING, 0)), sum(sums.get(name, 0.0) for name in MOVING))
