"""What `laoka audit` does: every host of an inventory read, held against its lock and beside each other, and told."""

from __future__ import annotations

import fnmatch
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from laoka.catalog.messages import Language, text
from laoka.catalog.translations import error_text
from laoka.checks.policy import Accepted, PolicyError, parse_policy
from laoka.checks.result import as_html, as_junit
from laoka.cli.check import LOCAL, STYLES, ssh_target
from laoka.cli.inventory import entries_of
from laoka.cli.main import EXIT_COULD_NOT_RUN, EXIT_FINDINGS, EXIT_FINE, said
from laoka.files import write_atomic
from laoka.fleet.across import IDS
from laoka.fleet.audit import (
    Audit,
    AuditedHost,
    AuditTarget,
    NotAnAudit,
    audit,
    changes,
    document,
)
from laoka.fleet.expected import expected_of
from laoka.fleet.inventory import HostEntry, InventoryUnread
from laoka.fleet.judge import rule_ids
from laoka.fleet.show import (
    SIGNS,
    as_results,
    change_lines,
    grouped,
    headings,
    history_lines,
    markdown,
    overview,
    rows,
    summary,
)
from laoka.fleet.targets import target_of
from laoka.host import collect
from laoka.host.bundle import CAPTURE_SUFFIXES
from laoka.host.collect import CouldNotCollect
from laoka.host.report import HostReport
from laoka.host.unread import Unread
from laoka.stack.lock import NAME, Lock, LockError, read_lock

HOST_WIDTH = 18


def lock_for(entries: Sequence[HostEntry], named: str | None) -> tuple[Lock | None, str | None]:
    """The lock of an inventory and its file: the one that is named, or stack.lock.toml of this folder if it has any of its hosts.

    Errors: LockError for one that was named and can't be read.
    """
    named = named or next((str(entry.data["lock_file"]) for entry in entries if entry.data.get("lock_file")), None)
    path = Path(named).expanduser() if named else Path(NAME)
    if not named and not path.is_file():
        return None, None
    lock = read_lock(path)
    known = {host for group in lock.groups for host in group.hosts}
    if not named and not known.intersection(entry.name for entry in entries):
        return None, None
    return lock, str(path)


def stack_of(lock: Lock | None, host: str) -> Mapping[str, Any] | None:
    """The stack of a host, None when there is no lock or the lock lacks it."""
    return next((group.stack for group in (lock.groups if lock else ()) if host in group.hosts), None)


def capture_of(folder: Path, host: str) -> HostReport:
    """The report of a host out of a folder of captures, each named like its host. Errors: CouldNotCollect."""
    for suffix in CAPTURE_SUFFIXES:
        path = folder / f"{host}{suffix}"
        if path.is_file():
            return collect.from_file(path)
    raise CouldNotCollect(f"no {host}.tar.gz in {folder}")


def targets_of(
    entries: Sequence[HostEntry], lock: Lock | None, captures: str | None, deadline_s: float | None
) -> tuple[AuditTarget, ...]:
    """The hosts of an inventory with what they should be."""
    found = []
    for entry in entries:
        expected = expected_of(entry.name, entry.data, stack_of(lock, entry.name), has_lock=lock is not None)
        read = partial(capture_of, Path(captures), entry.name) if captures else partial(target_of(entry).read, deadline_s)
        supply = entry.data.get("psu_model")
        found.append(AuditTarget(entry.name, read, expected, str(supply) if supply else None))
    return tuple(found)


def exit_status(result: Audit) -> int:
    """2 when a host gave no answer, 1 when there is something to look at, else 0."""
    if result.could_not_read:
        return EXIT_COULD_NOT_RUN
    return EXIT_FINE if result.verdict in ("ok", "info") else EXIT_FINDINGS


def read_earlier(path: str) -> dict[str, Any] | None:
    """An audit that --save kept; None when there is none yet. Errors: NotAnAudit."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise NotAnAudit(f"{path}: {getattr(error, 'strerror', None) or 'not JSON'}") from None
    if not isinstance(found, dict):
        raise NotAnAudit(f"{path}: not what `laoka audit --save` writes")
    return found


def show(result: Audit, lang: Language) -> None:
    """Print the table, what shows across hosts, and every finding once with its hosts."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    heads = headings(lang)
    listed = rows(result, lang)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", expand=True)
    table.add_column(heads[0], no_wrap=True, width=min(HOST_WIDTH, max(cell_len(row.host) for row in listed)), overflow="ellipsis")
    for number, head in enumerate(heads[1:-1]):
        table.add_column(head, no_wrap=True, width=max(cell_len(head), *(cell_len(row.cells[number][0]) for row in listed)))
    table.add_column(heads[-1], no_wrap=True, overflow="ellipsis", ratio=1)
    for row in listed:
        style = STYLES[row.verdict]
        cells = [Text(cell, style=STYLES.get(severity or "", "dim")) for cell, severity in row.cells]
        table.add_row(Text(row.host, style=style), *cells, Text(row.worst, style="" if row.verdict == "ok" else style))
    console.print(table)
    for group in grouped(result, lang):
        finding = group.finding
        told = Text.assemble((f"{SIGNS[finding.severity]} ", STYLES[finding.severity]), (finding.title(lang), "bold"))
        told.append(f"  {finding.id}", style="dim")
        console.print(Padding(told, (1, 0, 0, 0)))
        if group.hosts:
            console.print(Padding(Text(", ".join(group.hosts)), (0, 0, 0, 2)))
        for line in finding.evidence[:3]:
            console.print(Padding(Text(line, style="dim"), (0, 0, 0, 4)))
        if finding.next(lang):
            console.print(Padding(Text(f"→ {finding.next(lang)}"), (0, 0, 0, 2)))
    console.print(Padding(Text(summary(result, lang), style="bold"), (1, 0, 0, 0)))
    if any(host.seen and host.seen.simulated for host in result.hosts):
        console.print(Text(text("audit.simulated", lang), style="yellow"))


def history(host: str, inventory: str | None, load: Callable[[str], tuple[HostEntry, ...]], lang: Language, as_json: bool) -> int:
    """Print who deployed what on one host. Errors: click.ClickException."""
    try:
        if inventory:
            entry = next((entry for entry in entries_of(inventory, load) if entry.name == host), None)
            if entry is None:
                raise click.BadParameter(said("history_none", host=host, inventory=inventory))
            report = target_of(entry).read()
        else:
            report = collect.from_this_machine() if host == LOCAL else collect.from_ssh(ssh_target(host, None, None))
    except (InventoryUnread, CouldNotCollect) as error:
        raise click.ClickException(str(error)) from None
    deploys = () if isinstance(report.deployed, Unread) else report.deployed.deploys
    if as_json:
        click.echo(json.dumps([vars(deploy) for deploy in deploys], ensure_ascii=False, indent=2))
    else:
        for line in history_lines(deploys, lang) or (text("audit.no_history", lang, host=host),):
            click.echo(line)
    return EXIT_FINE


def tell_changes(old: Mapping[str, Any], new: Mapping[str, Any], since: str, lang: Language, as_json: bool) -> None:
    """Print what changed: nothing on stdout when nothing did, so that cron stays silent. Errors: NotAnAudit."""
    found = changes(old, new)
    if as_json:
        click.echo(json.dumps({"changes": [vars(change) for change in found]}, ensure_ascii=False, indent=2))
        return
    for line in change_lines(found, lang):
        click.echo(line)
    if not found and sys.stderr.isatty():
        click.echo(text("audit.nothing_changed", lang, file=since), err=True)


def run_audit(
    lang: Language,
    load: Callable[[str], tuple[HostEntry, ...]],
    *,
    inventory: str | None,
    lock_file: str | None,
    limit: tuple[str, ...],
    captures: str | None,
    policy: str | None,
    as_json: bool,
    as_markdown: bool,
    junit: str | None,
    html: str | None,
    since: str | None,
    save: str | None,
    history_of: str | None,
    parallel: int,
    deadline: float | None,
) -> int:
    """Read, judge, print and write what the options ask for; the exit status. Arguments: `load` reads the inventory.

    Errors: click.ClickException with one line.
    """
    if history_of:
        return history(history_of, inventory, load, lang, as_json)
    if not inventory:
        raise click.UsageError(said("name_inventory"))
    try:
        accepted = _policy(policy)
        earlier = read_earlier(since) if since else None
        entries = [entry for entry in entries_of(inventory, load) if not limit or _named(entry, limit)]
        if not entries:
            raise click.BadParameter(said("limit_none", word=", ".join(limit), inventory=inventory))
        lock, lock_path = lock_for(entries, lock_file)
        targets = targets_of(entries, lock, captures, deadline)
    except (InventoryUnread, LockError, PolicyError, NotAnAudit) as error:
        raise click.ClickException(str(error)) from None
    if lock is None:
        click.echo(f"laoka audit: {text('audit.no_lock', lang, inventory=inventory)}", err=True)
    progress = sys.stderr.isatty() and len(targets) > 1
    result = audit(targets, policy=accepted, at_once=parallel, on_done=_progress(len(targets)) if progress else lambda host: None)
    for host in result.could_not_read:
        click.echo(f"laoka audit: {host.host}: {error_text(host.error or '', lang)}", err=True)
    told = document(result, lang, at_unix_s=time.time(), inventory=inventory, lock=lock_path)
    try:
        if since and earlier is not None:
            tell_changes(earlier, told, since, lang, as_json)
        elif as_json:
            click.echo(json.dumps(told, ensure_ascii=False, indent=2))
        elif as_markdown:
            click.echo(markdown(result, lang), nl=False)
        else:
            show(result, lang)
        if junit:
            write_atomic(junit, as_junit(as_results(result), lang, "laoka audit"))
        if html:
            write_atomic(html, as_html(as_results(result), lang, "laoka audit", overview(result, lang)))
        if save:
            write_atomic(save, json.dumps(told, ensure_ascii=False) + "\n", 0o600)
    except NotAnAudit as error:
        raise click.ClickException(f"{since}: {error}") from None
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from None
    except ModuleNotFoundError as error:
        raise click.ClickException(said("output_needs", package=error.name)) from None
    return exit_status(result)


def _policy(path: str | None) -> tuple[Accepted, ...]:
    return parse_policy(Path(path).read_text(encoding="utf-8"), path, (*rule_ids(), *IDS)) if path else ()


def _named(entry: HostEntry, patterns: Sequence[str]) -> bool:
    return any(pattern in entry.groups or fnmatch.fnmatchcase(entry.name, pattern) for pattern in patterns)


def _progress(count: int) -> Any:
    done = 0

    def tell(host: AuditedHost) -> None:
        nonlocal done
        done += 1
        click.echo(f"{done}/{count} {host.host}: {host.error or host.verdict}", err=True)

    return tell
