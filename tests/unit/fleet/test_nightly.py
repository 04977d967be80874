"""The nightly audit: told once, not told again, told later when it could not be told; needs no package of the operator's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from laoka.cli.nightly import run
from laoka.host.report import HostReport
from tests.unit.fleet import deployed_host
from tests.unit.fleet.deployed_host import DATA, STACK


class Night:
    """A host at night, with an alert channel that takes what it is given or does not."""

    def __init__(self, folder: Path) -> None:
        self.config, self.last, self.urls = folder / "audit.json", folder / "last.json", folder / "urls"
        self.urls.write_text("json://127.0.0.1:9/alerts\n")
        wishes = {"host": "box", "lang": "en", "simulated": True, "data": DATA, "stack": STACK, "has_lock": True}
        self.config.write_text(json.dumps({**wishes, "alert_urls_file": str(self.urls)}))
        self.sent: list[tuple[str, str, str]] = []
        self.takes = True

    def go(self, report: HostReport | None = None) -> int:
        def send(url: str, title: str, body: str, kind: str) -> bool:
            self.sent.append((title, body, kind))
            return self.takes

        return run(self.config, self.last, lambda: report or deployed_host.host(), send, lambda line: None)


@pytest.fixture
def night(tmp_path: Path) -> Night:
    return Night(tmp_path)


def ill(**changes: Any) -> HostReport:
    return deployed_host.host(nvidia_smi_xml=deployed_host.smi("250.00 W"), **changes)


def test_a_host_in_order_says_nothing(night: Night) -> None:
    assert (night.go(), night.go(), night.sent) == (0, 0, [])


def test_what_is_new_is_told_once_and_its_end_too(night: Night) -> None:
    night.go()
    assert (night.go(ill()), night.go(ill())) == (0, 0)
    title, body, kind = night.sent[0]
    assert len(night.sent) == 1 and kind == "opened"
    assert title == "[simulated card] [laoka] box: audit: 2 new"
    assert "! box: new: 0000:02:00.0: the cap is 250 W, 175 W is wanted [audit.caps]" in body
    night.go()
    assert night.sent[1][0].endswith("back in order") and night.sent[1][2] == "recovered"


def test_the_first_night_tells_what_is_wrong_already(night: Night) -> None:
    night.go(ill())
    assert len(night.sent) == 1


def test_what_could_not_be_told_is_told_the_next_night(night: Night) -> None:
    night.takes = False
    assert night.go(ill()) == 1
    night.takes = True
    assert (night.go(ill()), len(night.sent)) == (0, 2)


def test_a_channel_that_takes_only_critical_gets_nothing(night: Night) -> None:
    night.urls.write_text("critical = json://127.0.0.1:9/alerts\n")
    assert (night.go(ill()), night.sent) == (0, [])


def test_what_was_kept_and_is_damaged_is_the_first_night_again(night: Night) -> None:
    night.last.write_text("{")
    assert night.go() == 0 and json.loads(night.last.read_text())["format"] == 1


def test_it_needs_nothing_of_the_operators_packages() -> None:
    blocked = ("pyinfra", "paramiko", "jinja2", "rich", "packaging", "platformdirs", "tomli_w", "hatchling")
    program = f"import sys\nsys.modules.update(dict.fromkeys({blocked!r}))\nimport laoka.cli.nightly\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
