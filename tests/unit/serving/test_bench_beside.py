"""The benchmark of our client beside `vllm bench serve`: its arithmetic, and what it refuses to compare."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_client import FIGURES, OUTPUT_TOKENS, PROMPT_TOKENS, Turn, Unfair, one_turn, table, turn

VLLM = json.loads((Path(__file__).parents[2] / "data" / "serving" / "vllm-0.32.0-bench-serve-c4.json").read_text())
FOUND = {f"mean_{name}_ms": 100.0 for name in FIGURES} | {
    "completed": 4, "total_input_tokens": 4 * PROMPT_TOKENS, "total_output_tokens": 4 * OUTPUT_TOKENS,
}  # fmt: skip
SPAN = {f"server_mean_{name}_ms": 99.0 for name in FIGURES} | {
    "requests": 4.0, "prompt_tokens": 4.0 * PROMPT_TOKENS, "generation_tokens": 4.0 * OUTPUT_TOKENS, "prefix_cache_hits": 0.0,
}  # fmt: skip


def test_the_means_of_its_requests_are_those_that_it_wrote_itself() -> None:
    found = one_turn(VLLM, slice(None))
    for name in FIGURES:
        assert found[f"mean_{name}_ms"] == pytest.approx(VLLM[f"mean_{name}_ms"], rel=1e-9), name
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (VLLM["total_input_tokens"], VLLM["total_output_tokens"])


@pytest.mark.parametrize(
    ("client", "server", "said"),
    [
        ({}, {"requests": 5.0}, "4 requests were to be asked, the client says 4 and the server 5.0"),
        ({"total_input_tokens": 4 * PROMPT_TOKENS + 2}, {}, "prompt tokens"),
        ({}, {"generation_tokens": 1.0}, "output tokens"),
        ({}, {"prefix_cache_hits": 384.0}, "384 prompt tokens came from the prefix cache"),
    ],
)
def test_what_was_not_asked_alike_is_not_compared(client: Mapping[str, Any], server: Mapping[str, Any], said: str) -> None:
    assert turn("ours", 4, FOUND, SPAN).client["ttft"] == 100.0
    with pytest.raises(Unfair, match=said):
        turn("ours", 4, {**FOUND, **client}, {**SPAN, **server})


def test_a_slower_server_is_not_a_slower_client(capsys: pytest.CaptureFixture[str]) -> None:
    def of(client: float, server: float) -> list[Turn]:
        return [Turn(dict.fromkeys(FIGURES, client), dict.fromkeys(FIGURES, server))]

    assert table(1, of(101.0, 100.0), of(121.0, 120.0)), "its server was slower by a fifth, and both clients said so"
    assert not table(1, of(101.0, 100.0), of(105.0, 100.0)), "theirs is off the server's clock"
    assert "0.8347" in capsys.readouterr().out, "the bare ratio is printed all the same"
