"""A model revision's manifest: every file with its size and SHA-256. Pure but for hashing what lies on disk."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MANIFEST = "manifest.json"
CHUNK_BYTES = 1024 * 1024
MAX_MANIFEST_BYTES = 16 * 1024 * 1024

COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")


class ModelError(Exception):
    """A model can't be fetched, is not what it should be, or has no room; the message says what to do next."""


@dataclass(frozen=True)
class ModelFile:
    """One file of a revision."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of one revision.

    `revision` is a hub's commit (40 digits) or, where there is no hub, the SHA-256 of the manifest's own text (64 digits).
    `text` is the manifest as it is stored.
    """

    revision: str
    files: tuple[ModelFile, ...]
    text: str

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)


def is_pinned(revision: str) -> bool:
    """Whether a revision names its content: a whole commit, or a manifest's SHA-256. A branch or a tag does not."""
    return bool(COMMIT.fullmatch(revision) or SHA256.fullmatch(revision))


def check_path(path: object) -> str:
    """A file's path below its revision's folder. Errors: ModelError for one that would leave it."""
    parts = PurePosixPath(str(path))
    leaves = parts.is_absolute() or ".." in parts.parts or str(parts) in (".", MANIFEST)
    if not isinstance(path, str) or leaves or "\0" in path or "\n" in path:
        raise ModelError(f"the manifest has a path that is not allowed: {path!r}")
    return path


def parse_files(text: str) -> tuple[ModelFile, ...]:
    """The files of a manifest's text: {"files": [{"path", "size_bytes", "sha256"}, …]}.

    Errors: ModelError for anything else, and for a path that would leave the revision's folder.
    """
    try:
        entries = json.loads(text)["files"]
        files = tuple(ModelFile(item["path"], item["size_bytes"], item["sha256"]) for item in entries)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"the manifest is not one: {type(error).__name__} {str(error)[:80]}") from None
    if not files:
        raise ModelError("the manifest lists no file")
    for file in files:
        check_path(file.path)
        if not isinstance(file.size_bytes, int) or isinstance(file.size_bytes, bool) or file.size_bytes < 0:
            raise ModelError(f"the manifest has no size for {file.path}: {file.size_bytes!r}")
        if not SHA256.fullmatch(str(file.sha256)):
            raise ModelError(f"the manifest has no SHA-256 for {file.path}: {file.sha256!r}")
    if len({file.path for file in files}) != len(files):
        raise ModelError("the manifest lists a file twice")
    return files


def parse_manifest(text: str, revision: str) -> Manifest:
    """The manifest of a pinned revision.

    A revision of 64 digits has to be the text's SHA-256. For a commit the text has to name that commit and carry the hash of
    itself, so that a manifest that rotted is known.
    Errors: ModelError for a manifest of another revision, a damaged one, or what is none.
    """
    if SHA256.fullmatch(revision):
        seen = hashlib.sha256(text.encode()).hexdigest()
        if seen != revision:
            raise ModelError(f"has SHA-256 {seen}, not the pinned {revision}: it is another revision, or damaged")
        return Manifest(revision, parse_files(text), text)
    files = parse_files(text)
    content = json.loads(text)
    named, told = content.get("revision"), content.pop("self_sha256", None)
    if named != revision:
        raise ModelError(f"is that of revision {str(named)[:64]}, not of the pinned {revision}")
    if told != _digest_of(content):
        raise ModelError(f"does not have the hash that it names for itself ({str(told)[:64]}): it is damaged")
    return Manifest(revision, files, text)


def manifest_of_commit(model_id: str, commit: str, files: Iterable[ModelFile]) -> Manifest:
    """The manifest of a hub's commit, always the same text for the same files."""
    listed = [{"path": file.path, "size_bytes": file.size_bytes, "sha256": file.sha256} for file in sorted(files, key=_path)]
    content = {"model": model_id, "revision": commit, "files": listed}
    text = json.dumps({**content, "self_sha256": _digest_of(content)}, indent=1, sort_keys=True) + "\n"
    return Manifest(commit, parse_files(text), text)


def _path(file: ModelFile) -> str:
    return file.path


def _digest_of(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def make_manifest(folder: Path) -> str:
    """The manifest of a folder: always the same text for the same files; its SHA-256 is the revision to pin."""
    files = [
        {"path": str(path.relative_to(folder)), "size_bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    ]
    return json.dumps({"files": files}, indent=1, sort_keys=True) + "\n"


def sha256_of(path: Path, *, from_disk: bool = False) -> str:
    """SHA-256 of a file, read in pieces.

    Arguments: `from_disk` drops what the system has cached of the file before, so that what is hashed is what the disk has.
    Errors: OSError.
    """
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        if from_disk:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while piece := stream.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def git_blob_of(path: Path) -> str:
    """The id that git gives a file's content (SHA-1 over "blob SIZE\\0" and the content): what a hub lists for small files."""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while piece := stream.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()
