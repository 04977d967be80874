"""The engine's sensors: does a completion come back, and do its counters move while it has requests? Health says 200 anyway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from laoka.agent.config import Config
from laoka.agent.signals import Reading, Signal
from laoka.serving.completion import Server, Verdict, key_in
from laoka.serving.progress import Progress

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


def server(config: Config) -> Server:
    """The model server that the settings name. Errors: OSError, UnicodeDecodeError where its key's file can't be read.

    One that is gone was removed with its setting, before the watchdog's settings follow: the engine asks for none, or says 401.
    """
    file = Path(config.completion_api_key_file) if config.completion_api_key_file else None
    key = key_in(file if file and file.exists() else None)
    return Server(config.completion_url, config.completion_model, key, config.judge_text)


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


@dataclass(frozen=True)
class Standing:
    """Since when the counters of an engine with requests stand still (monotonic), and where they stood."""

    moved: float = -1.0
    since_s: float = 0.0


def judge_progress(progress: Progress | None, standing: Standing, now_s: float, after_s: float) -> tuple[Reading, Standing]:
    """Signal: engine_stalled, when there are requests but no counter has moved for `after_s`. An engine without these counters is
    not judged.
    """
    if progress is None:
        return Reading("engine", "unknown", detail="/metrics does not answer, or has none of vLLM's counters"), Standing()
    facts = {"running": progress.running, "waiting": progress.waiting, "moved": progress.moved}
    busy = progress.running + progress.waiting > 0
    if not busy or progress.moved != standing.moved:
        detail = f"{progress.running} requests running, {progress.waiting} waiting"
        return Reading("engine", "ok", detail=detail, facts=facts), Standing(progress.moved, now_s)
    still_s = now_s - standing.since_s
    detail = f"{progress.running} requests running, {progress.waiting} waiting, but no token for {still_s:.0f} s"
    if still_s < after_s:
        return Reading("engine", "ok", detail=detail, facts=facts), standing
    values: dict[str, str | int | float] = {"running": progress.running, "waiting": progress.waiting, "seconds": round(still_s)}
    signal = Signal("engine_stalled", "engine", seen=detail, values=values)
    return Reading("engine", "bad", (signal,), detail, facts), standing
