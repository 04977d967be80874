"""The model store on a host: fetch a revision by its manifest, verify every file, switch to it atomically.

Run as `python -m laoka.serving.model_store fetch|verify|use|manifest …`; the role `model` does. A revision is the SHA-256 of its
manifest, so it names its content. Layout: STORE/<org>--<name>/<revision>/ with `current` beside the revisions.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote, urlsplit

import click
import requests

from laoka.files import write_atomic

MANIFEST = "manifest.json"
CHUNK_BYTES = 1024 * 1024
CONNECT_S, READ_S = 10, 60
TRIES = 4
MAX_MANIFEST_BYTES = 16 * 1024 * 1024


class ModelError(Exception):
    """A model can't be fetched, is not what it should be, or has no room; the message says what to do next."""


@dataclass(frozen=True)
class ModelFile:
    """One file of a revision."""

    path: str
    size_bytes: int
    sha256: str


def parse_manifest(text: str) -> tuple[ModelFile, ...]:
    """Read a manifest: {"files": [{"path", "size_bytes", "sha256"}, …]}.

    Errors: ModelError for anything else, and for a path that would leave the revision's folder.
    """
    try:
        entries = json.loads(text)["files"]
        files = tuple(ModelFile(item["path"], item["size_bytes"], item["sha256"]) for item in entries)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"the manifest is not one: {type(error).__name__} {error}") from None
    if not files:
        raise ModelError("the manifest lists no file")
    for file in files:
        path = PurePosixPath(str(file.path))
        if path.is_absolute() or ".." in path.parts or str(path) in (".", MANIFEST) or "\0" in str(path):
            raise ModelError(f"the manifest has a path that is not allowed: {file.path!r}")
        if not isinstance(file.size_bytes, int) or isinstance(file.size_bytes, bool) or file.size_bytes < 0:
            raise ModelError(f"the manifest has no size for {file.path}: {file.size_bytes!r}")
        if not re.fullmatch(r"[0-9a-f]{64}", str(file.sha256)):
            raise ModelError(f"the manifest has no SHA-256 for {file.path}: {file.sha256!r}")
    if len({file.path for file in files}) != len(files):
        raise ModelError("the manifest lists a file twice")
    return files


def make_manifest(folder: Path) -> str:
    """The manifest of a folder: what `parse_manifest` reads, always the same text for the same files."""
    files = [
        {"path": str(path.relative_to(folder)), "size_bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    ]
    return json.dumps({"files": files}, indent=1, sort_keys=True) + "\n"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def faults_of(folder: Path, files: tuple[ModelFile, ...]) -> dict[str, str]:
    """What is wrong with each file of a revision, by path; empty when all are whole."""
    found = {}
    for file in files:
        path = folder / file.path
        if not path.is_file():
            found[file.path] = "missing"
        elif path.stat().st_size != file.size_bytes:
            found[file.path] = f"{path.stat().st_size} bytes, not {file.size_bytes}"
        elif (seen := sha256_of(path)) != file.sha256:
            found[file.path] = f"SHA-256 {seen}, not {file.sha256}"
    return found


def fetch(source: str, revision: str, model_folder: Path, say: Callable[[str], None]) -> Path:
    """Fetch one revision and return its folder; what is whole already is not fetched again.

    Arguments: `source` a folder, or the http(s) address of one, with manifest.json in it; `revision` the SHA-256 that the
    manifest must have; `model_folder` STORE/<org>--<name>. Files arrive in `.partial-<revision>`, resumed after an
    interruption, and the folder gets its name only when every hash is right.
    Errors: ModelError, with nothing visible under the revision's name.
    """
    target = model_folder / revision
    if target.is_dir():
        return target
    partial = model_folder / f".partial-{revision}"
    partial.mkdir(parents=True, exist_ok=True)
    text = _manifest_text(source)
    seen = hashlib.sha256(text.encode()).hexdigest()
    if seen != revision:
        raise ModelError(
            f"{_place(source, MANIFEST)} has SHA-256 {seen}, not the pinned {revision}: it is another revision, or damaged"
        )
    files = parse_manifest(text)
    needed = sum(max(0, file.size_bytes - _size(partial / file.path)) for file in files)
    free = shutil.disk_usage(model_folder).free
    if free < needed:
        raise ModelError(
            f"{model_folder} has {free / 1e9:.1f} GB free, the model needs {needed / 1e9:.1f} GB more: free some space"
        )
    for file in files:
        _fetch_file(source, file, partial / file.path, say)
    (partial / MANIFEST).write_text(text, encoding="utf-8")
    for path in [partial, *partial.rglob("*")]:
        _sync(path)
    partial.rename(target)
    _sync(model_folder)
    say(f"{target}: {len(files)} files, {sum(file.size_bytes for file in files)} bytes, every SHA-256 right")
    return target


def verify(folder: Path) -> dict[str, str]:
    """Check every file of a revision against its manifest. Returns faults by path. Errors: ModelError without a manifest."""
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"{folder}: no manifest: {error.strerror}") from None
    if hashlib.sha256(text.encode()).hexdigest() != folder.name:
        return {MANIFEST: f"is not the manifest of revision {folder.name}"}
    return faults_of(folder, parse_manifest(text))


def use(model_folder: Path, revision: str, link: Path) -> None:
    """Point `link` at a revision in one step. Errors: ModelError when the revision is not there."""
    target = model_folder / revision
    if not target.is_dir():
        raise ModelError(f"{target} is not there: fetch it first")
    new = link.with_name(f"{link.name}.new")
    new.unlink(missing_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    new.symlink_to(target)
    new.replace(link)


def _fetch_file(source: str, file: ModelFile, path: Path, say: Callable[[str], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    last = "no try made"
    for number in range(TRIES):
        if number:
            time.sleep(min(2**number, 10))
        try:
            if _size(path) > file.size_bytes:
                path.unlink()
            if _size(path) < file.size_bytes or not path.exists():
                _append(source, file, path, say)
            last = faults_of(path.parent, (ModelFile(path.name, file.size_bytes, file.sha256),)).get(path.name, "")
            if not last:
                return
            if _size(path) >= file.size_bytes:
                path.unlink()  # whole but wrong: resuming can't mend it
        except (OSError, requests.RequestException) as error:
            last = f"{type(error).__name__}: {error}"
    raise ModelError(f"{_place(source, file.path)}: {last} (after {TRIES} tries); run again to resume")


def _append(source: str, file: ModelFile, path: Path, say: Callable[[str], None]) -> None:
    have = _size(path)
    started = shown = time.monotonic()
    with path.open("ab") as out:
        if not _is_http(source):
            with (Path(source) / file.path).open("rb") as stream:
                stream.seek(have)
                shutil.copyfileobj(stream, out, CHUNK_BYTES)
            return
        headers: Mapping[str, str] = {"Range": f"bytes={have}-"} if have else {}
        with requests.get(_place(source, file.path), headers=headers, stream=True, timeout=(CONNECT_S, READ_S)) as answer:
            answer.raise_for_status()
            if have and answer.status_code != 206:
                out.truncate(0)  # the server can't resume
            for piece in answer.iter_content(CHUNK_BYTES):
                out.write(piece)
                now = time.monotonic()
                if now - shown >= 5:
                    shown = now
                    done = out.tell()
                    rate = (done - have) / (now - started) / 1e6
                    say(f"{file.path}: {done / 1e6:.0f} of {file.size_bytes / 1e6:.0f} MB, {rate:.1f} MB/s")


def _manifest_text(source: str) -> str:
    place = _place(source, MANIFEST)
    try:
        if not _is_http(source):
            return Path(place).read_text(encoding="utf-8")
        with requests.get(place, stream=True, timeout=(CONNECT_S, READ_S)) as answer:
            answer.raise_for_status()
            data = answer.raw.read(MAX_MANIFEST_BYTES + 1, decode_content=True)
        if len(data) > MAX_MANIFEST_BYTES:
            raise ModelError(f"{place}: over {MAX_MANIFEST_BYTES} bytes, which no manifest is")
        return str(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise ModelError(f"{place}: not text, so not a manifest") from None
    except (OSError, requests.RequestException) as error:
        raise ModelError(f"{place}: {error}") from None


def _is_http(source: str) -> bool:
    return urlsplit(source).scheme in ("http", "https")


def _place(source: str, path: str) -> str:
    return f"{source.rstrip('/')}/{quote(path)}" if _is_http(source) else str(Path(source) / path)


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


@click.group()
def command() -> None:
    """The model store of this host."""


@command.command(name="fetch")
@click.option("--source", required=True)
@click.option("--revision", required=True)
@click.option("--into", required=True, type=click.Path(path_type=Path))
def fetch_command(source: str, revision: str, into: Path) -> None:
    """Fetch a revision into a model's folder."""
    fetch(source, revision, into, lambda line: click.echo(line, err=True))


@command.command(name="verify")
@click.argument("folder", type=click.Path(path_type=Path))
def verify_command(folder: Path) -> None:
    """Check every file of a revision; prints the faults."""
    faults = verify(folder)
    for path, fault in faults.items():
        click.echo(f"{path}: {fault}")
    if faults:
        raise SystemExit(1)


@command.command(name="manifest")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
def manifest_command(folder: Path) -> None:
    """Write manifest.json for a folder of model files, and print the revision to pin."""
    text = make_manifest(folder)
    write_atomic(folder / MANIFEST, text)
    click.echo(hashlib.sha256(text.encode()).hexdigest())


@command.command(name="use")
@click.option("--revision", required=True)
@click.option("--of", "model_folder", required=True, type=click.Path(path_type=Path))
@click.option("--link", required=True, type=click.Path(path_type=Path))
def use_command(revision: str, model_folder: Path, link: Path) -> None:
    """Point a link at a revision."""
    use(model_folder, revision, link)


if __name__ == "__main__":
    try:
        command(standalone_mode=True)
    except ModelError as error:
        click.echo(f"model: {error}", err=True)
        sys.exit(2)
