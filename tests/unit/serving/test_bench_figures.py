"""Figures of a run are vLLM's: recomputed from the raw times of a result that `vllm bench serve` 0.32.0 wrote, and by hand."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.serving.bench.figures import (
    Answer,
    Goodput,
    decode_figures,
    figures,
    percentile,
    prefill_figures,
    sample_std,
    spread,
)
from laoka.serving.bench.recipe import Recipe, RecipeError, differences, prompt_ids, text_ids

DATA = Path(__file__).parents[2] / "data" / "serving"
VLLM = json.loads((DATA / "vllm-0.32.0-bench-serve-c4.json").read_text())
ANSWERS = [
    Answer(prompt, output, ttft, tuple(itl), latency)
    for prompt, output, ttft, itl, latency in zip(
        VLLM["input_lens"], VLLM["output_lens"], VLLM["ttfts"], VLLM["itls"], VLLM["latencies"], strict=True
    )
]


def test_every_figure_that_vllm_wrote_comes_out_of_its_raw_times() -> None:
    found = figures(ANSWERS, VLLM["duration"], VLLM["max_concurrency"], Goodput())
    shared = [key for key in found if key in VLLM and isinstance(VLLM[key], (int, float))]
    assert len(shared) >= 34
    for key in shared:
        assert found[key] == pytest.approx(VLLM[key], rel=1e-9), key
    assert (found["input_lens"], found["output_lens"]) == (VLLM["input_lens"], VLLM["output_lens"])


def test_failed_requests_count_as_failed_only() -> None:
    found = figures([*ANSWERS, Answer(error="HTTP 503")], VLLM["duration"], 4)
    assert (found["num_prompts"], found["completed"], found["failed"]) == (9, 8, 1)
    assert found["mean_ttft_ms"] == pytest.approx(VLLM["mean_ttft_ms"])
    nothing = figures([Answer(error="x")], 1.0, 1)
    assert nothing["mean_ttft_ms"] is None and nothing["p99_itl_ms"] is None and nothing["tokens_per_chunk"] is None
    assert prefill_figures([Answer(error="x")], 1.0)["prefill_tok_s"] is None


def test_goodput_counts_requests_within_every_limit() -> None:
    fast = Answer(8, 11, 0.1, (0.1,) * 10, 1.1)  # TTFT 100 ms, TPOT 100 ms, 1.1 s in all
    slow = Answer(8, 11, 0.4, (0.1,) * 10, 1.4)
    assert figures([fast, slow], 2.0, 2, Goodput(ttft_ms=200))["request_goodput"] == 0.5
    assert figures([fast, slow], 2.0, 2, Goodput(tpot_ms=101, e2el_ms=1500))["request_goodput"] == 1.0
    assert figures([fast, slow], 2.0, 2)["request_goodput"] is None


def test_a_chunk_with_several_tokens_is_several_tokens() -> None:
    answer = Answer(32, 9, 0.1, (0.2, 0.2), 0.5)  # three chunks of three tokens
    assert answer.tokens_per_chunk == 3 and answer.tpot_s == pytest.approx(0.05) and answer.decode_tok_s == pytest.approx(20)
    assert decode_figures([answer], 1.0)["decode_tok_s"] == pytest.approx(20)
    assert Answer(8, 1, 0.5, (), 0.5).tpot_s is None


def stream(together: int, chunks: int, *, first_s: float, gap_s: float, tokens: int) -> Answer:
    """An answer in so many chunks, the first `together` of them in one piece of the stream."""
    gaps_s = (0.0,) * (together - 1) + (gap_s,) * (chunks - together)
    return Answer(32, tokens, first_s, gaps_s, first_s + sum(gaps_s))


def test_an_answer_in_one_piece_has_no_decode_speed() -> None:
    """What a client saw that was too busy to read: 400 tokens by speculative decoding, all of them in one piece."""
    for chunks in (1, 2, 112):
        whole = stream(chunks, chunks, first_s=0.316, gap_s=0.0, tokens=400)
        assert whole.bunched and whole.tpot_s is None and whole.decode_tok_s is None, chunks
        found = decode_figures([whole, whole], 0.64)
        assert found["decode_tok_s"] is None and found["mean_tpot_ms"] is None and found["p99_itl_ms"] is None
        assert found["bunched"] == 2 and found["mean_ttft_ms"] == pytest.approx(316) and found["mean_e2el_ms"] == pytest.approx(316)
        assert "decode_tok_s" not in spread([found]) and "mean_itl_ms" not in spread([found])


def test_how_much_may_come_with_the_first_token() -> None:
    # 101 chunks have 100 gaps; 5 % of them may be nothing: then (last - first) is too short by 5 % at the most.
    fine, late = (stream(together, 101, first_s=0.05, gap_s=0.01, tokens=401) for together in (6, 7))
    assert not fine.bunched and fine.tpot_s == pytest.approx(0.95 / 400) and late.bunched and late.tpot_s is None
    both = figures([fine, late], 2.0, 1)
    assert both["bunched"] == 1 and both["mean_tpot_ms"] == pytest.approx(2.375), "the one that was measured counts"
    assert both["p50_itl_ms"] == pytest.approx(10) and both["mean_e2el_ms"] == pytest.approx((1000 + 990) / 2)
    assert not stream(1, 2, first_s=0.1, gap_s=0.4, tokens=8).bunched, "few chunks are no bunch when they come apart"
    assert not stream(1, 1, first_s=0.1, gap_s=0.0, tokens=1).bunched, "one token has nothing to be bunched with"


def test_a_burst_of_many_pieces_after_a_late_first_token_is_no_decode_speed() -> None:
    """316 ms to the first of 400 tokens and 3 ms for all the others, piece by piece: 128,000 tok/s that no server made."""
    burst = stream(1, 112, first_s=0.316, gap_s=0.00003, tokens=400)
    assert not burst.bunched and burst.decode_tok_s is None
    assert decode_figures([burst], 0.32)["decode_tok_s"] is None and decode_figures([burst], 0.32)["bunched"] == 1
    good = stream(1, 400, first_s=0.02, gap_s=0.005, tokens=400)
    found = decode_figures([burst, good], 2.4)
    assert found["decode_tok_s"] == pytest.approx(200) and found["bunched"] == 1


def test_goodput_counts_only_what_is_known_to_be_within_a_limit() -> None:
    whole = stream(9, 9, first_s=1.0, gap_s=0.0, tokens=11)  # at most 1 s for 10 tokens, at the least nothing
    assert Goodput(tpot_ms=100).met_by(whole) and not Goodput(tpot_ms=99).met_by(whole)
    assert Goodput(tpot_ms=1).met_by(Answer(8, 1, 0.5, (), 0.5)), "one token has no TPOT"


@given(st.integers(1, 60), st.integers(1, 60), st.floats(0.001, 10), st.floats(0.0001, 1), st.integers(0, 400))
def test_what_is_told_is_within_what_is_possible(together: int, more: int, first_s: float, gap_s: float, extra: int) -> None:
    """However tokens came: the true time for those after the first is between (last - first) and the whole."""
    answer = stream(together, together + more, first_s=first_s, gap_s=gap_s, tokens=together + more + extra)
    least_s = (answer.latency_s - answer.ttft_s) / (answer.output_tokens - 1)
    assert answer.most_tpot_s is not None and answer.most_tpot_s >= least_s
    if answer.tpot_s is not None:
        assert answer.tpot_s == pytest.approx(least_s) and (together - 1) <= 0.05 * (together + more - 1)
    if answer.decode_tok_s is not None:
        assert answer.decode_tok_s <= 2.0001 / answer.most_tpot_s, "wrong by a factor of 2 at the most, whatever lay on the way"


def test_prefill_is_prompt_tokens_over_the_time_to_the_first_token() -> None:
    assert prefill_figures([Answer(500, 1, 0.25, (), 0.25), Answer(500, 1, 0.5, (), 0.5)], 1.0)["prefill_tok_s"] == 1500


def test_percentiles_interpolate_as_numpy_does() -> None:
    # numpy.percentile's own documentation: [[10, 7, 4], [3, 2, 1]] has the median 3.5.
    assert percentile([10, 7, 4, 3, 2, 1], 50) == 3.5
    assert percentile([1, 2, 3, 4], 99) == pytest.approx(3.97) and percentile([5], 99) == 5


def test_spread_of_repeats() -> None:
    found = spread([{"x": 2.0, "only": None, "list": [1]}, {"x": 4.0, "only": 1.0, "list": [2]}])
    assert found == {"x": {"mean": 3.0, "std": math.sqrt(2), "low": 2.0, "high": 4.0}}
    assert sample_std([7.0]) == 0 and sample_std([2, 4, 4, 4, 5, 5, 7, 9]) == pytest.approx(math.sqrt(32 / 7))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_a_percentile_is_within_its_values(values: list[float], percent: float) -> None:
    assert min(values) <= percentile(values, percent) * (1 + 1e-12) and percentile(values, percent) <= max(values) * (1 + 1e-12)


def test_the_recipe_is_the_one_that_was_agreed() -> None:
    recipe = Recipe()
    assert (recipe.prompt_tokens, recipe.output_tokens, recipe.concurrency, recipe.prefill_tokens) == (512, 256, (1, 4, 8), 500)
    assert 200 <= recipe.decode_tokens <= 500 and recipe.repeats >= 3
    assert recipe.id == Recipe().id != Recipe(prompt_tokens=513).id
    assert differences(recipe.table(), Recipe(output_tokens=8).table()) == ("output_tokens: 256 and 8",)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"server_limits": (700,)}, "max-model-len is 700"),
        ({"repeats": 0}, "repeats is 0"),
        ({"concurrency": (1, 0)}, "concurrency is [1, 0]"),
        ({"concurrency": ()}, "concurrency is empty"),
    ],
)
def test_recipes_that_make_no_sense(change: dict[str, object], says: str) -> None:
    with pytest.raises(RecipeError, match="recipe: ") as caught:
        Recipe(**change).check()  # type: ignore[arg-type]
    assert says in str(caught.value) and "\n" not in str(caught.value)


@given(st.integers(1, 600))
def test_prompts_have_exactly_so_many_ids(count: int) -> None:
    assert len(prompt_ids(count, (7, 8, 9), random.Random(1))) == count and set(prompt_ids(count, (7,), random.Random(1))) == {7}
    assert text_ids(count, (1, 2, 3), 0) == [1 + place % 3 for place in range(count)] and len(text_ids(count, (1, 2), 5)) == count
