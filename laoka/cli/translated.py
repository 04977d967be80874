"""A command with its help in Chinese: a copy, so that the next one who asks gets it in the language of theirs."""

from __future__ import annotations

import copy

import click

from laoka.catalog.translations import chinese


def translated(command: click.Command) -> click.Command:
    """The command, its options and the commands below it, told in Chinese; what has no Chinese text stays as it is."""
    told = copy.copy(command)
    told.help, told.short_help = _told(command.help), _told(command.short_help)
    told.params = []
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            parameter = copy.copy(parameter)
            parameter.help = _told(parameter.help)
        told.params.append(parameter)
    if isinstance(command, click.Group) and isinstance(told, click.Group):
        told.commands = {name: translated(below) for name, below in command.commands.items()}
    return told


def _told(text: str | None) -> str | None:
    return chinese("help", text) if text else text
