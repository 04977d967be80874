"""The knee of a ramp, what limits it, and when it ends; the baseline's ratios, choice and verdict."""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from laoka.catalog.profiles import Profile, Speed, profiles
from laoka.cli.main import cli
from laoka.serving.bench.baseline import (
    FLAG,
    TARGET_ONLY,
    Choice,
    choose,
    decode_speed,
    measure_variants,
    nearest,
    ratios,
    variants_of,
    verdict,
)
from laoka.serving.bench.figures import spread
from laoka.serving.bench.host_side import HostSide
from laoka.serving.bench.ramp import Step, find_knee, goes_on, ramp_table, suggestion_of, wait_ms
from laoka.serving.bench.recipe import Recipe


def steps(*speeds: float, **changes: Mapping[int, Any]) -> list[Step]:
    """Steps of 1, 2, 4, ... at once; `changes` by field: {concurrency: value}."""
    found = []
    for power, speed in enumerate(speeds):
        at = 2**power
        own = {field: values[at] for field, values in changes.items() if at in values}
        found.append(Step(at, speed, 10, 20, 1000 * at / speed, 1200 * at / speed, **own))
    return found


def test_the_knee_is_where_90_percent_of_the_best_is_reached() -> None:
    found = find_knee(steps(100, 195, 380, 700, 760, 765))
    assert (found.knee, found.suggested_max_num_seqs, found.reason) == (8, 8, "ramp_knee")  # 700 is 91.5 % of 765
    assert find_knee(steps(100, 195, 380, 680, 760, 765)).knee == 16  # 680 is 88.9 %
    assert find_knee(steps(100)).knee == 1


def test_queueing_and_preemption_are_told_and_preemption_limits() -> None:
    found = find_knee(steps(100, 200, 400, 800, most_waiting={1: 0, 2: 0, 4: 2, 8: 5}, preemptions={1: 0, 2: 0, 4: 0, 8: 3}))
    assert (found.first_queueing, found.first_preemption) == (4, 8)
    assert (found.suggested_max_num_seqs, found.reason) == (4, "ramp_preemption")


def test_a_queue_that_no_sample_saw_is_told() -> None:
    found = find_knee(steps(100, 200, 400, 410, mean_wait_ms={1: 0.8, 2: 0.99, 4: 0.5, 8: 1.952}))
    assert found.first_queueing == 8, "1.952 of 19.51 ms is a tenth; 0.99 of 10 is less"
    assert find_knee(steps(100, 200, mean_wait_ms={1: 0.1, 2: 0.2}, most_waiting={1: 0, 2: 1})).first_queueing == 2


def test_waiting_is_that_of_the_gateway_and_that_of_the_engine() -> None:
    assert wait_ms(421.0, {"ttft": 30.0, "queue": 5.0}) == 396.0
    assert wait_ms(20.0, {"ttft": 30.0, "queue": 5.0}) == 5.0, "clocks differ by a little"
    assert wait_ms(20.0, {"queue": 5.0}) == 5.0 and wait_ms(20.0, {}) is None


def test_the_servers_own_seats_are_named_as_the_limit() -> None:
    found = find_knee(steps(100, 200, 400, 405, 410), max_num_seqs=4)
    assert (found.knee, found.suggested_max_num_seqs, found.reason) == (4, 4, "ramp_seats")
    assert find_knee(steps(100, 200, 400, 405, 410), max_num_seqs=8).reason == "ramp_knee"


def test_limits_that_a_good_request_meets_come_first() -> None:
    found = find_knee(steps(100, 200, 400, 800, good_share={1: 1.0, 2: 1.0, 4: 0.5, 8: 0.0}))
    assert (found.suggested_max_num_seqs, found.reason) == (2, "ramp_goodput")


def test_a_ramp_ends_after_two_steps_that_brought_nothing() -> None:
    assert goes_on(steps(100, 101)) and goes_on(steps(100, 200, 201)) and not goes_on(steps(100, 200, 201, 204))
    assert goes_on(steps(100, 100, 150))


def test_the_suggestion_goes_back_into_the_plan(tmp_path: Path) -> None:
    ramp = tmp_path / "ramp.json"
    found = find_knee(steps(100, 200, 210, 211))
    ramp.write_text(json.dumps(ramp_table(steps(100, 200, 210, 211), found, Recipe(), {})))
    assert suggestion_of(json.loads(ramp.read_text())) == 2
    planned = CliRunner().invoke(cli, ["plan", "--gpu", "4xv100-sxm2-32gb", "--ramp", str(ramp), "--json"])
    assert json.loads(planned.output)["stack"]["serve_flags"]["max-num-seqs"] == "2"
    ramp.write_text("{}")
    refused = CliRunner().invoke(cli, ["plan", "--gpu", "4xv100-sxm2-32gb", "--ramp", str(ramp)], standalone_mode=False)
    assert refused.return_value == 2 and "not a result of laoka bench ramp" in refused.output


def result(decode: Sequence[float | None], prefill: list[float], serve: list[float]) -> dict[str, Any]:
    cells = []
    for kind, figure, values in (
        ("serve", "output_throughput", serve),
        ("prefill", "prefill_tok_s", prefill),
        ("decode", "decode_tok_s", decode),
    ):
        rows: list[dict[str, Any]] = [{figure: value} for value in values]
        cells.append({"kind": kind, "label": kind, "repeats": rows, "spread": spread(rows)})
    return {"cells": cells}


def test_ratios_against_the_target_alone_and_the_choice() -> None:
    found = ratios({
        TARGET_ONLY: result([60, 61, 59], [4000, 4010, 3990], [60, 61, 59]),
        "dflash2": result([180, 182, 178], [4000, 4020, 3980], [170, 171, 169]),
        "mtp": result([100, 101, 99], [4000, 4001, 3999], [98, 99, 97]),
    })  # fmt: skip
    by_name = {(item.variant, item.figure): item for item in found}
    assert by_name["dflash2", "decode_tok_s"].ratio == pytest.approx(3) and by_name["mtp", "prefill_tok_s"].ratio == 1
    assert by_name["dflash2", "prefill_tok_s"].judgement == "within noise"
    assert (choose(found).variant, choose(found).reason) == ("dflash2", "baseline_best")


def test_speculation_that_brings_little_or_only_noise_is_not_chosen() -> None:
    alone = result([100, 101, 99], [1], [1])
    assert choose(ratios({TARGET_ONLY: alone, "mtp": result([104, 104.5, 103.5], [1], [1])})).reason == "baseline_none_better"
    assert choose(ratios({TARGET_ONLY: alone, "mtp": result([60, 200, 130], [1], [1])})).variant == TARGET_ONLY
    assert choose(ratios({TARGET_ONLY: alone})).reason == "baseline_no_variant"


def test_a_way_whose_speed_could_not_be_measured_decides_nothing() -> None:
    alone = result([60, 61, 59], [4000, 4010, 3990], [60, 61, 59])
    bunched = result([180, None, 178], [4000, 4020, 3980], [170, 171, 169])
    found = ratios({TARGET_ONLY: alone, "ngram": bunched})
    decode = next(item for item in found if item.figure == "decode_tok_s")
    assert (decode.alone, decode.value, decode.ratio, decode.judgement) == (60, None, None, "not measured")
    assert next(item for item in found if item.figure == "output_throughput").ratio == pytest.approx(170 / 60)
    assert choose(found) == Choice(TARGET_ONLY, "baseline_not_measured", None) and decode_speed(bunched) is None
    swapped = ratios({TARGET_ONLY: bunched, "ngram": alone})
    assert choose(swapped).reason == "baseline_not_measured"
    faster = ratios({TARGET_ONLY: alone, "ngram": bunched, "mtp": result([100, 101, 99], [1, 1, 1], [1, 1, 1])})
    assert choose(faster).variant == "mtp", "what was measured and is better is better"


def test_one_repeat_decides_nothing_and_that_is_told() -> None:
    found = ratios({TARGET_ONLY: result([60], [1], [1]), "mtp": result([100], [1], [1])})
    assert choose(found).reason == "baseline_noise_unknown"
    assert choose(ratios({TARGET_ONLY: result([60], [1], [1]), "mtp": result([61], [1], [1])})).reason == "baseline_none_better"


def test_variants_of_a_host() -> None:
    dflash = '{"method":"dflash","model":"incoai/Qwen3.8-27B-DFlash2","num_speculative_tokens":7}'
    found = variants_of({FLAG: dflash})
    assert list(found) == [TARGET_ONLY, "dflash2", "mtp"] and found[TARGET_ONLY] is None
    assert json.loads(found["dflash2"] or "")["num_speculative_tokens"] == 7 and json.loads(found["mtp"] or "")["method"] == "mtp"
    assert variants_of({}) == {TARGET_ONLY: None}
    assert list(variants_of({}, {"ngram": {"method": "ngram"}})) == [TARGET_ONLY, "ngram"]


def test_each_variant_is_put_in_force_and_the_host_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    @contextmanager
    def changes(self: HostSide, deadline_s: float, say: Any) -> Iterator[Any]:
        try:
            yield done.append
        finally:
            done.append("back")

    monkeypatch.setattr(HostSide, "changes", changes)

    async def measure() -> dict[str, Any]:
        if len(done) == 2:
            raise RuntimeError("the engine fell")
        return {"after": len(done)}

    with pytest.raises(RuntimeError):
        asyncio.run(measure_variants(HostSide(None), {"a": None, "b": "{}"}, measure, 1, lambda line: None))
    assert done == [{FLAG: None}, {FLAG: "{}"}, "back"]


def test_the_nearest_published_speed_is_of_that_speculation_and_of_one_request() -> None:
    mine = [
        Profile(
            id="x", source="s", checked=datetime.date(2026, 12, 1), gpu="v100-sxm2-32gb", count=4, engine="1cat-vllm==1.5.1",
            model="m", speculative="dflash2", works=True, measured_by="p", status="published",
            speed=(Speed("decode", 229, 4096), Speed("decode", 201, 32768), Speed("decode", 1139, 4096, 8), Speed("prefill", 9, 1)),
        )
    ]  # fmt: skip
    assert (nearest(mine, "dflash2", 432) or ("", 0))[1] == 229 and (nearest(mine, "dflash2", 30000) or ("", 0))[1] == 201
    assert nearest(mine, "none", 432) is None
    assert nearest(profiles(), "dflash2", 432) is not None


@pytest.mark.parametrize(
    ("measured", "published", "ceiling", "key"),
    [
        (229, 229, 898, "baseline_as_published"),
        (161, 229, 898, "baseline_as_published"),
        (160, 229, 898, "baseline_under"),
        (900, 229, 898, "baseline_above_ceiling"),
        (100, None, 898, "baseline_unpublished"),
    ],
)
def test_whether_a_box_underperforms(measured: float, published: float | None, ceiling: float | None, key: str) -> None:
    assert verdict(measured, published, ceiling) == key
