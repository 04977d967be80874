"""`laoka model`: on the host, list, fetch, verify, switch, roll back and prune model revisions."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from laoka.catalog.engines import Engine, engines
from laoka.catalog.messages import Language, text
from laoka.catalog.models import models
from laoka.cli.main import EXIT_FINDINGS, EXIT_FINE, in_words
from laoka.files import write_atomic
from laoka.process import run
from laoka.serving import model_store
from laoka.serving.download import Stopped
from laoka.serving.manifest import MANIFEST, SHA256, ModelError, make_manifest
from laoka.serving.model_inspect import Inspected, inspect
from laoka.serving.model_names import known_as, wish_of
from laoka.serving.model_source import Listing, Source, listing_of_folder
from laoka.serving.model_store import CURRENT, PARALLEL, PREVIOUS, STORE, Revision
from laoka.serving.switch import UNIT, SwitchError, switch, target_of
from laoka.stack import servable

GB = 1e9
LINE_S = 5.0
KEEP = 2


@dataclass(frozen=True)
class Here:
    """The store that a command works on, and the language that it speaks."""

    store: Path
    lang: Language

    def say(self, key: str, **values: object) -> str:
        """A message of the catalogue."""
        return text(f"model.{key}", self.lang, **values)

    def note(self, key: str, **values: object) -> None:
        """The same, to stderr."""
        click.echo(self.say(key, **values), err=True)


class Told(click.Group):
    """A group whose expected errors end in one line on stderr and exit status 2."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (ModelError, SwitchError) as error:
            raise click.ClickException(str(error)) from None
        except Stopped:
            raise click.Abort from None
        except OSError as error:
            raise click.ClickException(f"{error.filename or ''}: {error.strerror or error}") from None


@click.group(cls=Told)
@click.option(
    "--store", type=click.Path(path_type=Path, file_okay=False), default=STORE, show_default=True, help="Where the models lie."
)
@click.pass_context
def command(ctx: click.Context, store: Path) -> None:
    """Model revisions of this host: fetched by hash, switched in one step, with a way back.

    \b
    laoka model fetch qwen3.8-27b-quasar-nvfp4 --from hf-mirror --from modelscope
    laoka model use QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4
    laoka model verify --repair

    A source is hf, hf-mirror, modelscope (each also as hf:ORG/NAME@COMMIT), hf+https://HUB, http(s)://FOLDER, ssh://HOST/FOLDER,
    rsync://HOST/MODULE/FOLDER or /FOLDER. Proxies are taken from https_proxy and no_proxy, another hub from HF_ENDPOINT.
    """
    ctx.obj = Here(store.absolute(), ctx.obj or "en")


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="A JSON list instead of a table.")
@click.pass_obj
def list_command(here: Here, as_json: bool) -> None:
    """What is on this host, and what of it is in use."""
    everything = model_store.revisions(here.store)
    if as_json:
        click.echo(json.dumps([_row(item) for item in everything], indent=2))
        return
    if not everything:
        here.note("list_none", store=here.store)
        return
    heads = [here.say(f"list_head_{name}") for name in ("model", "revision", "size", "fetched", "use")]
    rows = [heads]
    for item in everything:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(item.fetched_unix_s or 0))
        use = ", ".join(item.used_as) if item.whole else here.say("list_partial")
        rows.append([item.model_id, item.revision[:12], f"{item.size_bytes / GB:.2f} GB", when, use])
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(item: Revision) -> dict[str, Any]:
    return {
        "model": item.model_id,
        "revision": item.revision,
        "folder": str(item.folder),
        "size_bytes": item.size_bytes,
        "whole": item.whole,
        "used_as": list(item.used_as),
        "fetched_unix_s": item.fetched_unix_s,
        "sources": list(item.sources),
    }


def _pins(words: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for word in words:
        path, _, sha256 = word.rpartition("=")
        if not path or not SHA256.fullmatch(sha256):
            raise ModelError(f"--pin {word!r}: write PATH=SHA256, 64 hexadecimal digits in lower case")
        found[path] = sha256
    return found


def _progress(here: Here) -> Callable[[int, int], None]:
    """Progress on stderr: one line that changes at a terminal, else a line every few seconds."""
    started = shown = time.monotonic()
    first: int | None = None
    terminal = sys.stderr.isatty()

    def show(done: int, total: int) -> None:
        nonlocal shown, first
        now = time.monotonic()
        first = done if first is None else first
        last = done >= total
        if now - shown < (0.4 if terminal else LINE_S) and not (last and terminal):
            return
        shown = now
        rate = (done - first) / max(now - started, 0.001) / 1e6
        values = {"percent": 100 * done / max(total, 1), "done_gb": done / GB, "total_gb": total / GB, "rate_mb": rate}
        line = here.say("progress", **values)
        click.echo(f"\r{line}  " if terminal else line, err=True, nl=not terminal or last)

    return show


def _line(line: str) -> None:
    click.echo(line, err=True)


@command.command("fetch")
@click.argument("model", metavar="MODEL")
@click.option("--revision", help="Commit, or the SHA-256 of a manifest [the catalogue's].")
@click.option("--from", "sources", multiple=True, metavar="SOURCE", help="Where to look; several are tried in order [hf].")
@click.option("--pin", "pins", multiple=True, metavar="PATH=SHA256", help="A hash that a file must have whatever the source says.")
@click.option("--engine", metavar="NAME==VERSION", help="Refuse, before a weight is fetched, what this engine can't serve.")
@click.option("--sm", type=click.IntRange(50, 200), help="Compute capability of the card that it is for: 70 for a V100.")
@click.option("--parallel", type=click.IntRange(1, 32), default=PARALLEL, show_default=True, help="Files at once.")
@click.option("--dry", is_flag=True, help="Say what would be fetched, fetch nothing (the listing is asked for).")
@click.pass_obj
def fetch_command(
    here: Here,
    model: str,
    revision: str | None,
    sources: tuple[str, ...],
    pins: tuple[str, ...],
    engine: str | None,
    sm: int | None,
    parallel: int,
    dry: bool,
) -> None:
    """Fetch one revision; it is there only when every file is whole and right. Prints its folder.

    An interrupted fetch is resumed by calling it again.
    """
    wish = wish_of(model, revision, sources, _pins(pins))
    folder = model_store.folder_of(here.store, wish.model_id) / wish.revision
    if folder.is_dir():
        here.note("fetch_here", model=wish.model_id, revision=wish.revision, folder=folder)
        click.echo(folder)
        return
    if dry:
        listing, source, missing = model_store.look(here.store, wish, _line)
        size = sum(file.size_bytes for file in listing.files)
        if engine is not None:
            _judge(here, wish.model_id, engine, sm)(listing, source)
        values = {"model": wish.model_id, "revision": listing.revision, "files": len(listing.files), "source": source}
        click.echo(here.say("fetch_plan", **values, size_gb=size / GB, missing_gb=missing / GB))
        return
    judge = _judge(here, wish.model_id, engine, sm) if engine is not None else _no_judge
    click.echo(model_store.fetch(here.store, wish, say=_line, progress=_progress(here), parallel=parallel, judge=judge))


def _no_judge(listing: Listing, source: Source) -> None:
    """Every format will do."""


def _engine(words: str) -> Engine:
    """A row of the catalogue by NAME==VERSION; a release that it does not have is taken for the newest one of that name."""
    name, _, version = words.partition("==")
    rows = [row for row in engines() if row.kind == "vllm" and row.name == name]
    if not rows:
        raise ModelError(
            f"--engine {words!r}: known are {', '.join(dict.fromkeys(row.name for row in engines() if row.kind == 'vllm'))}"
        )
    exact = next((row for row in rows if row.version == version), None)
    return exact or (rows[0] if not version else replace(rows[0], version=version))


def _judge(here: Here, model: str, engine: str, sm: int | None) -> Callable[[Listing, Source], None]:
    """What refuses a listing whose format the engine can't serve on this card."""
    row = _engine(engine)

    def judge(listing: Listing, source: Source) -> None:
        found = inspect(model, source, listing, _line)
        for what in found.contradictions:
            here.note("inspect_contradiction", what=what)
        refused = _refusal(here, found, row, sm)
        if refused is not None:
            raise ModelError(refused)

    return judge


def _refusal(here: Here, found: Inspected, engine: Engine, sm: int | None) -> str | None:
    """Why the engine can't serve it, with what it would end with and what to take instead; None when it can."""
    card = sm if engine.device == "cuda" else None
    # An engine goes by the config first; only then it meets the files.
    scheme = found.said.scheme if found.belied else found.scheme
    bad = servable.judge(engine, card, scheme, found.said)
    if bad is None and not found.belied:
        return None
    # Files that are not what their config says are so for every engine: no other one is a way out for them.
    of_files = "" if found.belied else scheme
    names = servable.ways_out(engine, card, of_files, found.model_type, models(), engines(), but=found.name)
    values = {
        "model": found.name, "engine": engine.pin, "on": _on(here, engine, sm), "scheme": scheme,
        "error": here.say("would_end_with", error=bad.error) if bad is not None and bad.error else "",
        "way": here.say("take_instead", names=", ".join(names)) if names else here.say("nothing_instead"),
    }  # fmt: skip
    if bad is None:
        return here.say("belied", what="; ".join(found.belied), **values)
    return here.say("not_servable" if bad.known else "not_known", **values)


def _on(here: Here, engine: Engine, sm: int | None) -> str:
    return here.say("on_sm", sm=f"{sm / 10:.1f}") if sm is not None and engine.device == "cuda" else ""


@command.command("inspect")
@click.argument("model", metavar="MODEL")
@click.option("--revision", help="Commit, branch, or the SHA-256 of a manifest [the catalogue's, or main].")
@click.option("--from", "sources", multiple=True, metavar="SOURCE", help="Where to look [hf, or this host's store if it is there].")
@click.option("--engine", metavar="NAME==VERSION", help="Say whether this engine serves it.")
@click.option("--sm", type=click.IntRange(50, 200), help="Compute capability of the card: 70 for a V100.")
@click.option("--json", "as_json", is_flag=True, help="The findings as JSON.")
@click.pass_obj
def inspect_command(
    here: Here, model: str, revision: str | None, sources: tuple[str, ...], engine: str | None, sm: int | None, as_json: bool
) -> int:
    """Is it really NVFP4? Tells a model's format from its config and from the headers of its files; no weight is fetched.

    MODEL is a name (ORG/NAME), what is in this host's store (current, ORG/NAME@REVISION), or a folder.
    Exit status: 0 it is what it says (and the engine serves it), 1 not.
    """
    name, source, listing = _to_inspect(here, model, revision, sources)
    found = inspect(name, source, listing)
    row = _engine(engine) if engine is not None else None
    refused = _refusal(here, found, row, sm) if row is not None else None
    plain = found.seen.lm_head_is_plain if found.seen is not None else None
    if as_json:
        told = {
            "model": name, "revision": listing.revision, "scheme": found.scheme, "declared": found.said.scheme,
            "headers": dict(found.seen.modules) if found.seen else None, "lm_head_plain": plain,
            "contradictions": list(found.contradictions), "refused": refused,
        }  # fmt: skip
        click.echo(json.dumps(told, indent=2, ensure_ascii=False))
    else:
        click.echo(f"{name}@{listing.revision[:12]}")
        detail = f" ({found.said.detail})" if found.said.detail else ""
        click.echo("  " + here.say("inspect_config", scheme=found.said.scheme, detail=detail))
        head = here.say({True: "head_plain", False: "head_quantised", None: "head_unknown"}[plain])
        click.echo("  " + _headers(here, found, head))
        click.echo("  " + here.say("inspect_is", scheme=found.scheme))
        for what in found.contradictions:
            click.echo("  " + here.say("inspect_contradiction", what=what))
        if row is not None:
            click.echo("  " + (refused or here.say("servable", engine=row.pin, on=_on(here, row, sm))))
    return EXIT_FINDINGS if found.contradictions or refused else EXIT_FINE


def _headers(here: Here, found: Inspected, head: str) -> str:
    if found.seen is not None:
        return here.say("inspect_headers", words=found.seen.words(), head=head)
    if found.other_weights:
        return here.say("inspect_other_weights", name=found.other_weights[0])
    return here.say("inspect_no_headers")


def _to_inspect(here: Here, model: str, revision: str | None, sources: tuple[str, ...]) -> tuple[str, Source, Listing]:
    """(name, source, listing) of a folder, of what is in the store, or of what a source has."""
    folder = Path(model).expanduser()
    if model.startswith(("/", "./", "../", "~")):
        if not folder.is_dir():
            raise ModelError(f"{folder}: no such folder")
        return folder.name, Source("folder", str(folder)), listing_of_folder(folder)
    if not sources and revision is None:
        try:
            item = model_store.find(here.store, model)
        except ModelError:
            pass
        else:
            return item.model_id, Source("folder", str(item.folder)), listing_of_folder(item.folder, item.revision)
    wish = wish_of(model, revision or known_as(model).revision or "main", sources)
    listing, source, _ = model_store.look(here.store, wish, _line)
    return wish.model_id, source, listing


@command.command("verify")
@click.argument("words", metavar="[REVISION]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Every whole revision of the store.")
@click.option("--repair", is_flag=True, help="Fetch the bad files again, and only those.")
@click.option("--from", "sources", multiple=True, metavar="SOURCE", help="Where to repair from [where it was fetched from].")
@click.option("--json", "as_json", is_flag=True, help="The faults as JSON.")
@click.pass_obj
def verify_command(
    here: Here, words: tuple[str, ...], everything: bool, repair: bool, sources: tuple[str, ...], as_json: bool
) -> int:
    """Read every file from the disk and compare its SHA-256. REVISION is current [default], ORG/NAME, or the beginning of one.

    Exit status: 0 all right (or mended), 1 bad files.
    """
    whole = [item for item in model_store.revisions(here.store) if item.whole]
    chosen = whole if everything else [model_store.find(here.store, word) for word in words or (CURRENT,)]
    told: dict[str, dict[str, str]] = {}
    for item in chosen:
        name = f"{item.model_id}@{item.revision}"
        started = time.monotonic()
        faults = model_store.verify(item.folder, _progress(here))
        spent_s = time.monotonic() - started
        values = {"model": item.model_id, "revision": item.revision[:12]}
        if not faults:
            manifest = model_store.read_manifest(item.folder)
            rate = manifest.size_bytes / max(spent_s, 0.001) / 1e6
            size = {"files": len(manifest.files), "size_gb": manifest.size_bytes / GB, "seconds": spent_s, "rate_mb": rate}
            here.note("verify_ok", **values, **size)
        for path, fault in faults.items():
            here.note("verify_bad", **values, path=path, fault=fault)
        if faults and repair:
            written = sources or item.sources
            wish = wish_of(item.model_id, item.revision, written) if written else None
            if wish is None:
                raise ModelError(f"{name}: it is not noted where it came from: say it with --from")
            model_store.repair(here.store, wish, faults, say=_line, progress=_progress(here))
            here.note("verify_repaired", **values, count=len(faults))
            faults = model_store.verify(item.folder)
        elif faults:
            here.note("verify_next", **values, count=len(faults))
        told[name] = faults
    if as_json:
        click.echo(json.dumps(told, indent=2))
    return EXIT_FINDINGS if any(told.values()) else EXIT_FINE


def _confirmed(here: Here, yes: bool) -> bool:
    """Whether to go on. A program that calls this has no terminal: it has to say --yes."""
    if yes:
        return True
    if not sys.stdin.isatty():
        here.note("not_asked")
        return False
    return click.confirm(here.say("ask"), err=True)


def _use(here: Here, chosen: Revision, yes: bool, dry: bool, restart: bool) -> int:
    link = here.store / CURRENT
    old, new = target_of(link), str(chosen.folder)
    values = {"model": chosen.model_id, "revision": chosen.revision[:12]}
    if old == new:
        here.note("use_same", **values)
        return EXIT_FINE
    faults = [path for path in model_store.read_manifest(chosen.folder).files if not (chosen.folder / path.path).is_file()]
    if faults:
        raise ModelError(f"{chosen.folder}/{faults[0].path} is missing: laoka model verify {chosen.revision[:12]} --repair")
    here.note("use_plan", link=link, old=old or "-", new=new)
    if restart and run(["systemctl", "is-active", "-q", UNIT], deadline_s=30).ok:
        here.note("use_restart", unit=UNIT)
    elif not yes:
        yes = True  # nobody is cut off, and the way back is one command
    if dry:
        return EXIT_FINE
    if not _confirmed(here, yes):
        here.note("nothing_changed")
        return EXIT_FINDINGS
    try:
        done = switch(link, new, previous=here.store / PREVIOUS, unit=UNIT if restart else None, say=_line)
    except SwitchError as error:
        click.echo(in_words(error), err=True)
        return EXIT_FINDINGS
    gap_s = done.downtime_s
    downtime = here.say("use_downtime", seconds=gap_s) if gap_s is not None else ""
    click.echo(here.say("use_done", **values, downtime=downtime))
    return EXIT_FINE


@command.command("use")
@click.argument("revision", metavar="REVISION")
@click.option("--restart/--no-restart", default=True, help="Restart qwen-serve if it runs, and wait for an answer [yes].")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry", is_flag=True, help="Say what would be done, change nothing.")
@click.pass_obj
def use_command(here: Here, revision: str, restart: bool, yes: bool, dry: bool) -> int:
    """Serve another revision: ORG/NAME, ORG/NAME@REVISION, or the beginning of a revision.

    The switch is one step. qwen-serve is restarted when it runs; when no completion comes back, the old model is put back and
    served again. Exit status: 0 in use, 1 not (the old one is).
    """
    return _use(here, model_store.find(here.store, revision), yes, dry, restart)


@command.command("rollback")
@click.option("--restart/--no-restart", default=True, help="Restart qwen-serve if it runs, and wait for an answer [yes].")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry", is_flag=True, help="Say what would be done, change nothing.")
@click.pass_obj
def rollback_command(here: Here, restart: bool, yes: bool, dry: bool) -> int:
    """Go back to the model that was in use before the present one. Twice is where you were."""
    if PREVIOUS not in model_store.links(here.store):
        here.note("rollback_none")
        return EXIT_FINDINGS
    return _use(here, model_store.find(here.store, PREVIOUS), yes, dry, restart)


@command.command("prune")
@click.option("--keep", type=click.IntRange(1), default=KEEP, show_default=True, help="Newest revisions of each model that stay.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry", is_flag=True, help="Say what would be removed, remove nothing.")
@click.option("--json", "as_json", is_flag=True, help="What is (or would be) removed as JSON.")
@click.pass_obj
def prune_command(here: Here, keep: int, yes: bool, dry: bool, as_json: bool) -> int:
    """Remove old revisions; never one that is in use or was before the present one."""
    gone = model_store.to_prune(model_store.revisions(here.store), keep)
    if as_json:
        click.echo(json.dumps([_row(item) for item in gone], indent=2))
    if not gone:
        here.note("prune_none", keep=keep)
        return EXIT_FINE
    for item in gone:
        here.note("prune_plan", model=item.model_id, revision=item.revision[:12], size_gb=item.size_bytes / GB)
    if dry:
        return EXIT_FINE
    if not _confirmed(here, yes):
        here.note("nothing_changed")
        return EXIT_FINDINGS
    for item in gone:
        model_store.remove(here.store, item)
    here.note("prune_done", count=len(gone), size_gb=sum(item.size_bytes for item in gone) / GB)
    return EXIT_FINE


@command.command("manifest")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
def manifest_command(folder: Path) -> None:
    """Write manifest.json for a folder of model files, and print the revision to pin.

    A web server in front of that folder, a USB disk, or another host is then a source.
    """
    if not os.access(folder, os.W_OK):
        raise ModelError(f"{folder}: can't be written to")
    if not any(re.search(r"\.(safetensors|bin|gguf)$", path.name) for path in folder.rglob("*")):
        _line(f"{folder}: no weights in it (*.safetensors): is it the right folder?")
    content = make_manifest(folder)
    write_atomic(folder / MANIFEST, content)
    click.echo(hashlib.sha256(content.encode()).hexdigest())
