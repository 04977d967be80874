"""The figures of a run, by vLLM's definitions and under its JSON keys (`vllm bench serve`), so that results compare. Pure.

TTFT: first token - start. TPOT: (last token - first token) / (output tokens - 1), of one request. ITL: each gap between chunks.
E2EL: last token - start. Goodput: requests a second that met every limit. Other tools use the same names for other things:
guidellm's ITL is vLLM's TPOT, its TPOT counts the first token in. A chunk of a stream is not a token (speculative decoding sends
several at once), so tokens are those of the server's own count, `usage`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev
from typing import Any

PERCENTILES = (50, 90, 95, 99)
_MS = 1000.0


@dataclass(frozen=True)
class Answer:
    """One request as its client saw it. Times are seconds from the moment it was sent; `error` is empty when all of it came."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    latency_s: float = 0.0
    cached_tokens: int | None = None
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each output token after the first; None for an answer of one token."""
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def decode_tok_s(self) -> float | None:
        """Output tokens a second once the first is there; None for an answer of one token or of one chunk."""
        spent_s = self.latency_s - self.ttft_s
        return (self.output_tokens - 1) / spent_s if self.output_tokens > 1 and spent_s > 0 else None

    @property
    def tokens_per_chunk(self) -> float:
        """Output tokens of one chunk of the stream: about what a round of speculative decoding yields, 1 without it."""
        return self.output_tokens / (len(self.gaps_s) + 1)


@dataclass(frozen=True)
class Goodput:
    """Limits that a good request meets, in milliseconds; None: no such limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    def met_by(self, answer: Answer) -> bool:
        """Whether an answer is within every limit."""
        seen = ((self.ttft_ms, answer.ttft_s), (self.tpot_ms, answer.tpot_s or 0.0), (self.e2el_ms, answer.latency_s))
        return all(limit is None or value_s * _MS <= limit for limit, value_s in seen)


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile with linear interpolation between the two values beside it, as numpy's default; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def distribution(values: Sequence[float], name: str) -> dict[str, float]:
    """mean_, median_, std_ and pNN_ of a list in seconds, in milliseconds: {"mean_ttft_ms": ...}."""
    found = {
        f"mean_{name}_ms": fmean(values) * _MS if values else 0.0,
        f"median_{name}_ms": median(values) * _MS if values else 0.0,
        f"std_{name}_ms": pstdev(values) * _MS if values else 0.0,
    }
    return found | {f"p{percent}_{name}_ms": percentile(values, percent) * _MS for percent in PERCENTILES}


def figures(answers: Sequence[Answer], duration_s: float, concurrency: int, goodput: Goodput | None = None) -> dict[str, Any]:
    """All figures of one repeat, under vLLM's keys; those of failed requests are left out but for their count."""
    good = [answer for answer in answers if not answer.error]
    output = sum(answer.output_tokens for answer in good)
    prompt = sum(answer.prompt_tokens for answer in good)
    spent_s = duration_s if duration_s > 0 else math.inf
    found: dict[str, Any] = {
        "num_prompts": len(answers),
        "max_concurrency": concurrency,
        "duration": duration_s,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(good) / spent_s,
        "request_goodput": None if goodput is None else sum(goodput.met_by(answer) for answer in good) / spent_s,
        "output_throughput": output / spent_s,
        "total_token_throughput": (prompt + output) / spent_s,
    }
    found |= distribution([answer.ttft_s for answer in good], "ttft")
    found |= distribution([answer.tpot_s for answer in good if answer.tpot_s is not None], "tpot")
    found |= distribution([gap for answer in good for gap in answer.gaps_s], "itl")
    found |= distribution([answer.latency_s for answer in good], "e2el")
    found["input_lens"] = [answer.prompt_tokens for answer in good]
    found["output_lens"] = [answer.output_tokens for answer in good]
    found["tokens_per_chunk"] = fmean([answer.tokens_per_chunk for answer in good]) if good else 0.0
    return found


def prefill_figures(answers: Sequence[Answer], duration_s: float) -> dict[str, Any]:
    """The prefill test: prompt tokens over the time to the first token, of one request alone on the server."""
    good = [answer for answer in answers if not answer.error and answer.ttft_s > 0]
    speeds = [answer.prompt_tokens / answer.ttft_s for answer in good]
    return figures(answers, duration_s, 1) | {"prefill_tok_s": fmean(speeds) if speeds else 0.0}


def decode_figures(answers: Sequence[Answer], duration_s: float) -> dict[str, Any]:
    """The decode test: (tokens - 1) / (last - first), of one request alone on the server."""
    speeds = [speed for answer in answers if not answer.error and (speed := answer.decode_tok_s) is not None]
    return figures(answers, duration_s, 1) | {"decode_tok_s": fmean(speeds) if speeds else 0.0}


def spread(repeats: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean, standard deviation between repeats (of a sample), lowest and highest, of every figure that is a number."""
    rows = list(repeats)
    found = {}
    for name in rows[0] if rows else ():
        values = [float(row[name]) for row in rows if isinstance(row.get(name), (int, float))]
        if len(values) == len(rows):
            found[name] = {"mean": fmean(values), "std": sample_std(values), "low": min(values), "high": max(values)}
    return found


def sample_std(values: Sequence[float]) -> float:
    """Standard deviation of a sample (n - 1); 0 for a single value, which says nothing of noise."""
    return pstdev(values) * math.sqrt(len(values) / (len(values) - 1)) if len(values) > 1 else 0.0
