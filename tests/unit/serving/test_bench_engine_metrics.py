"""/metrics of real vLLM servers: counters, histograms, acceptance; old names; what is no such text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.serving.bench.engine_metrics import Span, between, parse, span_table

DATA = Path(__file__).parents[2] / "data" / "serving"
NGRAM = (DATA / "vllm-0.32.0-metrics-ngram-specdec.txt").read_text()


def test_acceptance_of_a_server_with_speculation() -> None:
    # Its own lines: 16 drafts, 44 drafted, 44 accepted (16, 14, 14 by place), 60 tokens generated.
    after = parse(NGRAM)
    assert after is not None and after.counters["generation_tokens"] == 60
    span = between(parse("vllm:generation_tokens_total 0.0\n"), after)
    assert span is not None and span.acceptance == 1.0 and span.tokens_per_round == pytest.approx(1 + 44 / 16)
    assert span.accepted_at == (16, 14, 14) and span.preemptions == 0 and span.hit_rate == 0


def test_a_span_is_the_difference() -> None:
    before = parse(
        'vllm:prefix_cache_queries_total{engine="0"} 100\nvllm:prefix_cache_hits_total{engine="0"} 0\n'
        "vllm:time_to_first_token_seconds_sum 1.0\nvllm:time_to_first_token_seconds_count 10\n"
    )
    after = parse(
        'vllm:prefix_cache_queries_total{engine="0"} 300\nvllm:prefix_cache_hits_total{engine="0"} 50\n'
        "vllm:time_to_first_token_seconds_sum 1.5\nvllm:time_to_first_token_seconds_count 20\n"
    )
    span = between(before, after)
    assert span is not None and span.hit_rate == 0.25 and span.mean_ms == {"ttft": pytest.approx(50)}
    assert span.acceptance is None and span.preemptions is None
    assert span_table(span)["server_mean_ttft_ms"] == pytest.approx(50)  # type: ignore[index]


def test_names_of_old_releases_are_taken() -> None:
    found = parse("vllm:gpu_prefix_cache_hits_total 7\nvllm:gpu_cache_usage_perc 0.5\nvllm:time_per_output_token_seconds_sum 1\n")
    assert found is not None and found.counters["prefix_hits"] == 7 and found.gauges["kv_usage"] == 0.5


def test_engines_of_one_server_are_summed_and_the_pool_is_read() -> None:
    found = parse(
        'vllm:num_requests_waiting{engine="0"} 2\nvllm:num_requests_waiting{engine="1"} 3\n'
        'vllm:cache_config_info{block_size="128",num_gpu_blocks="64"} 1\n'
    )
    assert found is not None and found.gauges["waiting"] == 5 and (found.block_size, found.kv_tokens) == (128, 8192)


def test_a_restart_in_between_makes_no_span() -> None:
    assert between(parse("vllm:prompt_tokens_total 9\n"), parse("vllm:prompt_tokens_total 3\n")) is None
    assert between(None, parse("vllm:prompt_tokens_total 3\n")) is None


@given(st.text(max_size=200))
def test_no_text_makes_it_fail(text: str) -> None:
    assert parse(text) is None or parse(text) is not None


def test_no_speculation_no_acceptance() -> None:
    span = Span(None, None, None, None, None, None, None, None, None, (), {})
    assert span.acceptance is None and span.hit_rate is None and span.tokens_per_round is None and span_table(None) is None
