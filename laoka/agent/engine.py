"""The engine sensor: does a real completion come back? Health says 200 while an engine stands still; only this finds it."""

from __future__ import annotations

from collections.abc import Mapping

from laoka.agent.signals import Reading, Signal
from laoka.serving.completion import Verdict

FAILURES_IN_A_ROW = 2
"""One late answer may be a busy engine; the second question comes soon after it."""

KIND_OF: Mapping[str, str] = {
    "port_closed": "engine_no_answer",
    "unreachable": "engine_no_answer",
    "not_ready": "engine_no_answer",
    "timed_out": "engine_no_answer",
    "server_error": "engine_no_answer",
    "engine_frozen": "engine_frozen",
    "empty": "engine_garbage",
    "garbage": "engine_garbage",
    "repeating": "engine_garbage",
    "refused": "engine_refuses",
    "not_openai": "engine_refuses",
}


def judge(verdict: Verdict, failures: int) -> tuple[Reading, int]:
    """A reading of a verdict and how many bad ones there are in a row now."""
    facts = {"kind": verdict.kind, "latency_s": verdict.latency_s, "text_judged": verdict.text_judged}
    if verdict.healthy:
        unjudged = "" if verdict.text_judged else " (words not judged)"
        return Reading("completion", "ok", detail=f"{verdict.detail}{unjudged}", facts=facts), 0
    detail = f"{verdict.kind}: {verdict.detail}"
    failures += 1
    if failures < FAILURES_IN_A_ROW:
        return Reading("completion", "unknown", detail=f"{detail} (once; asking again)", facts=facts), failures
    values: dict[str, str | int | float] = {"kind": verdict.kind, "detail": verdict.detail}
    signal = Signal(KIND_OF[verdict.kind], "completion", seen=detail, values=values)
    return Reading("completion", "bad", (signal,), detail, facts), failures


def not_asked(unit: str, active: str) -> Reading:
    """While the unit is not up, no answer is no news: the unit sensor speaks."""
    return Reading("completion", "unknown", detail=f"not asked: {unit} is {active}")
