"""An inventory as every command reads it: keys that nobody reads are told, so that a typo is not taken for "not said"."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from laoka.cli.main import spoken
from laoka.fleet.inventory import HostEntry, InventoryUnread, load_inventory
from laoka.fleet.keys import form_lines, inventory_files, known_keys, unknown_lines
from laoka.fleet.targets import InventoryTarget, target_of


def strict_entries(path: str) -> tuple[HostEntry, ...]:
    """The hosts of an inventory, for a command that computes from what it says.

    Errors: InventoryUnread, also for an unknown key: the deploys refuse it too.
    """
    entries = _well_formed(path)
    lines = unknown(path, entries)
    if lines:
        raise InventoryUnread("\n".join(lines))
    return entries


def entries_of(path: str, load: Callable[[str], tuple[HostEntry, ...]] = load_inventory) -> tuple[HostEntry, ...]:
    """The hosts of an inventory, for a command that looks at them; an unknown key is a line on stderr.

    Arguments: `load` reads the file; a command may have begun it.
    Errors: InventoryUnread, also for a value of a form that its key can't have: it would count as not said.
    """
    entries = _well_formed(path, load)
    for line in unknown(path, entries):
        click.echo(line, err=True)
    return entries


def targets_of_inventory(path: str) -> tuple[InventoryTarget, ...]:
    """The same as targets. Errors: InventoryUnread."""
    return tuple(target_of(entry) for entry in entries_of(path))


def _well_formed(path: str, load: Callable[[str], tuple[HostEntry, ...]] = load_inventory) -> tuple[HostEntry, ...]:
    entries = load(path)
    lines = form_lines(entries, inventory_files(path), spoken())
    if lines:
        raise InventoryUnread("\n".join(lines))
    return entries


def unknown(path: str, entries: Sequence[HostEntry]) -> tuple[str, ...]:
    """A line for each unknown key, in the reader's language."""
    return unknown_lines(entries, known_keys(), inventory_files(path), spoken())
