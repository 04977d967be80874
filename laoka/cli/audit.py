"""`laoka audit`: its options. What it does is read while the inventory is being loaded, which is a program of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from laoka.catalog.messages import Language
from laoka.fleet.inventory import HOSTS_AT_ONCE, HostEntry, load_inventory


@click.command()
@click.argument("inventory", required=False)
@click.option("--lock", "lock_file", metavar="FILE", help="Lock file [stack.lock.toml in this folder, where it has these hosts].")
@click.option("--limit", multiple=True, metavar="PATTERN", help="Only hosts or groups of this name or pattern (repeat).")
@click.option("--captures", type=click.Path(exists=True, file_okay=False), help="Judge captures in this folder, HOST.tar.gz each.")
@click.option(
    "--policy",
    type=click.Path(exists=True, dir_okay=False),
    help="Findings that are accepted: TOML rows [[accept]] with id, host, reason, until.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print a Markdown table and the findings.")
@click.option("--junit", type=click.Path(dir_okay=False), metavar="FILE", help="Write a JUnit file too.")
@click.option("--html", type=click.Path(dir_okay=False), metavar="FILE", help="Write an HTML page too.")
@click.option("--since", metavar="FILE", help="Print only what changed since this file of --save; nothing when nothing did.")
@click.option("--save", metavar="FILE", help="Keep this audit for the next --since.")
@click.option("--history", "history_of", metavar="HOST", help="Who deployed what on this host, and end.")
@click.option("--parallel", type=click.IntRange(1, 500), default=HOSTS_AT_ONCE, show_default=True, help="Hosts read at once.")
@click.option("--deadline", type=click.FloatRange(min=1), metavar="SECONDS", help="Longest that one host may take [24].")
@click.pass_obj
def command(lang: Language, /, inventory: str | None, **options: Any) -> int:
    """Audit every host of an inventory against its lock, and all of them beside each other. Changes nothing.

    \b
    laoka audit inventories/lab.py
    laoka audit inventories/lab.py --since last.json --save last.json   # cron: only the difference
    laoka audit inventories/lab.py --html audit.html --junit audit.xml
    laoka audit inventories/lab.py --history gpu1

    Exit status: 0 as it should be, 1 findings or drift, 2 a host gave no answer or the audit could not run.
    """
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load_inventory, inventory) if inventory else None
        from laoka.cli.audit_run import run_audit  # 0.3 s of imports

        load: Callable[[str], tuple[HostEntry, ...]] = load_inventory if loading is None else lambda path: loading.result()
        return run_audit(lang, load, inventory=inventory, **options)
