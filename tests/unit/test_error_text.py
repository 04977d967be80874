"""Errors in Chinese: every text that an exception is raised with has one, also inside of another; what is not ours stays."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.catalog.translations import error_text, translations
from tests.error_templates import raised
from tests.unit.test_cli import laoka

SAID_BY_THE_SYSTEM = {os.strerror(number) for number in range(1, 134)}


def test_every_error_of_the_code_is_told_in_chinese_and_nothing_else() -> None:
    texts, known = set(raised()), set(translations("errors"))
    assert len(texts) > 200
    assert sorted(texts - known) == [], "add them to laoka/catalog/translations/errors.toml"
    inner = {english for english in known - texts if "{" not in english and len(english) < 30}  # "not JSON" and the like
    assert sorted(known - texts - SAID_BY_THE_SYSTEM - inner) == [], "no error says that any more"


def test_values_and_what_is_typed_are_kept() -> None:
    faults = []
    for english, chinese in translations("errors").items():
        values = [set(re.findall(r"\{\d+\}", text)) for text in (english, chinese)]
        if not values[1] <= values[0] or (values[0] - values[1] and "{2} here" not in english):  # an English plural's s
            faults.append(f"values: {english}")
        faults += [
            f"{word}: {english}"
            for word in re.findall(r"--[a-z0-9-]+|[A-Za-z]+_[A-Za-z_]+|laoka [a-z]+", english)
            if word not in chinese
        ]
    assert [
        fault
        for fault in faults
        if not fault.startswith(("laoka again", "laoka in", "laoka capture", "laoka installs", "laoka is"))
    ] == []


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        ("x.py: there is no such inventory file", "x.py：没有这个清单文件"),
        ("host a: driver fast: write a branch (580), a version (580.173.02) or a package's name",
         "主机 a：驱动 fast：请写分支（580）、版本（580.173.02）或软件包名"),
        ("k.txt: Permission denied", "k.txt：没有权限"),
        ("m: no manifest: No such file or directory", "m：没有清单文件：没有这个文件或目录"),
        ("a: no such folder; b: not text; run again to resume", "a：没有这个文件夹；b：不是文本；再次运行即可续传"),
        ("Cannot connect to host 127.0.0.1:9", "Cannot connect to host 127.0.0.1:9"),
        ("", ""),
    ],
)  # fmt: skip
def test_an_error_and_the_one_inside(english: str, chinese: str) -> None:
    assert error_text(english, "zh") == chinese
    assert error_text(english, "en") == english


@given(st.sampled_from(sorted(translations("errors"))), st.text(st.characters(exclude_characters=":;"), max_size=8))
def test_any_value_is_found_in_the_chinese_text(english: str, value: str) -> None:
    told = error_text(re.sub(r"\{\d+\}", lambda _: value, english), "zh")
    assert value in told or "{" not in english


@given(st.text(alphabet="ab:; {}0没", max_size=40), st.integers(1, 60))
def test_no_message_is_too_odd_or_too_long(text: str, times: int) -> None:
    assert isinstance(error_text(text * times, "zh"), str)


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ("plan --gpu v100-pcie", 2, "laoka plan: --gpu 'v100-pcie'：没有叫这个名字的卡"),
        ("lock nothere.py", 2, "laoka lock: nothere.py：没有这个清单文件"),
        ("check /etc/hostname", 2, "不是 laoka 探测脚本的输出"),
        ("check nothere.py", 2, "错误：nothere.py：没有这个清单文件"),
        ("sandbox --lab A_B status", 2, "沙盒不能叫 'A_B'"),
        ("bench compare /etc/hostname /etc/hostname", 2, "不是 JSON"),
        ("model verify A/B --store /none", 2, None),
    ],
)
def test_a_command_tells_its_error_in_the_readers_language(words: str, status: int, told: str | None, tmp_path: Path) -> None:
    done = laoka("--lang", "zh", *words.split())
    assert done.returncode == status
    assert told is None or told in done.stderr
    assert re.search(r"[\u4e00-\u9fff]", done.stderr), done.stderr
