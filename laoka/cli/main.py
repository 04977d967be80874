"""The laoka command itself: commands are imported only when called, so that --help stays fast."""

from __future__ import annotations

import importlib
import sys

import click

from laoka import __version__
from laoka.catalog.messages import LANGUAGES, Language, language

# name -> (module, one line for --help). The module has a click command named `command`.
COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("laoka.cli.init", "write your first inventory from what your hosts say"),
    "check": ("laoka.cli.check", "is this host fit for the cards, and if not, why and what to do"),
    "audit": ("laoka.cli.audit", "every host of an inventory against its lock; what changed"),
    "capture": ("laoka.cli.capture", "a redacted, replayable bundle of one host"),
    "plan": ("laoka.cli.plan", "which pinned stack these cards can run, the memory sum, how fast it can be"),
    "lock": ("laoka.cli.lock", "fix the stack of every host of an inventory in one file, or check it"),
    "bench": ("laoka.cli.bench", "how fast a model server is by a fixed recipe, and whether two runs differ"),
    "diagnose": ("laoka.cli.diagnose", "why it is broken: root cause, evidence and the next step, from logs, captures or hosts"),
    "cache": ("laoka.cli.cache", "what the prefix cache saves, what it could save, and what to move in the prompts"),
    "model": ("laoka.cli.model", "on the host: list, fetch, verify, switch, roll back and prune model revisions"),
    "watchdog": ("laoka.cli.watchdog", "what the watchdog of a host sees; on the host: whether its alerts arrive, drills"),
    "sandbox": ("laoka.cli.sandbox", "throw-away hosts on this machine with a simulated V100"),
    "completion": ("laoka.cli.completion", "make bash, zsh or fish complete laoka's commands"),
}

EXIT_FINE, EXIT_FINDINGS, EXIT_COULD_NOT_RUN = 0, 1, 2


class CommandsOnDemand(click.Group):
    """A click group that imports a command's module when it is run, not when the group is listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        try:
            module = importlib.import_module(COMMANDS[cmd_name][0])
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("laoka"):
                raise
            raise click.ClickException(
                f"laoka {cmd_name} needs {error.name}, which is not installed: pip install 'laoka[operator]'"
            ) from None
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if COMMANDS:
            with formatter.section("Commands"):
                formatter.write_dl([(name, about) for name, (_, about) in COMMANDS.items()])


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


def main() -> None:
    """Entry point: every expected error ends in one line on stderr and exit status 2."""
    try:
        status = cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_COULD_NOT_RUN)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else EXIT_FINE)
