"""The laoka command itself: commands are imported only when called, so that --help stays fast."""

from __future__ import annotations

import importlib
import sys
from difflib import get_close_matches

import click

from laoka import __version__
from laoka.catalog.messages import LANGUAGES, Language, area, language, text
from laoka.catalog.translations import error_text
from laoka.cli.click_words import speak, wanted_language
from laoka.cli.translated import translated

COMMANDS = (
    "init", "check", "audit", "capture", "plan", "lock", "bench", "diagnose", "cache", "model", "watchdog", "sandbox", "completion",
)  # fmt: skip
"""The module laoka.cli.NAME has a click command that is named `command`; cli.about_NAME is the line about it."""

EXIT_FINE, EXIT_FINDINGS, EXIT_COULD_NOT_RUN = 0, 1, 2


class CommandsOnDemand(click.Group):
    """A click group that imports a command's module when it is run, not when the group is listed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.obj = language(wanted_language(args))
        speak(ctx.obj)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0] if args else ""
        if word not in COMMANDS and not word.startswith("-") and not ctx.resilient_parsing:
            close = get_close_matches(word, COMMANDS, n=1)
            ctx.fail(said("no_command_but", word=word, close=close[0]) if close else said("no_command", word=word))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except click.UsageError:
            raise
        except click.ClickException as error:
            raise click.ClickException(in_words(error)) from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        try:
            module = importlib.import_module(f"laoka.cli.{cmd_name}")
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("laoka"):
                raise
            raise click.ClickException(said("needs", command=cmd_name, package=error.name)) from None
        command: click.Command = module.command
        return translated(command) if spoken() == "zh" else command

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        click.Group.format_help(translated(self) if spoken() == "zh" else self, ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section(area("click")["commands"][spoken()]):
            formatter.write_dl([(name, about(name, spoken())) for name in COMMANDS])


def about(name: str, lang: Language) -> str:
    """What a command is for, in a line. Of all the catalogue one file is read for it, so that --help stays fast."""
    return area("cli")[f"about_{name}"][lang]


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """The version, and how fresh the catalogue is: what a card needs and which releases are bad ages faster than code."""
    if not value or ctx.resilient_parsing:
        return
    from laoka.catalog.selfcheck import newest_check

    click.echo(f"laoka {__version__}, catalogue of {newest_check().isoformat()}")
    ctx.exit()


@click.group(cls=CommandsOnDemand, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--lang", type=click.Choice(LANGUAGES), help="Language of messages (default: from LANG).")
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show version and date of the catalogue.",
)
@click.pass_context
def cli(ctx: click.Context, lang: Language | None) -> None:
    """From a bare board with second-hand Tesla V100 cards to an LLM endpoint that stays up.

    Provision with pyinfra: pyinfra inventories/lab.py deploys/full.py
    """
    ctx.obj = language(lang)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def spoken() -> Language:
    """The language of the command that runs: --lang, or the environment's."""
    context = click.get_current_context(silent=True)
    found = context.find_root().obj if context else None
    return "zh" if found == "zh" else "en" if found == "en" else language()


def said(key: str, **values: object) -> str:
    """A message of catalog/messages/cli.toml in the language of the command that runs."""
    return text(f"cli.{key}", spoken(), **values)


def in_words(error: Exception) -> str:
    """What an error says, in the language of the command that runs."""
    return error_text(str(error), spoken())


def main() -> None:
    """Entry point: every expected error ends in one line on stderr and exit status 2."""
    try:
        status = cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_COULD_NOT_RUN)
    except (click.Abort, KeyboardInterrupt):
        click.echo(said("interrupted"), err=True)
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else EXIT_FINE)
