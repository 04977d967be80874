"""`laoka init`: the first inventory, written from what the hosts themselves say."""

from __future__ import annotations

import datetime
from pathlib import Path

import click

from laoka.catalog.messages import Language, text
from laoka.cli.check import capture_file, ssh_target
from laoka.cli.main import EXIT_COULD_NOT_RUN, EXIT_FINE, in_words
from laoka.files import write_atomic
from laoka.fleet.new_inventory import NewHost, inventory_text, named_like, names_of, notes_of
from laoka.host import collect
from laoka.host.collect import CouldNotCollect

DEFAULT_FILE = "inventories/lab.py"


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="[USER@]HOST[:PORT]|CAPTURE...")
@click.option("-o", "--output", default=DEFAULT_FILE, show_default=True, type=click.Path(dir_okay=False), help="File to write.")
@click.option("-i", "key_file", type=click.Path(exists=True, dir_okay=False), help="SSH key file, written into the inventory too.")
@click.pass_obj
def command(lang: Language, targets: tuple[str, ...], output: str, key_file: str | None) -> int:
    """Read hosts over SSH, changing nothing on them, or captures of them, and write an inventory with their cards and systems.

    An inventory that exists is never overwritten. Try it: laoka init ops@192.168.7.21 ops@192.168.7.22
    """
    file = Path(output)
    if file.exists():
        raise click.ClickException(text("init.exists", lang, file=file))
    found: list[NewHost] = []
    failed = False
    for source in [capture_file(words) or ssh_target(words, key_file, None) for words in targets]:
        click.echo(text("init.reading", lang, host=source if isinstance(source, Path) else source.name), err=True)
        try:
            if isinstance(source, Path):
                found.append(NewHost(None, collect.from_file(source), named_like(source.name)))
            else:
                found.append(NewHost(source, collect.from_ssh(source)))
        except CouldNotCollect as error:
            click.echo(f"laoka init: {in_words(error)}", err=True)
            failed = True
    if failed:
        click.echo(text("init.not_written", lang), err=True)
        return EXIT_COULD_NOT_RUN
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, inventory_text(found, output, datetime.date.today().isoformat()))
    except OSError as error:
        raise click.ClickException(f"{error.filename or output}: {error.strerror}") from None
    for name, host in zip(names_of(found), found, strict=True):
        for note in notes_of(host):
            click.echo(text(f"init.{note}", lang, host=name), err=True)
    click.echo(text("init.written", lang, file=output, count=len(found)), err=True)
    return EXIT_FINE
