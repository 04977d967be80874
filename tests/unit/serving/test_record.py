"""The readiness record: what was written is read, what is no record is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from laoka.serving.record import Record, path_of, read_record, write_record


def test_round_trip(tmp_path: Path) -> None:
    record = Record(unit="u", state="failed", since_unix_s=1.5, pid=7, kind="engine_frozen", detail="静", start_s=38.4)
    write_record(tmp_path / "deep" / "state.json", record)
    assert read_record(tmp_path / "deep" / "state.json") == record


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"unit": "u"}', "nonsense", "null"])
def test_what_is_no_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    assert read_record(tmp_path / "state.json") is None
    assert read_record(tmp_path / "none.json") is None


def test_each_instance_has_its_own() -> None:
    assert str(path_of()) == "/run/qwen-serve/state.json"
    assert str(path_of("qwen-serve@left.service")) == "/run/qwen-serve/left/state.json"
