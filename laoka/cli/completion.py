"""`laoka completion`: the script that makes a shell complete laoka's commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from laoka.cli.main import EXIT_FINE, cli

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> int:
    """Print the completion script of SHELL.

    Write it into a file. bash: ~/.local/share/bash-completion/completions/laoka. zsh: _laoka in a folder of $fpath. fish:
    ~/.config/fish/completions/laoka.fish. Then open a new shell.
    """
    made = get_completion_class(shell)
    assert made is not None, "click has these three"
    click.echo(made(cli, {}, "laoka", "_LAOKA_COMPLETE").source())
    return EXIT_FINE
