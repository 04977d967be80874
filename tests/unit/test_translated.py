"""Help in Chinese: every text of every command has one, wrapped for a terminal's cells; asking for it changes no command."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.catalog.translations import translations
from laoka.cli.main import COMMANDS, cli
from laoka.cli.translated import translated
from laoka.cli.wide_text import cells, wrap_text
from tests.unit.test_cli import laoka


def commands(command: click.Command, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            below = command.get_command(click.Context(command), name)
            assert below is not None
            yield from commands(below, *path, name)


ALL = dict(commands(cli))


def texts(command: click.Command) -> Iterator[str]:
    of_options = (parameter.help for parameter in command.params if isinstance(parameter, click.Option))
    yield from (inspect.cleandoc(text) for text in (command.help, command.short_help, *of_options) if text)


def test_every_text_of_the_help_is_told_in_chinese_and_nothing_else() -> None:
    told = {text for command in ALL.values() for text in texts(command)}
    assert len(told) > 100
    assert set(translations("help")) == told, "add or mend the text in laoka/catalog/translations/help.toml"


def test_every_option_says_what_it_is_for() -> None:
    silent = [
        f"{' '.join(path)} {parameter.opts[0]}"
        for path, command in ALL.items()
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.help
    ]
    assert silent == []


@pytest.mark.parametrize("name", ["help", "keys"])
def test_a_chinese_text_keeps_the_words_that_are_typed(name: str) -> None:
    """Options, paths, names of variables and of commands are the same in both: what is copied out of a text must work."""
    faults = []
    for english, chinese in translations(name).items():
        for word in english.replace("`", " ").split():
            word = word.strip(".,;:()[]'\"")
            typed = word.startswith(("--", "/", "~/", "$")) or "_" in word or (word in COMMANDS and f"laoka {word}" in english)
            if typed and word not in chinese:
                faults.append(f"{word}: {chinese[:60]}")
    assert not faults


@pytest.mark.parametrize("path", [(), ("plan",), ("bench", "run"), ("model", "use"), ("sandbox", "fault")], ids=" ".join)
def test_help_fits_a_terminal_of_80_cells(path: tuple[str, ...]) -> None:
    done = laoka("--lang", "zh", *path, "--help")
    assert done.returncode == 0
    assert next(iter(texts(ALL[path]))).split()[0] not in done.stdout
    assert "用法" in done.stdout and "选项" in done.stdout
    wide = [line for line in done.stdout.splitlines() if cells(line) > 80]
    assert not [line for line in wide if not line.lstrip().startswith("laoka ")]  # examples are left as they are


def test_the_command_itself_stays_english() -> None:
    before = [list(texts(command)) for command in ALL.values()]
    for command in ALL.values():
        translated(command)
    assert [list(texts(command)) for command in ALL.values()] == before


def test_a_full_stop_begins_no_line_and_a_word_is_not_cut() -> None:
    assert wrap_text("显卡的计算能力是七十。", 20) == "显卡的计算能力是七\n十。"
    assert wrap_text("用 laoka-plan 查看", 8) == "用\nlaoka-plan\n查看"
    assert wrap_text("一\n\n\b\na  b\nc\n\n二", 40, "  ", "  ", preserve_paragraphs=True) == "  一\n\n  a  b\n  c\n\n  二"


@given(st.text(alphabet="显卡，。 ab-（）\n", max_size=80), st.integers(4, 40))
def test_wrapping_loses_nothing(text: str, width: int) -> None:
    wrapped = wrap_text(text, width)
    assert "".join(wrapped.split()) == "".join(text.split())
    for line in wrapped.splitlines():
        assert cells(line) <= width or len(line.split()) == 1
