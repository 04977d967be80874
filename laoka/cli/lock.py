"""`laoka lock`: write the stack of every host of an inventory to one file, or check whether it is still current."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import click
from packaging.version import Version

from laoka.catalog.engines import Engine, engines
from laoka.catalog.load import CatalogError
from laoka.catalog.messages import Language, text
from laoka.catalog.translations import error_text
from laoka.cli.inventory import strict_entries
from laoka.cli.main import EXIT_COULD_NOT_RUN, EXIT_FINDINGS, EXIT_FINE, in_words
from laoka.fleet.inventory import HostEntry, InventoryUnread
from laoka.fleet.requests import request_of
from laoka.stack.checkpoint import CheckpointError
from laoka.stack.lock import NAME, LockedGroup, LockError, make_lock, moved, read_lock, write_lock
from laoka.stack.request import Request, RequestError
from laoka.stack.resolve import unlisted
from laoka.stack.sums import SumsError, fetch_text, hashes_in, online_hashes, parse_sums


def wanted_engines(requests: Iterable[Request]) -> tuple[tuple[Engine, ...], ...]:
    """Releases whose hash would decide something, newest first, a row for each different wish.

    A wish for one version has that one, listed or not; otherwise every release of the name, or of every engine with a SHA256SUMS.
    """
    rows: dict[tuple[str | None, str | None], tuple[Engine, ...]] = {}
    for request in requests:
        known = [engine for engine in engines() if engine.kind == "vllm" and engine.name == (request.engine or engine.name)]
        known = [engine for engine in known if engine.sums_url is not None]
        if not request.cards and request.engine is None:
            continue
        if request.engine_version is not None:
            exact = [engine for engine in known if engine.version == request.engine_version]
            known = exact or ([unlisted(known, request.engine_version)] if known else [])
        known.sort(key=lambda engine: Version(engine.version), reverse=True)
        rows[request.engine, request.engine_version] = tuple(known)
    return tuple(found for found in rows.values() if found)


def gather_hashes(
    requests: Iterable[Request],
    sums_file: str | None,
    online: bool,
    say: Callable[[str], None],
    fetch: Callable[[str], str] = fetch_text,
) -> dict[str, str]:
    """Hashes from a SHA256SUMS file, from the release pages, or none.

    Errors: SumsError for a file that is none, has none of the wanted wheels, or contradicts the catalogue.
    """
    found: dict[str, str] = {}
    rows = wanted_engines(requests)
    if sums_file is not None:
        try:
            content = Path(sums_file).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise SumsError(f"{sums_file}: {error.strerror}") from None
        wanted = [engine for row in rows for engine in row]
        found |= hashes_in(parse_sums(content, sums_file), wanted, sums_file)
        if not found:
            names = ", ".join(dict.fromkeys(engine.wheel_file or "" for engine in wanted)) or "none is wanted"
            raise SumsError(f"{sums_file}: none of the wheels that could be locked is in it ({names[:200]})")
    if online:
        for row in rows:
            found |= online_hashes(row, fetch, say)
    return found


def requests_of(entries: Iterable[HostEntry], hashes: Mapping[str, str]) -> dict[str, Request]:
    """The request of each host. Errors: RequestError."""
    return {entry.name: request_of(entry.name, entry.data, hashes) for entry in entries}


@click.command("lock")
@click.argument("inventory", metavar="INVENTORY")
@click.option("--output", "output", metavar="FILE", help=f"Lock file [{NAME} in this folder].")
@click.option("--check", "check_only", is_flag=True, help="Write nothing; exit 1 when catalogue or inventory moved on.")
@click.option("--online", is_flag=True, help="Take hashes of releases from their own SHA256SUMS on the release page.")
@click.option(
    "--sha256sums", "sums_file", metavar="FILE", help="Take them from this SHA256SUMS file instead: fetched by any means."
)
@click.option("--dry", is_flag=True, help="Say what would be locked, write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print what was locked, or what moved, as JSON.")
@click.pass_obj
def command(
    lang: Language,
    inventory: str,
    output: str | None,
    check_only: bool,
    online: bool,
    sums_file: str | None,
    dry: bool,
    as_json: bool,
) -> int:
    """Fix the stack of every host of an inventory in stack.lock.toml.

    \b
    laoka lock inventories/lab.py
    laoka lock inventories/lab.py --online      # the newest release whose hash its own page tells
    laoka lock inventories/lab.py --check       # in cron or CI: exit 1 when it is no longer current

    The file is sorted, so that a change reads as a diff. Without --online nothing is fetched: a release is then locked only
    when its hash is in the catalogue, in --sha256sums, or in the lock that is there already.

    Exit status: 0 written or current, 1 a host is refused or something moved on, 2 bad input.
    """
    path = Path(output or NAME)
    try:
        entries = strict_entries(inventory)
        if check_only:
            locked = read_lock(path)
            found = moved(locked, requests_of(entries, locked.hashes))
            return _tell(path, [item.say(lang) for item in found], lang, as_json)
        plain = requests_of(entries, {})
        # A release that was locked once stays locked when the network is away.
        before = read_lock(path).hashes if path.is_file() else {}
        hashes = {**before, **gather_hashes(plain.values(), sums_file, online, lambda line: click.echo(line, err=True))}
        lock, problems = make_lock(requests_of(entries, hashes))
        if lock is None:
            lines = [item.say(lang) for item in problems]
            if as_json:
                click.echo(json.dumps({"problems": lines}, ensure_ascii=False, indent=2))
            for line in lines:
                click.echo(line, err=True)
            click.echo(
                text("stack.lock_nothing_written", lang, count=len({line.split(":")[0].split("：")[0] for line in lines})), err=True
            )
            return EXIT_FINDINGS
        if not dry:
            write_lock(path, lock)
    except (RequestError, CheckpointError, CatalogError, InventoryUnread, SumsError, LockError) as error:
        click.echo(f"laoka lock: {in_words(error)}", err=True)
        return EXIT_COULD_NOT_RUN
    except OSError as error:
        click.echo(f"laoka lock: {path}: {error_text(error.strerror or '', lang)}", err=True)
        return EXIT_COULD_NOT_RUN
    if as_json:
        told = {
            "path": str(path),
            "catalogue": lock.catalogue,
            "inventory": lock.inventory,
            "groups": [_summary(group) for group in lock.groups],
        }
        click.echo(json.dumps(told, ensure_ascii=False, indent=2))
    else:
        for group in lock.groups:
            driver = f", driver {group.stack['driver_version']}" if "driver_version" in group.stack else ""
            click.echo(f"{group.id}: {group.stack['engine']}=={group.stack['engine_version']}{driver}: {', '.join(group.hosts)}")
    where = f"{path} (--dry)" if dry else str(path)
    click.echo(
        text("stack.lock_written", lang, path=where, groups=len(lock.groups), hosts=len(entries), catalogue=lock.catalogue[:19]),
        err=True,
    )
    return EXIT_FINE


def _summary(group: LockedGroup) -> dict[str, object]:
    pin = f"{group.stack['engine']}=={group.stack['engine_version']}"
    return {"id": group.id, "hosts": list(group.hosts), "engine": pin, "driver": group.stack.get("driver_version")}


def _tell(path: Path, lines: list[str], lang: Language, as_json: bool) -> int:
    if as_json:
        click.echo(json.dumps({"path": str(path), "current": not lines, "moved": lines}, ensure_ascii=False, indent=2))
    else:
        for line in lines or [text("stack.lock_current", lang, path=path)]:
            click.echo(line)
    return EXIT_FINDINGS if lines else EXIT_FINE
