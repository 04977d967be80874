"""The model store of a host: revisions that are visible only whole, verified by hash, mended file by file, pruned by policy.

Layout: STORE/<org>--<name>/<revision>/ with manifest.json and the files. Beside the revisions, hidden: `.partial-<revision>` what
an interrupted fetch left, `.about/<revision>.json` where a revision came from. Links in STORE (`current`, `previous`, `drafter`)
point to what is in use.
"""

from __future__ import annotations

import fcntl
import fnmatch
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from laoka.files import write_atomic
from laoka.serving.download import Stopped
from laoka.serving.manifest import (
    MANIFEST,
    Manifest,
    ModelError,
    ModelFile,
    git_blob_of,
    is_pinned,
    manifest_of_commit,
    parse_manifest,
    sha256_of,
)
from laoka.serving.model_source import Listing, RemoteFile, Source, SourceError, fetch_file, listing_of

STORE = Path("/srv/laoka/models")
CURRENT, PREVIOUS = "current", "previous"
PARALLEL = 4
HASH_THREADS = 8
PROGRESS_S = 0.5
LISTING = ".listing.json"
SPARE_BYTES = 256 * 1024**2
"""What a file system keeps free: a host whose disk is full does other things wrong."""

Say = Callable[[str], None]
Progress = Callable[[int, int], None]


def quiet(line: str) -> None:
    """Say nothing."""


def no_progress(done_bytes: int, total_bytes: int) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class Wish:
    """What is to be fetched: `pins` are SHA-256s by path (globs allowed) that files must have whatever a source says."""

    model_id: str
    revision: str
    sources: tuple[Source, ...]
    pins: Mapping[str, str]


def folder_of(store: Path, model_id: str) -> Path:
    """Where a model's revisions lie. Errors: ModelError for a name that is not ORG/NAME."""
    parts = model_id.split("/")
    if len(parts) != 2 or any(not part or part.startswith(".") or "\0" in part for part in parts) or "--" in parts[0]:
        raise ModelError(f"model {model_id!r}: write ORG/NAME, such as QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4")
    return store / model_id.replace("/", "--")


def model_id_of(folder: Path) -> str:
    """The name of the model whose revisions lie in a folder."""
    return folder.name.replace("--", "/", 1)


# ---- fetching -----------------------------------------------------------------------------------------------------------


def fetch(
    store: Path,
    wish: Wish,
    *,
    say: Say = quiet,
    progress: Progress = no_progress,
    parallel: int = PARALLEL,
    judge: Callable[[Listing, Source], None] = lambda listing, source: None,
) -> Path:
    """Fetch one revision and return its folder; what is whole already is not fetched again.

    Arguments: `progress` is told bytes there and bytes in all, twice a second; `judge` may refuse (ModelError) what the listing
    shows before a weight is fetched. Files arrive in `.partial-<revision>`, are resumed after an interruption, and the folder
    gets its name only when every hash is right.
    Errors: ModelError, with nothing visible under the revision's name.
    """
    model_folder = folder_of(store, wish.model_id)
    target = model_folder / wish.revision
    if is_pinned(wish.revision) and target.is_dir():
        return target
    if not wish.sources:
        raise ModelError(f"{wish.model_id}: no source is named: --from hf, hf-mirror, modelscope, http(s)://…, ssh://… or /PATH")
    with _locked(model_folder):
        listing, first = _agree(wish, model_folder, say)
        target = model_folder / listing.revision
        if target.is_dir():
            return target
        judge(listing, first)
        partial = model_folder / f".partial-{listing.revision}"
        _make_room(model_folder, listing.files, partial)
        partial.mkdir(exist_ok=True)
        write_atomic(partial / LISTING, _listing_text(listing))
        order = (first, *(source for source in wish.sources if source != first))
        _fetch_all(order, listing, partial, parallel, say, progress)
        manifest = _manifest_of(wish.model_id, listing, partial)
        write_atomic(partial / MANIFEST, manifest.text)
        (partial / LISTING).unlink()
        for path in [*partial.rglob("*"), partial]:
            _sync(path)
        _note(model_folder, listing.revision, wish.sources, time.time())
        partial.rename(target)
        _sync(model_folder)
    say(f"{target}: {len(manifest.files)} files, {manifest.size_bytes} bytes, every SHA-256 right")
    return target


def look(store: Path, wish: Wish, say: Say = quiet) -> tuple[Listing, Source, int]:
    """What a fetch would bring: the listing, its source, and how many bytes are not there yet. Nothing is written.

    Errors: ModelError.
    """
    model_folder = folder_of(store, wish.model_id)
    listing, source = _agree(wish, model_folder, say)
    if (model_folder / listing.revision).is_dir():
        return listing, source, 0
    partial = model_folder / f".partial-{listing.revision}"
    return listing, source, sum(max(0, file.size_bytes - _size(partial / file.path)) for file in listing.files)


def _agree(wish: Wish, model_folder: Path, say: Say) -> tuple[Listing, Source]:
    """The listing to go by and the source that it is of. Errors: ModelError with what each source said."""
    partial = model_folder / f".partial-{wish.revision}"
    why = []
    for source in wish.sources:
        try:
            listing = _pinned(listing_of(source, wish.revision, say), wish, source)
        except ModelError as error:
            why.append(str(error))
            say(str(error))
            continue
        return listing, source
    known = _kept_listing(partial / LISTING, wish)
    if known is not None:
        say(f"no source lists {wish.revision[:12]} now: going on with the listing of the interrupted fetch")
        return known, wish.sources[0]
    raise ModelError("; ".join(why))


def _pinned(listing: Listing, wish: Wish, source: Source) -> Listing:
    """The listing under the pinned revision's name, its files with the pinned hashes. Errors: ModelError when they contradict."""
    pinned: dict[str, str] = {}
    for pattern, sha256 in wish.pins.items():
        paths = [file.path for file in listing.files if fnmatch.fnmatchcase(file.path, pattern)]
        if not paths:
            raise ModelError(f"{source}: {pattern} is pinned by its SHA-256, but not there")
        pinned |= dict.fromkeys(paths, sha256)
    for file in listing.files:
        if file.sha256 is not None and pinned.get(file.path, file.sha256) != file.sha256:
            raise ModelError(f"{source}: {file.path} has SHA-256 {file.sha256}, not the pinned {pinned[file.path]}")
    renamed = is_pinned(wish.revision) and listing.revision != wish.revision
    if renamed and not wish.pins:
        raise ModelError(
            f"{source} is not revision {wish.revision[:12]}, and nothing pins its files: fetch it under its own revision, "
            "or name the SHA-256 of its weights (--pin PATH=SHA256)"
        )
    files = tuple(
        RemoteFile(file.path, file.size_bytes, pinned.get(file.path, file.sha256), file.git_blob) for file in listing.files
    )
    return Listing(wish.revision if renamed else listing.revision, files, None if renamed else listing.manifest)


def _fetch_all(sources: Sequence[Source], listing: Listing, partial: Path, parallel: int, say: Say, progress: Progress) -> None:
    """Every file of a listing, whole and right, in `partial`. Errors: ModelError."""
    total = sum(file.size_bytes for file in listing.files)
    stop = threading.Event()
    # Largest first: the last minutes are then not spent on one big file alone.
    queue = sorted(listing.files, key=lambda file: -file.size_bytes)
    with ThreadPoolExecutor(max_workers=max(1, parallel), thread_name_prefix="fetch") as pool:
        pending: set[Future[None]] = {
            pool.submit(_fetch_one, sources, file, listing.revision, partial / file.path, stop, say) for file in queue
        }
        try:
            while pending:
                done, pending = wait(pending, timeout=PROGRESS_S, return_when=FIRST_COMPLETED)
                progress(sum(min(file.size_bytes, _size(partial / file.path)) for file in listing.files), total)
                for future in done:
                    future.result()
        except BaseException:
            stop.set()
            for future in pending:
                future.cancel()
            raise


def _fetch_one(sources: Sequence[Source], file: RemoteFile, revision: str, path: Path, stop: threading.Event, say: Say) -> None:
    """One file from the first source that gives it right; a second time from its beginning when what came was wrong."""
    why = []
    for source in sources:
        for again in (False, True):
            if stop.is_set():
                raise Stopped
            try:
                fetch_file(source, file, revision, path, stop=stop, say=say)
            except SourceError as error:
                why.append(str(error))
                break
            except OSError as error:
                raise ModelError(f"{path}: {error.strerror}") from None
            fault = _fault(path, file)
            if fault is None:
                return
            # Whole but wrong: resuming can't mend it.
            path.unlink(missing_ok=True)
            if again:
                why.append(f"{source}: {file.path}: {fault}")
            else:
                say(f"{file.path}: {fault}: fetching it anew")
    raise ModelError(f"{'; '.join(why)}; run again to resume")


def _fault(path: Path, file: RemoteFile | ModelFile, *, from_disk: bool = False) -> str | None:
    """What is wrong with a file, or None."""
    try:
        size = path.stat().st_size
        if size != file.size_bytes:
            return f"{size} bytes, not {file.size_bytes}"
        blob = file.git_blob if isinstance(file, RemoteFile) else None
        if blob is not None and (seen := git_blob_of(path)) != blob:
            return f"git's id {seen}, not {blob}"
        if file.sha256 is not None and (seen := sha256_of(path, from_disk=from_disk)) != file.sha256:
            return f"SHA-256 {seen}, not {file.sha256}"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"can't be read: {error.strerror}"
    return None


def _manifest_of(model_id: str, listing: Listing, folder: Path) -> Manifest:
    if listing.manifest is not None:
        return listing.manifest
    files = [ModelFile(file.path, file.size_bytes, file.sha256 or sha256_of(folder / file.path)) for file in listing.files]
    return manifest_of_commit(model_id, listing.revision, files)


def _make_room(model_folder: Path, files: Sequence[RemoteFile], partial: Path) -> None:
    needed = sum(max(0, file.size_bytes - _size(partial / file.path)) for file in files) + SPARE_BYTES
    free = shutil.disk_usage(model_folder).free
    if free < needed:
        raise ModelError(
            f"{model_folder} has {free / 1e9:.2f} GB free, this revision needs {needed / 1e9:.2f} GB "
            f"({SPARE_BYTES / 1e9:.2f} GB of it stay free): free some space (laoka model prune)"
        )


def _listing_text(listing: Listing) -> str:
    files = [vars(file) for file in listing.files]
    manifest = listing.manifest.text if listing.manifest else None
    return json.dumps({"revision": listing.revision, "files": files, "manifest": manifest})


def _kept_listing(path: Path, wish: Wish) -> Listing | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        files = tuple(RemoteFile(**item) for item in content["files"])
        manifest = parse_manifest(content["manifest"], wish.revision) if content["manifest"] else None
    except (OSError, ValueError, KeyError, TypeError, ModelError):
        return None
    return Listing(content["revision"], files, manifest) if content["revision"] == wish.revision else None


# ---- verifying and mending ----------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a revision's folder. Errors: ModelError when it is missing, damaged or another revision's."""
    path = folder / MANIFEST
    try:
        return parse_manifest(path.read_text(encoding="utf-8"), folder.name)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: no manifest: {getattr(error, 'strerror', None) or 'not text'}") from None
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def verify(folder: Path, progress: Progress = no_progress) -> dict[str, str]:
    """Check every file of a revision against its manifest, several at once, as the disk has them. Returns faults by path."""
    try:
        manifest = read_manifest(folder)
    except ModelError as error:
        return {MANIFEST: str(error)}
    found: dict[str, str] = {}
    done_bytes = 0
    threads = min(HASH_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="verify") as pool:
        # Largest first, as with fetching.
        files = sorted(manifest.files, key=lambda file: -file.size_bytes)
        for file, fault in zip(files, pool.map(lambda item: _fault(folder / item.path, item, from_disk=True), files), strict=True):
            done_bytes += file.size_bytes
            progress(done_bytes, manifest.size_bytes)
            if fault is not None:
                found[file.path] = fault
    return dict(sorted(found.items()))


def repair(
    store: Path,
    wish: Wish,
    faults: Mapping[str, str],
    *,
    say: Say = quiet,
    progress: Progress = no_progress,
    parallel: int = PARALLEL,
) -> None:
    """Fetch only the bad files of a revision again, each put in its place by rename.

    A server that has the old file open keeps it until it is restarted. Errors: ModelError; files that were mended stay mended.
    """
    model_folder = folder_of(store, wish.model_id)
    target = model_folder / wish.revision
    with _locked(model_folder):
        if MANIFEST in faults:
            listing, first = _agree(wish, model_folder, say)
            sources = (first, *(source for source in wish.sources if source != first))
            # Without a manifest nothing is known of the files: those that are not as listed are bad.
            bad = [file for file in listing.files if _fault(target / file.path, file) is not None]
        else:
            manifest = read_manifest(target)
            listing = Listing(
                wish.revision,
                tuple(RemoteFile(file.path, file.size_bytes, file.sha256) for file in manifest.files),
                manifest,
            )
            sources = wish.sources
            bad = [file for file in listing.files if file.path in faults]
        work = model_folder / f".repair-{wish.revision}"
        _make_room(model_folder, bad, work)
        _fetch_all(sources, Listing(wish.revision, tuple(bad)), work, parallel, say, progress)
        for file in bad:
            _sync(work / file.path)
            (target / file.path).parent.mkdir(parents=True, exist_ok=True)
            (work / file.path).replace(target / file.path)
            say(f"{file.path}: fetched again, {file.size_bytes} bytes, its hash is right")
        if MANIFEST in faults:
            write_atomic(target / MANIFEST, _manifest_of(wish.model_id, listing, target).text)
            say(f"{MANIFEST}: written again")
        shutil.rmtree(work, ignore_errors=True)
        _sync(target)


# ---- what is there, what is in use --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Revision:
    """One revision on the disk. `used_as` are the links that point to it; `whole` False for what an interrupted fetch left."""

    model_id: str
    revision: str
    folder: Path
    size_bytes: int
    whole: bool
    used_as: tuple[str, ...]
    fetched_unix_s: float | None
    sources: tuple[str, ...]


def links(store: Path) -> dict[str, Path]:
    """Where the store's links point, by name."""
    if not store.is_dir():
        return {}
    return {path.name: Path(os.path.realpath(path)) for path in sorted(store.iterdir()) if path.is_symlink()}


def revisions(store: Path) -> tuple[Revision, ...]:
    """Everything in the store, by model and then newest first."""
    found = []
    used = links(store)
    for model_folder in sorted(path for path in store.glob("*--*") if path.is_dir() and not path.is_symlink()):
        for folder in model_folder.iterdir():
            partial = folder.name.startswith(".partial-")
            name = folder.name.removeprefix(".partial-")
            if not folder.is_dir() or not is_pinned(name):
                continue
            about = _about(model_folder, name)
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            fetched = about.get("fetched_unix_s")
            at = float(fetched) if isinstance(fetched, (int, float)) else folder.stat().st_mtime
            sources = about.get("sources")
            as_what = tuple(link for link, place in used.items() if place == folder.resolve())
            kept = tuple(map(str, sources)) if isinstance(sources, list) else ()
            found.append(Revision(model_id_of(model_folder), name, folder, size, not partial, as_what, at, kept))
    return tuple(sorted(found, key=lambda item: (item.model_id, -(item.fetched_unix_s or 0))))


def find(store: Path, words: str) -> Revision:
    """The one whole revision that is meant by "current", "ORG/NAME", "ORG/NAME@REVISION" or the beginning of a revision.

    Errors: ModelError when none or several are.
    """
    everything = [item for item in revisions(store) if item.whole]
    name, _, begun = words.partition("@")
    if words in links(store):
        found = [item for item in everything if words in item.used_as]
    elif "/" in name:
        found = [item for item in everything if item.model_id == name and item.revision.startswith(begun)]
    else:
        found = [item for item in everything if len(words) >= 4 and item.revision.startswith(words)]
    if len(found) == 1:
        return found[0]
    if not everything:
        raise ModelError(f"{store}: no model is here yet: laoka model fetch ORG/NAME --revision COMMIT")
    have = ", ".join(f"{item.model_id}@{item.revision[:12]}" for item in (found or everything))
    if found:
        raise ModelError(f"{words!r} names {len(found)} revisions here: write more of it; there is: {have}")
    raise ModelError(f"{words!r} names no revision here; there is: {have}")


def sources_noted(store: Path, model_id: str, revision: str) -> tuple[str, ...]:
    """Where a revision was fetched from, as it was written then."""
    told = _about(folder_of(store, model_id), revision).get("sources")
    return tuple(map(str, told)) if isinstance(told, list) else ()


def to_prune(everything: Sequence[Revision], keep: int) -> tuple[Revision, ...]:
    """What the policy removes: whole revisions beyond the newest `keep` of each model, never one that a link points to.

    What is in use counts among those that are kept. Errors: ModelError for a `keep` below 1.
    """
    if keep < 1:
        raise ModelError(f"keep {keep}: at least 1 revision of each model stays")
    gone: list[Revision] = []
    for model_id in sorted({item.model_id for item in everything}):
        mine = [item for item in everything if item.model_id == model_id and item.whole]
        spare = keep - sum(bool(item.used_as) for item in mine)
        idle = sorted((item for item in mine if not item.used_as), key=lambda item: -(item.fetched_unix_s or 0))
        gone += idle[max(0, spare) :]
    return tuple(gone)


def remove(store: Path, item: Revision) -> None:
    """Remove one revision: out of sight first, by rename. Errors: ModelError when it is in use now; OSError."""
    model_folder = folder_of(store, item.model_id)
    with _locked(model_folder):
        if item.folder.resolve() in links(store).values():
            raise ModelError(f"{item.model_id}@{item.revision[:12]} is in use now: it stays")
        hidden = model_folder / f".removed-{item.revision}"
        shutil.rmtree(hidden, ignore_errors=True)
        if item.folder.exists():
            item.folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
        (model_folder / ".about" / f"{item.revision}.json").unlink(missing_ok=True)


def _about(model_folder: Path, revision: str) -> Mapping[str, object]:
    try:
        content = json.loads((model_folder / ".about" / f"{revision}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _note(model_folder: Path, revision: str, sources: Sequence[Source], now_s: float) -> None:
    content = {"sources": [told(source) for source in sources], "fetched_unix_s": round(now_s, 3)}
    write_atomic(model_folder / ".about" / f"{revision}.json", json.dumps(content, indent=1) + "\n")


def told(source: Source) -> str:
    """A source as `parse_source` reads it again."""
    at = f"@{source.revision}" if source.revision else ""
    if source.kind in ("hf", "modelscope"):
        return f"{source.kind}+{source.base}#{source.repo}{at}"
    if source.kind == "rsync" and not source.base.startswith("rsync://"):
        where, _, path = source.base.partition(":")
        return f"ssh://{where}{f':{source.port}' if source.port else ''}{path}"
    return source.base


@contextmanager
def _locked(model_folder: Path) -> Iterator[None]:
    """Hold a model's lock: two fetches of one model would write the same files. Errors: ModelError when it is held for long."""
    model_folder.mkdir(parents=True, exist_ok=True)
    with (model_folder / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelError(f"{model_folder}: another laoka is at work there: wait for it, or end it") from None
        yield


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
