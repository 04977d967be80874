"""What a vLLM server's /metrics says of a span of time: work, cache hits, queue, preemptions, acceptance, latencies. Pure.

Names changed between vLLM 0.8 and 0.33 (read in those releases): old and new ones are both taken, and what is absent is None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

# Our name -> names of the sample, newest first (gone: gpu_* with 0.12.0, time_per_output_token with 0.16.0).
COUNTERS: Mapping[str, tuple[str, ...]] = {
    "prompt_tokens": ("vllm:prompt_tokens_total",),
    "generation_tokens": ("vllm:generation_tokens_total",),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "preemptions": ("vllm:num_preemptions_total",),
    "drafts": ("vllm:spec_decode_num_drafts_total",),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens_total",),
    "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens_total",),
    "requests": ("vllm:request_success_total",),
}
GAUGES: Mapping[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
}
HISTOGRAMS: Mapping[str, tuple[str, ...]] = {
    "ttft": ("vllm:time_to_first_token_seconds",),
    "tpot": ("vllm:request_time_per_output_token_seconds",),
    "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "e2el": ("vllm:e2e_request_latency_seconds",),
    "queue": ("vllm:request_queue_time_seconds",),
    "prefill": ("vllm:request_prefill_time_seconds",),
    "decode": ("vllm:request_decode_time_seconds",),
}


@dataclass(frozen=True)
class Snapshot:
    """/metrics at one moment, summed over the engines of the server. `block_size`: tokens of one block of the prefix cache."""

    counters: Mapping[str, float]
    gauges: Mapping[str, float]
    histograms: Mapping[str, tuple[float, float]]
    """Sum in seconds and count."""
    accepted_at: Mapping[int, float]
    """Tokens accepted by place in the draft."""
    block_size: int | None = None
    kv_tokens: int | None = None


@dataclass(frozen=True)
class Span:
    """What was done between two snapshots. None: the server does not tell."""

    prompt_tokens: float | None
    generation_tokens: float | None
    prefix_queries: float | None
    prefix_hits: float | None
    preemptions: float | None
    requests: float | None
    drafts: float | None
    draft_tokens: float | None
    accepted_tokens: float | None
    accepted_at: tuple[float, ...]
    mean_ms: Mapping[str, float]
    """Means of the server's own histograms, in milliseconds, by vLLM's short names (ttft, tpot, itl, e2el, queue, ...)."""

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens that came out of the prefix cache."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries and self.prefix_hits is not None else None

    @property
    def acceptance(self) -> float | None:
        """Share of drafted tokens that were accepted; None without speculative decoding."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens and self.accepted_tokens is not None else None

    @property
    def tokens_per_round(self) -> float | None:
        """Tokens that one round yields: the accepted ones and the round's own; None without speculative decoding."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts and self.accepted_tokens is not None else None


def parse(text: str) -> Snapshot | None:
    """Read a /metrics text; None when it is not one, or has nothing of vLLM."""
    sums: dict[str, float] = {}
    accepted_at: dict[int, float] = {}
    block_size = kv_tokens = None
    try:
        for family in text_string_to_metric_families(text):
            if not family.name.startswith("vllm:"):
                continue
            for sample in family.samples:
                if sample.name.endswith("_bucket") or math.isnan(sample.value):
                    continue
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
                if sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
                    place = int(sample.labels.get("position", "0"))
                    accepted_at[place] = accepted_at.get(place, 0.0) + sample.value
                if sample.name == "vllm:cache_config_info":
                    block_size = _number(sample.labels.get("block_size"))
                    blocks = _number(sample.labels.get("num_gpu_blocks"))
                    kv_tokens = block_size * blocks if block_size and blocks else None
    except (ValueError, IndexError, KeyError):
        return None
    if not sums:
        return None

    def first(names: tuple[str, ...]) -> float | None:
        return next((sums[name] for name in names if name in sums), None)

    counters = {name: value for name, names in COUNTERS.items() if (value := first(names)) is not None}
    gauges = {name: value for name, names in GAUGES.items() if (value := first(names)) is not None}
    histograms = {}
    for name, names in HISTOGRAMS.items():
        total, count = first(tuple(f"{item}_sum" for item in names)), first(tuple(f"{item}_count" for item in names))
        if total is not None and count is not None:
            histograms[name] = (total, count)
    return Snapshot(counters, gauges, histograms, accepted_at, block_size, kv_tokens)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def between(before: Snapshot | None, after: Snapshot | None) -> Span | None:
    """What was done from one snapshot to the next; None when one is missing, or the server was restarted in between."""
    if before is None or after is None:
        return None
    if any(after.counters.get(name, 0) < value for name, value in before.counters.items()):
        return None

    def done(name: str) -> float | None:
        return after.counters[name] - before.counters.get(name, 0.0) if name in after.counters else None

    means = {}
    for name, (total, count) in after.histograms.items():
        old_total, old_count = before.histograms.get(name, (0.0, 0.0))
        if count > old_count:
            means[name] = 1000 * (total - old_total) / (count - old_count)
    places = sorted(after.accepted_at)
    return Span(
        done("prompt_tokens"), done("generation_tokens"), done("prefix_queries"), done("prefix_hits"), done("preemptions"),
        done("requests"), done("drafts"), done("draft_tokens"), done("accepted_tokens"),
        tuple(after.accepted_at[place] - before.accepted_at.get(place, 0.0) for place in places), means,
    )  # fmt: skip


def span_table(span: Span | None) -> dict[str, object] | None:
    """A span as plain values for a result."""
    if span is None:
        return None
    return {
        "prompt_tokens": span.prompt_tokens, "generation_tokens": span.generation_tokens, "requests": span.requests,
        "prefix_cache_queries": span.prefix_queries, "prefix_cache_hits": span.prefix_hits, "prefix_cache_hit_rate": span.hit_rate,
        "preemptions": span.preemptions, "spec_decode_acceptance": span.acceptance,
        "spec_decode_tokens_per_round": span.tokens_per_round, "spec_decode_accepted_per_position": list(span.accepted_at),
        **{f"server_mean_{name}_ms": value for name, value in span.mean_ms.items()},
    }  # fmt: skip
