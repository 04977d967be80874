"""laoka bench, cache and diagnose against a served sandbox host: the model is a tiny one on a CPU, the card is simulated."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from laoka.sandbox import hosts
from laoka.sandbox.lab import HostFolder
from laoka.serving.bench.baseline import DECIDED
from roles.dflash2.measured import measured_in
from tests.hosts import INVENTORY, laoka, until
from tests.served.client import CHAT, PORT, Gateway, chat
from tests.served.serving import record, show

pytestmark = pytest.mark.sandbox


def place(host: HostFolder) -> tuple[str, ...]:
    """The words that name the host's gateway, its key, and the host itself."""
    keys = str(host.lab.gateway_keys)
    return f"http://{host.address}:{PORT}", "--api-key-file", keys, "--host", host.name, "--inventory", INVENTORY


def bench(host: HostFolder, *words: str) -> subprocess.CompletedProcess[str]:
    return laoka(host.lab, "bench", "run", *place(host), "--repeats", "1", *words, deadline_s=300)


@pytest.fixture(scope="module")
def measured(served: HostFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of a small recipe through the gateway, beside the host."""
    name = tmp_path_factory.mktemp("bench") / "today"
    done = bench(served, "--concurrency", "1,4", "-o", str(name))
    assert done.returncode in (0, 1), done.stderr
    assert "SIMULATED" in done.stdout and "CAPPED: 0000:03:00.0: the power limit is 175 W" in done.stdout
    return name


def cells(name: Path) -> dict[str, dict[str, Any]]:
    return {cell["label"]: cell["repeats"][0] for cell in json.loads(name.with_suffix(".json").read_text())["cells"]}


def test_tokens_are_exact_and_none_came_from_the_cache(measured: Path, served: HostFolder) -> None:
    found = cells(measured)
    for label, requests in (("serve 4096 c1", 2), ("serve 4096 c4", 8)):
        cell = found[label]
        assert (cell["completed"], cell["failed"]) == (requests, 0)
        assert (cell["total_input_tokens"], cell["total_output_tokens"]) == (512 * requests, 256 * requests)
        assert 0 < cell["mean_ttft_ms"] < cell["mean_e2el_ms"] and cell["output_throughput"] > 0
    source = json.loads(measured.with_suffix(".json").read_text())["provenance"]
    assert source["engine_version"] == "0.32.0" and source["simulated"] is True and source["driver"] == "580.173.02"
    assert source["serve_flags"]["max-num-seqs"] == 4
    assert measured.with_suffix(".csv").read_text().count("\n") >= 3
    assert "<svg" in measured.with_suffix(".svg").read_text()


def test_a_result_is_compared_with_one_of_its_own_recipe_only(measured: Path, served: HostFolder, tmp_path: Path) -> None:
    same = laoka(served.lab, "bench", "compare", f"{measured}.json", f"{measured}.json")
    assert same.returncode == 0 and "1.00" in same.stdout, same.stderr
    other = json.loads(measured.with_suffix(".json").read_text())
    other["recipe"]["output_tokens"], other["recipe_id"] = 128, "another"
    (tmp_path / "other.json").write_text(json.dumps(other))
    refused = laoka(served.lab, "bench", "compare", f"{measured}.json", str(tmp_path / "other.json"))
    assert refused.returncode == 2 and "recipe" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.long
def test_another_limit_is_served_for_the_time_of_the_measurement_only(served: HostFolder, tmp_path: Path) -> None:
    before = hosts.execute(served, "cat /etc/qwen-serve/vllm.yaml", check=True).stdout
    main_pid = show(served, "MainPID")
    dry = bench(served, "--concurrency", "1", "--limits", "2048", "--dry")
    assert dry.returncode == 0 and "2048" in dry.stderr and show(served, "MainPID") == main_pid
    done = bench(served, "--concurrency", "1", "--limits", "2048", "--yes", "-o", str(tmp_path / "small"))
    assert done.returncode in (0, 1), done.stderr
    assert cells(tmp_path / "small")["serve 2048 c1"]["completed"] == 2
    left = hosts.execute(served, "cat /etc/qwen-serve/vllm.yaml; ls /run/laoka-bench /run/systemd/system/qwen-serve.service.d")
    assert left.stdout == before, "its flags are as they were, and nothing is left in /run"
    assert record(served).state == "ready"


def test_a_ramp_ends_in_a_number_that_the_plan_takes(served: HostFolder, tmp_path: Path) -> None:
    name = str(tmp_path / "ramp")
    done = laoka(
        served.lab, "bench", "ramp", *place(served), "--most", "4", "--requests-per-stream", "1", "-o", name, deadline_s=200
    )
    assert done.returncode == 0 and "SIMULATED" in done.stdout and "suggested max-num-seqs" in done.stdout, done.stderr
    ramp = json.loads(Path(f"{name}.json").read_text())
    assert [step["concurrency"] for step in ramp["steps"]] == [1, 2, 4] and "<svg" in Path(f"{name}.svg").read_text()
    assert all(step["output_throughput"] > 0 and step["preemptions"] == 0 for step in ramp["steps"])
    seats = ramp["suggested_max_num_seqs"]
    assert 1 <= seats <= 4
    planned = laoka(served.lab, "plan", "--gpu", "4xv100-sxm2-32gb", "--ramp", f"{name}.json", "--json")
    assert json.loads(planned.stdout)["stack"]["serve_flags"]["max-num-seqs"] == str(seats), planned.stderr


def test_nothing_is_restarted_for_a_url_that_does_not_answer(served: HostFolder) -> None:
    main_pid = show(served, "MainPID")
    dead = laoka(served.lab, "bench", "run", f"http://{served.address}:9", *place(served)[1:], "--baseline", "--yes")
    assert dead.returncode == 2 and "no answer" in dead.stderr and "Traceback" not in dead.stderr, dead.stderr
    assert show(served, "MainPID") == main_pid


@pytest.mark.long
def test_a_way_of_speculation_is_measured_against_none_and_the_host_put_back(served: HostFolder, tmp_path: Path) -> None:
    """n-grams, which need no drafter: what vLLM has of speculation on a CPU."""
    before = hosts.execute(served, "cat /etc/qwen-serve/vllm.yaml", check=True).stdout
    way = 'ngram={"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":3}'
    done = bench(served, "--concurrency", "1", "--baseline", "--variant", way, "--yes", "-o", str(tmp_path / "base"))
    assert done.returncode == 0, done.stderr
    assert "target-only: decode" in done.stdout and "3x decode and 15x" in done.stdout
    text = (tmp_path / "base.json").read_text()
    found = json.loads(text)
    assert set(found["results"]) == {"target-only", "ngram"} and {item["figure"] for item in found["ratios"]} == {
        "output_throughput", "prefill_tok_s", "decode_tok_s",
    }  # fmt: skip
    for name, result in found["results"].items():
        cell = next(cell for cell in result["cells"] if cell["kind"] == "decode")
        here, server_ms = cell["repeats"][0]["decode_tok_s"], cell["server"]["server_mean_tpot_ms"]
        assert here is None or here < 2.1 * 1000 / server_ms, f"{name}: a speed that the server's own clock does not know"
        assert (cell["server"]["spec_decode_acceptance"] is not None) == (name == "ngram")
        assert (here is not None) or any(banner["id"] == "bench.bunched" for banner in result["banners"])
    assert found["choice"]["variant"] == "target-only" and found["choice"]["reason"] != "baseline_best", (
        "one repeat decides nothing"
    )
    version = found["results"]["target-only"]["provenance"]["engine_version"]
    taken = measured_in(text, version)
    assert (taken.method is None) == (found["choice"]["reason"] not in DECIDED), taken
    left = hosts.execute(served, "cat /etc/qwen-serve/vllm.yaml; ls /run/laoka-bench /run/systemd/system/qwen-serve.service.d")
    assert left.stdout == before and record(served).state == "ready", "the host is as it was"


def test_the_cache_says_its_hit_rate(served: HostFolder) -> None:
    done = laoka(served.lab, "cache", "run", *place(served))
    assert done.returncode in (0, 1) and "%" in done.stdout, done.stderr


def test_prompts_with_one_beginning_are_told_with_what_they_save(served: HostFolder) -> None:
    """Through the gateway, whose inventory asks for hashes of prompts."""
    gateway = Gateway(served)
    beginning = "You are a careful assistant of a small workshop that mends old accelerators. " * 12
    for number in range(6):
        assert gateway.ask("POST", CHAT, json.dumps(chat(f"{beginning} Question {number}", max_tokens=1)).encode()).status == 200
    secret = "accelerators"

    def noted() -> dict[str, Any] | None:
        done = laoka(served.lab, "cache", "run", *place(served), "--json")
        assert done.returncode in (0, 1), done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found if any(item["requests"] >= 6 and item["tokens"] >= 64 for item in found["prompts"]["shared"]) else None

    found = until(noted, 60, "six prompts with one beginning are noted")
    assert 0 < found["hit_rate"] <= 1 and found["prefix_cache_hits"] > 0
    shared = max(found["prompts"]["shared"], key=lambda item: item["saved_tokens"])
    assert shared["saved_tokens"] == shared["tokens"] * (shared["requests"] - 1)
    kept = hosts.execute(served, "cat /var/lib/qwen-guard/prefixes.jsonl", check=True).stdout
    assert kept.count("\n") >= 6 and secret not in kept, "hashes only, never text"


def test_a_host_that_serves_has_no_root_cause(served: HostFolder) -> None:
    done = laoka(served.lab, "diagnose", INVENTORY, "--host", served.name, "--json")
    found = json.loads(done.stdout)
    assert set(found) >= {"root_cause", "also", "first_error_line"}
    assert done.returncode == (1 if found["root_cause"] or found["first_error_line"] else 0), done.stderr


def test_a_flag_that_the_engine_refused_is_the_root_cause(served: HostFolder) -> None:
    """Its own words of a real start, out of the host's own journal."""
    engine = "/opt/laoka/engines/current/bin/vllm"
    said = hosts.execute(served, f"HOME=/tmp {engine} serve /srv/none --no-such-flag 1 2>&1 | tail -40", deadline_s=120).stdout
    done = laoka(served.lab, "diagnose", "-", "--json", stdin=said)
    assert done.returncode == 1, done.stderr
    root = json.loads(done.stdout)["root_cause"]
    assert root is not None and "--no-such-flag" in root["evidence"]
