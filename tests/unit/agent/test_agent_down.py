"""The last word about a unit that is down for good: told once, and only where the watchdog does not tell it."""

from __future__ import annotations

from pathlib import Path

import pytest

from laoka.agent import channels, down
from laoka.agent.config import Config
from laoka.agent.unit import UnitState
from laoka.serving.record import Record

RECORD = Record(
    unit="qwen-serve.service",
    state="failed",
    since_unix_s=1.0,
    pid=1,
    kind="bad_flag",
    detail="unrecognized: --x",
    fix="correct it",
)


@pytest.mark.parametrize(("lang", "words"), [("en", "down for good"), ("zh", "彻底停止")])
def test_the_message_names_host_unit_cause_and_what_to_do(lang: str, words: str) -> None:
    title, body = down.message(Config(host="x99", lang=lang, simulated=True), "qwen-serve.service", RECORD)  # type: ignore[arg-type]
    assert words in title and "x99" in title and "qwen-serve.service" in title and ("simulated" in title or "模拟" in title)
    assert "bad_flag" in body and "--x" in body and "correct it" in body and "systemctl restart qwen-serve.service" in body


def test_without_a_record_the_journal_is_named() -> None:
    assert "journalctl -u qwen-serve.service" in down.message(Config(host="x"), "qwen-serve.service", None)[1]


@pytest.mark.parametrize(
    ("unit", "served", "watchdog", "sent"),
    [
        ("qwen-serve.service", "failed", "inactive", 1),
        ("qwen-serve.service", "failed", "active", 0),
        ("qwen-serve.service", "activating", "inactive", 0),
        ("qwen-serve@two.service", "failed", "active", 1),  # the watchdog looks at qwen-serve.service, which stands for all of them
    ],
)
def test_who_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unit: str, served: str, watchdog: str, sent: int) -> None:
    told: list[str] = []
    states = {unit: served, down.WATCHDOG: watchdog}
    monkeypatch.setattr(down, "read_unit", lambda unit: UnitState(active=states[unit]))
    monkeypatch.setattr(channels, "send", lambda url, title, body, kind: told.append(title) or True)
    (tmp_path / "urls").write_text("# here\njson://127.0.0.1:1/a\n")
    (tmp_path / "watchdog.toml").write_text(f'host = "x99"\nalert_urls_file = "{tmp_path}/urls"\n')
    assert down.main(["--unit", unit], tmp_path / "watchdog.toml") == 0
    assert len(told) == sent


def test_nobody_to_tell_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(down, "read_unit", lambda unit: UnitState(active="failed" if unit != down.WATCHDOG else "inactive"))
    (tmp_path / "watchdog.toml").write_text(f'host = "x99"\nalert_urls_file = "{tmp_path}/none"\n')
    assert down.main(["--unit", "qwen-serve.service"], tmp_path / "watchdog.toml") == 1
