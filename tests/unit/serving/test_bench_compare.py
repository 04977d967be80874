"""Two results: the ratio, the noise, and refusing what does not compare."""

from __future__ import annotations

from typing import Any

import pytest

from laoka.serving.bench.compare import NotComparable, compare, judge, notes, t95, welch
from laoka.serving.bench.recipe import Recipe


def result(speeds: list[float], **changes: Any) -> dict[str, Any]:
    rows = [
        {
            "output_throughput": speed, "mean_ttft_ms": 10.0, "mean_tpot_ms": 1.0, "mean_e2el_ms": 1000 / speed,
            "failed": 0, "num_prompts": 2,
        }
        for speed in speeds
    ]  # fmt: skip
    cell = {"kind": "serve", "label": "serve 4096 c1", "max_model_len": 4096, "repeats": rows}
    return {"laoka_bench": 1, "recipe": Recipe().table(), "cells": [cell], "provenance": {}, "banners": [], **changes}


def test_welch_by_a_textbook_example() -> None:
    # Two samples of 5: means 3 and 6, variances 2.5 and 10: s.e. = sqrt(0.5 + 2) = 1.5811, freedom = 2.5^2 / (0.25/4 + 4/4) = 5.88.
    width, freedom = welch([1, 2, 3, 4, 5], [2, 4, 6, 8, 10]) or (0, 0)
    assert freedom == pytest.approx(5.882, abs=0.001) and width == pytest.approx(2.571 * 1.5811, abs=0.001)
    assert welch([1.0], [1.0, 2.0]) is None


def test_t_is_the_table_s() -> None:
    assert [t95(freedom) for freedom in (1, 2, 4.9, 10, 30, 31, 1000)] == [12.706, 4.303, 2.776, 2.228, 2.042, 1.96, 1.96]


def test_a_difference_beyond_the_noise_is_told() -> None:
    ratio, noise, judgement = judge([100, 101, 99], [200, 202, 198], more_is_better=True)
    # s.e. = sqrt(1/3 + 4/3) = 1.291, freedom 2.94, t 4.303.
    assert ratio == 2 and noise == pytest.approx(0.0555, abs=1e-4) and judgement == "better"
    assert judge([100, 101, 99], [200, 202, 198], more_is_better=False)[2] == "worse"


def test_a_difference_within_the_noise_is_none() -> None:
    assert judge([100, 140, 60], [110, 150, 70], more_is_better=True)[2] == "within noise"
    # Repeats that agree by luck to the last digit don't make half a percent a finding.
    assert judge([100, 100, 100], [100.5, 100.5, 100.5], more_is_better=True)[2] == "within noise"


def test_one_repeat_has_no_noise_to_speak_of() -> None:
    assert judge([100], [200], more_is_better=True) == (2, None, "noise unknown")


def test_lines_of_two_results() -> None:
    lines = {line.figure: line for line in compare(result([100, 101, 99]), result([50, 51, 49]))}
    assert lines["output_throughput"].ratio == pytest.approx(0.5) and lines["output_throughput"].judgement == "worse"
    assert lines["mean_e2el_ms"].judgement == "worse" and lines["mean_ttft_ms"].judgement == "within noise"


def test_another_recipe_is_refused_and_what_differs_is_named() -> None:
    other = result([100.0, 101.0], recipe=Recipe(prompt_tokens=1024, server_limits=(8192,)).table())
    with pytest.raises(NotComparable, match="prompt_tokens: 512 and 1024; server_limits"):
        compare(result([100.0, 101.0]), other)


def test_failed_requests_are_refused() -> None:
    bad = result([100.0, 101.0])
    bad["cells"][0]["repeats"][1]["failed"] = 1
    with pytest.raises(NotComparable, match="serve 4096 c1: 1 of 2 requests failed"):
        compare(result([100.0, 101.0]), bad)


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"recipe": 3, "cells": []},
        {"recipe": {}, "cells": [{}]},
        result([1.0], cells=[{"kind": "serve", "label": "serve 4096 c1", "repeats": [{}]}]),
        result([1.0], cells=[{"kind": "another", "label": "serve 4096 c1", "repeats": []}]),
        result([1.0], cells=[{"kind": "serve", "label": "serve 4096 c1", "repeats": 3}]),
        result([1.0], cells=[]),
    ],
)
def test_what_is_no_result_is_refused(broken: dict[str, Any]) -> None:
    for pair in ((broken, result([1.0])), (result([1.0]), broken)):
        with pytest.raises(NotComparable):
            compare(*pair)


def test_a_figure_that_a_repeat_lacks_is_not_compared() -> None:
    bunched = result([100, 101, 99])
    bunched["cells"][0]["repeats"][1]["mean_tpot_ms"] = None
    for pair in ((bunched, result([50, 51, 49])), (result([50, 51, 49]), bunched)):
        lines = {line.figure: line for line in compare(*pair)}
        tpot = lines["mean_tpot_ms"]
        assert (tpot.ratio, tpot.noise, tpot.judgement) == (None, None, "not measured")
        assert {tpot.first, tpot.second} == {None, 1.0}
        assert lines["output_throughput"].ratio is not None, "throughput needs no time of a first token"


def test_what_else_differs_is_said() -> None:
    said = notes(
        result([1.0], provenance={"driver": "580.173.02"}, banners=[{"text": "CAPPED: a card"}]),
        result([1.0], provenance={"driver": "570.1"}),
    )
    assert said == ("driver: 580.173.02 and 570.1", "first: CAPPED: a card")
