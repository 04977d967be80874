"""click's own messages in Chinese: usage errors and headings, whatever command they come from."""

from __future__ import annotations

import ast
import inspect

import pytest

from laoka.catalog.messages import area
from laoka.cli.click_words import MODULES, wanted_language
from tests.documented import ROOT
from tests.unit.test_cli import laoka

# Of a click that is used in another way than laoka uses it: faults of a program, deprecations, and types that laoka has not.
NOT_OURS = (
    "Deprecat", "deprecat", "flag for true", "determine name", "No options defined", "exactly one parameter", "start character",
    "twice", "UUID", "does not match the format", "values are required", "color", "Press any key", "Choice(", "(dynamic)",
    "env var", "version", "Confirm the action", "Do you want to continue", "must be an iterable",
)  # fmt: skip


def said_by_click() -> set[str]:
    """Every text that click's modules hand to gettext."""
    found = set()
    for module in MODULES:
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("_", "ngettext"):
                found |= {item.value for item in node.args if isinstance(item, ast.Constant) and isinstance(item.value, str)}
    return found


def test_every_text_of_the_installed_click_is_in_the_catalogue_and_no_other() -> None:
    said, known = said_by_click(), {texts["en"] for texts in area("click").values()}
    assert len(said) > 50, "its messages are found"
    assert sorted(text for text in said - known if not any(word in text for word in NOT_OURS)) == []
    assert sorted(known - said - {"required"}) == []  # "required" is handed over as a variable


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("lock", "缺少参数 'INVENTORY'"),
        ("plan --gpus x", "没有 '--gpus' 这个选项。"),
        ("plan --speculative fast", "'--speculative' 的值无效：'fast' 不在可选值之内：'auto'"),
        ("plan --streams many", "'--streams' 的值无效：'many' 不是有效的数"),
        ("plan --streams 0", "'--streams' 的值无效：0 超出范围"),
        ("check --expect", "选项 '--expect' 需要一个值。"),
        ("check -i /none x", "'-i' 的值无效：文件 '/none' 不存在。"),
        ("lock a b c", "多出这些参数（b c）"),
        ("chek", "没有 'chek' 这个命令：是否想写 check？"),
        ("sandbox sup", "没有 'sup' 这个命令。 是否想写 'up'？"),
        ("check", "请给出 TARGET"),
        ("check /none/x", "/none/x：没有这个文件"),
        ("plan", "请用 --gpu 给出显卡"),
        ("audit", "请给出清单文件"),
        ("bench run nonsense", "请写 URL"),
        ("--bogus", "没有 '--bogus' 这个选项"),
    ],
)
def test_a_usage_error_is_in_the_readers_language(words: str, told: str) -> None:
    done = laoka("--lang", "zh", *words.split())
    assert done.returncode == 2 and told in done.stderr, done.stderr
    assert not any(word in done.stderr for word in ("Error", "Usage", "Invalid", "Traceback"))


@pytest.mark.parametrize("words", ["lock", "chek", "check", "plan --streams many"])
def test_and_in_english(words: str) -> None:
    done = laoka("--lang", "en", *words.split())
    assert done.returncode == 2 and "Usage: " in done.stderr and "Error: " in done.stderr
    assert not any(char >= "\u4e00" for char in done.stderr)


def test_every_usage_error_of_ours_comes_from_the_catalogue() -> None:
    literal = []
    for path in (ROOT / "laoka" / "cli").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            told = name in ("UsageError", "BadParameter") and isinstance(node, ast.Call)
            if told and isinstance(node.args[0], ast.Constant | ast.JoinedStr):
                literal.append(f"{path.name}:{node.lineno}")
    assert literal == []


def test_lang_of_the_environment_counts_and_help_has_chinese_headings() -> None:
    done = laoka("lock", env={"LANG": "zh_CN.UTF-8", "LC_ALL": "", "LC_MESSAGES": ""})
    assert done.returncode == 2 and "缺少参数" in done.stderr
    shown = laoka("plan", "--help", env={"LANG": "zh_CN.UTF-8", "LC_ALL": "", "LC_MESSAGES": ""})
    assert shown.returncode == 0 and shown.stdout.startswith("用法:") and "选项:" in shown.stdout


def test_lang_without_a_value_is_told() -> None:
    assert laoka("--lang=zh", "--bogus").stderr.count("--bogus") == 1
    assert laoka("--lang").returncode == 2


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--lang", "zh", "plan"], "zh"),
        (["--lang=zh"], "zh"),
        (["--bogus", "--lang", "zh"], "zh"),
        (["plan", "--lang", "zh"], None),
        (["--lang"], None),
        ([], None),
    ],
)
def test_the_language_is_known_before_the_options_are_read(words: list[str], wanted: str | None) -> None:
    assert wanted_language(words) == wanted
