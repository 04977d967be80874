"""The figures of a run, by vLLM's definitions and under its JSON keys (`vllm bench serve`), so that results compare. Pure.

TTFT: first token - start. TPOT: (last token - first token) / (output tokens - 1), of one request. ITL: each gap between chunks.
E2EL: last token - start. Goodput: requests a second that met every limit. Other tools use the same names for other things:
guidellm's ITL is vLLM's TPOT, its TPOT counts the first token in. A chunk of a stream is not a token (speculative decoding sends
several at once), so tokens are those of the server's own count, `usage`.

(last - first) is the time of (tokens - 1) only when the first token came by itself. Where a busy client, a proxy or the server lets
tokens lie and hands them over together, it is the time of fewer, or of none: then TPOT, ITL and decode speed were not measured, and
are None rather than a number that nothing stands behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev
from typing import Any

PERCENTILES = (50, 90, 95, 99)
_MS = 1000.0
BUNCH_SHARE = 0.05
"""So much of an answer may come together with its first token: (last - first) is then too short by no more than this share."""
FIRST_SHARE = 0.5
"""Of one short prompt alone on the server the first token is one step of many: when it comes after so much of the whole time, it
lay somewhere on the way, and what came after it says nothing of the server."""


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
    def bunched(self) -> bool:
        """Whether so much came together with the first token that when the first one came is not known.

        Chunks that one piece of the stream brought have one time, so the gap between them is 0.
        """
        if self.output_tokens <= 1:
            return False
        together = next((place for place, gap_s in enumerate(self.gaps_s) if gap_s > 0), len(self.gaps_s))
        return not self.gaps_s or together > BUNCH_SHARE * len(self.gaps_s)

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each output token after the first; None for an answer of one token, and for one that came bunched."""
        return None if self.output_tokens <= 1 or self.bunched else (self.latency_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def most_tpot_s(self) -> float | None:
        """What TPOT is at the most, however the tokens came: all of the time for them; None for an answer of one token."""
        return self.latency_s / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def decode_tok_s(self) -> float | None:
        """Output tokens a second after the first, of a request alone on the server with a prompt of few tokens.

        None for an answer of one token, one that came bunched, and one whose first token came late (FIRST_SHARE).
        """
        tpot_s = self.tpot_s
        return None if tpot_s is None or self.ttft_s > FIRST_SHARE * self.latency_s else 1 / tpot_s

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
        """Whether an answer is known to be within every limit; one of a single token has no TPOT that a limit could hold for."""
        tpot_s = answer.most_tpot_s if answer.bunched else answer.tpot_s
        seen = ((self.ttft_ms, answer.ttft_s), (self.tpot_ms, tpot_s or 0.0), (self.e2el_ms, answer.latency_s))
        return all(limit is None or value_s * _MS <= limit for limit, value_s in seen)


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile with linear interpolation between the two values beside it, as numpy's default. At least one value."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def distribution(values: Sequence[float], name: str) -> dict[str, float | None]:
    """mean_, median_, std_ and pNN_ of a list in seconds, in milliseconds: {"mean_ttft_ms": ...}; None for what has no values."""
    names = ("mean", "median", "std", *(f"p{percent}" for percent in PERCENTILES))
    if not values:
        return {f"{key}_{name}_ms": None for key in names}
    found = (fmean(values), median(values), pstdev(values), *(percentile(values, percent) for percent in PERCENTILES))
    return {f"{key}_{name}_ms": value * _MS for key, value in zip(names, found, strict=True)}


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
    found |= distribution([gap for answer in good if not answer.bunched for gap in answer.gaps_s], "itl")
    found |= distribution([answer.latency_s for answer in good], "e2el")
    found["input_lens"] = [answer.prompt_tokens for answer in good]
    found["output_lens"] = [answer.output_tokens for answer in good]
    found["tokens_per_chunk"] = _mean([answer.tokens_per_chunk for answer in good])
    found["bunched"] = sum(answer.bunched for answer in good)
    return found


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def prefill_figures(answers: Sequence[Answer], duration_s: float) -> dict[str, Any]:
    """The prefill test: prompt tokens over the time to the first token, of one request alone on the server."""
    good = [answer for answer in answers if not answer.error and answer.ttft_s > 0]
    return figures(answers, duration_s, 1) | {"prefill_tok_s": _mean([answer.prompt_tokens / answer.ttft_s for answer in good])}


def decode_figures(answers: Sequence[Answer], duration_s: float) -> dict[str, Any]:
    """The decode test: (tokens - 1) / (last - first), of one request alone on the server."""
    good = [answer for answer in answers if not answer.error]
    speeds = [speed for answer in good if (speed := answer.decode_tok_s) is not None]
    return figures(answers, duration_s, 1) | {"decode_tok_s": _mean(speeds), "bunched": len(good) - len(speeds)}


def spread(repeats: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean, standard deviation between repeats (of a sample), lowest and highest, of every figure that each repeat has."""
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
