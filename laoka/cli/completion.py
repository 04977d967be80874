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

    bash: laoka completion bash > /etc/bash_completion.d/laoka. zsh: into a file _laoka of $fpath. fish: into
    ~/.config/fish/completions/laoka.fish.
    """
    made = get_completion_class(shell)
    assert made is not None, "click has these three"
    click.echo(made(cli, {}, "laoka", "_LAOKA_COMPLETE").source())
    return EXIT_FINE
