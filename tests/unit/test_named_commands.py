"""Every laoka command that is named anywhere (README, docs, help, messages) exists, with the options it is named with."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator

import click
import pytest

from laoka.catalog.failures import failures
from laoka.catalog.messages import LANGUAGES, catalogue
from laoka.catalog.translations import translations
from laoka.cli.main import COMMANDS, cli
from tests.documented import PAGES, ROOT, all_blocks

# Up to the end of a shell command; `laoka` alone, laoka.service, laoka/cli and the like are no commands.
NAMED = re.compile(rf"(?<![\w./@-])laoka(?: --lang (?:zh|en))? ((?:{'|'.join(COMMANDS)}|-)[^\n`|;&>#()，。；：（）]*)")
ENDS = re.compile(
    r"""\s[\u2e80-\uffff].*|(?:[.,:]|['"])(?:\s|$).*|\s(?:and|or|to|is|for|in|with|on|again|the|says|shows|tells|prints|does|asks|reads|lists)\s.*""",
    re.DOTALL,
)


def fault_of(words: list[str]) -> str | None:
    """What click says of a command line's names of commands and options; values are not looked at. None: nothing."""
    command: click.Command = cli
    context = click.Context(cli, info_name="laoka")
    try:
        while True:
            _, words, _ = command.make_parser(context).parse_args(list(words))
            if not (isinstance(command, click.Group) and words):
                return None
            if words[0] not in command.list_commands(context) and "run" in command.commands:
                words.insert(0, "run")  # `laoka bench URL`
            name, below, words = command.resolve_command(context, words)
            assert below is not None
            command, context = below, click.Context(below, parent=context, info_name=name, **below.context_settings)
    except click.BadOptionUsage:
        return None  # a text that names an option alone, without its value
    except click.UsageError as error:
        return error.format_message()


def in_blocks() -> Iterator[tuple[str, str]]:
    for block in all_blocks():
        if block.language == "sh":
            text = block.text.replace("\\\n", " ")
            for line in text.splitlines():
                yield from ((block.id, found) for found in NAMED.findall(line))


def in_lines() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for span in re.findall(r"`(laoka [^`\n]+)`", page.read_text(encoding="utf-8")):
            yield from ((str(page.relative_to(ROOT)), found) for found in NAMED.findall(span))


def in_messages() -> Iterator[tuple[str, str]]:
    texts = {f"{key} [{lang}]": words[lang] for key, words in catalogue().items() for lang in LANGUAGES}
    texts |= {f"failures {row.id}": f"{row.fix}\n{row.fix_zh}\n{row.cause}\n{row.cause_zh}" for row in failures()}
    texts |= {f"help: {english[:30]}": f"{english}\n{chinese}" for english, chinese in translations("help").items()}
    for where, text in texts.items():
        for found in NAMED.findall(text):
            yield where, ENDS.sub("", found)


def words_of(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


@pytest.mark.parametrize("source", [in_blocks, in_lines, in_messages], ids=["blocks", "lines", "messages"])
def test_a_named_command_exists_with_its_options(source: Callable[[], Iterator[tuple[str, str]]]) -> None:
    named = list(source())
    assert len(named) > 20
    faults = [f"{where}: laoka {text}: {fault}" for where, text in named if (fault := fault_of(words_of(text)))]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("text", ["plan --gpus x", "modell list", "model lst", "check --json --bogus", "sandbox fault --undo"])
def test_it_finds_a_misspelt_one(text: str) -> None:
    assert fault_of(words_of(text))
