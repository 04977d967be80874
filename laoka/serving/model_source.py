"""Where a model's files come from: a hub or its mirror, a web folder, another host, a folder. Listings are pure to read."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlencode, urlsplit

from laoka.process import run
from laoka.serving.download import DownloadError, Stopped, download, get_range, get_text
from laoka.serving.manifest import (
    CHUNK_BYTES,
    COMMIT,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    SHA256,
    Manifest,
    ModelError,
    check_path,
    is_pinned,
    parse_manifest,
)

Kind = Literal["hf", "modelscope", "http", "rsync", "folder"]

HF, HF_MIRROR, MODELSCOPE = "https://huggingface.co", "https://hf-mirror.com", "https://modelscope.cn"
HUBS: Mapping[str, tuple[Kind, str]] = {"hf": ("hf", HF), "hf-mirror": ("hf", HF_MIRROR), "modelscope": ("modelscope", MODELSCOPE)}
LEFT_OUT = (".gitattributes", ".gitignore")
"""Files of a repository that are no part of the model."""
RSYNC_RSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
RSYNC_DEADLINE_S = 24 * 3600
PEER_USER, PEER = "laoka-peer", Path("/etc/laoka/peer")
"""Another host of the same inventory is asked as this user, with the key and the known hosts of this folder: the model role sets
both up. That user may read the model store and nothing else."""


class SourceError(ModelError):
    """This source does not have it, or can't be reached; another one may."""


@dataclass(frozen=True)
class Source:
    """One place to take files from.

    `base` is a hub's address, a web folder, rsync's name for a folder, or a folder; `repo` and `revision` are a hub's own names
    (`revision` None: the pinned one); `port` is ssh's.
    """

    kind: Kind
    base: str
    repo: str = ""
    revision: str | None = None
    port: int | None = None

    def __str__(self) -> str:
        if self.kind in ("hf", "modelscope"):
            return f"{self.base}/{self.repo}" + (f"@{self.revision}" if self.revision else "")
        return self.base


@dataclass(frozen=True)
class RemoteFile:
    """A file as a source lists it. Small files of a hub have no SHA-256 there, only git's id of their content."""

    path: str
    size_bytes: int
    sha256: str | None = None
    git_blob: str | None = None


@dataclass(frozen=True)
class Listing:
    """The files of one revision as a source has them; `manifest` where it has one."""

    revision: str
    files: tuple[RemoteFile, ...]
    manifest: Manifest | None = None


# ---- which source is meant: pure ----------------------------------------------------------------------------------------


def parse_source(text: str, model_id: str, env: Mapping[str, str] = os.environ) -> Source:
    """A source as people write it.

    hf, hf-mirror, modelscope, each also as `hf:ORG/NAME@REVISION` where the hub has it under other names; `hf+https://HUB` and
    `modelscope+https://HUB` (or `…HUB#ORG/NAME@REVISION`) for another hub that speaks the same; http(s)://… of a folder with
    manifest.json; rsync://HOST/MODULE/PATH; ssh://[USER@]HOST[:PORT]/PATH; /PATH.
    Arguments: `model_id` "ORG/NAME", the repository where the text names none; `env` may have HF_ENDPOINT, which the hub's
    own tools read too.
    Errors: ModelError that says what to write.
    """
    word, _, rest = text.strip().partition(":")
    if word in HUBS:
        kind, base = HUBS[word]
        if word == "hf" and env.get("HF_ENDPOINT"):
            base = env["HF_ENDPOINT"].rstrip("/")
        repo, _, revision = (rest or model_id).partition("@")
        return Source(kind, base, _repo(repo or model_id, text), revision or None)
    scheme = urlsplit(text).scheme
    if scheme in ("hf+https", "hf+http", "modelscope+https", "modelscope+http"):
        hub, _, rest = text.partition("+")
        base, _, named = rest.partition("#")
        repo, _, revision = named.partition("@")
        return Source("hf" if hub == "hf" else "modelscope", base.rstrip("/"), _repo(repo or model_id, text), revision or None)
    if scheme in ("http", "https"):
        return Source("http", text.rstrip("/"))
    if scheme == "rsync":
        return Source("rsync", text.rstrip("/"))
    if scheme == "ssh":
        return _ssh(text)
    if scheme == "file":
        return Source("folder", urlsplit(text).path)
    if text.startswith(("/", "./", "../", "~")):
        return Source("folder", str(Path(text).expanduser()))
    raise ModelError(
        f"source {text!r}: write hf, hf-mirror, modelscope, http(s)://FOLDER, rsync://HOST/MODULE/PATH, ssh://HOST/PATH or /PATH"
    )


def _repo(repo: str, text: str) -> str:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise ModelError(f"source {text!r}: {repo!r} is not ORG/NAME")
    return repo


def _ssh(text: str) -> Source:
    parts = urlsplit(text)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if not parts.hostname or not parts.path.strip("/") or port == -1 or parts.hostname.startswith("-"):
        raise ModelError(f"source {text!r}: write ssh://[USER@]HOST[:PORT]/PATH")
    user = f"{parts.username}@" if parts.username else ""
    return Source("rsync", f"{user}{parts.hostname}:{parts.path.rstrip('/')}", port=port)


# ---- what a hub answers: pure -------------------------------------------------------------------------------------------


def parse_hf_tree(content: object, where: str) -> tuple[RemoteFile, ...]:
    """The files of one page of `/api/models/REPO/tree/REVISION?recursive=true`.

    Large files carry `lfs` with the SHA-256 of their content; for the others `oid` is git's id. Errors: SourceError.
    """
    return _listed(content, where, "path", "size", lambda item: item.get("type") == "file", _hf_hashes)


def _hf_hashes(item: Mapping[str, Any]) -> tuple[int, str | None, str | None]:
    lfs = item.get("lfs")
    if isinstance(lfs, Mapping):
        return int(lfs.get("size", item["size"])), str(lfs["oid"]).removeprefix("sha256:"), None
    return int(item["size"]), None, str(item["oid"])


def parse_modelscope_files(content: object, where: str) -> tuple[RemoteFile, ...]:
    """The files of `/api/v1/models/REPO/repo/files?Revision=…&Recursive=True`: every one has its SHA-256. Errors: SourceError."""
    data = content.get("Data") if isinstance(content, Mapping) else None
    if not isinstance(data, Mapping) or content.get("Code") not in (200, None):  # type: ignore[attr-defined]
        told = content.get("Message") if isinstance(content, Mapping) else None
        raise SourceError(f"{where}: not a listing: {str(told)[:100]}")
    return _listed(data.get("Files"), where, "Path", "Size", lambda item: item.get("Type") != "tree", _modelscope_hashes)


def _modelscope_hashes(item: Mapping[str, Any]) -> tuple[int, str | None, str | None]:
    return int(item["Size"]), str(item["Sha256"]), None


def _listed(
    content: object,
    where: str,
    path_key: str,
    size_key: str,
    is_file: Callable[[Mapping[str, Any]], bool],
    hashes: Callable[[Mapping[str, Any]], tuple[int, str | None, str | None]],
) -> tuple[RemoteFile, ...]:
    if not isinstance(content, list):
        raise SourceError(f"{where}: not a listing of files")
    found = []
    for item in content:
        if not isinstance(item, Mapping):
            raise SourceError(f"{where}: not a listing of files")
        if not is_file(item):
            continue
        try:
            size, sha256, blob = hashes(item)
            path = check_path(item[path_key])
        except (KeyError, TypeError, ValueError):
            raise SourceError(f"{where}: a file without path, {size_key.lower()} or hash: {str(item)[:80]}") from None
        whole = SHA256.fullmatch(sha256) if sha256 is not None else COMMIT.fullmatch(blob or "")
        if size < 0 or not whole:
            raise SourceError(f"{where}: {path} has no valid size or hash")
        if path.rsplit("/", 1)[-1] not in LEFT_OUT:
            found.append(RemoteFile(path, size, sha256, blob))
    return tuple(found)


# ---- asking -------------------------------------------------------------------------------------------------------------


def listing_of(source: Source, revision: str, say: Callable[[str], None] = lambda line: None) -> Listing:
    """What a source has of a revision.

    A hub takes a branch, a tag or the beginning of a commit too, and the listing then names the whole commit; everything else
    wants the pinned revision. Errors: SourceError when the source does not have it, or has something else.
    """
    try:
        if source.kind == "hf":
            return _hf_listing(source, source.revision or revision, say)
        if source.kind == "modelscope":
            return _modelscope_listing(source, source.revision or revision, say)
        if not is_pinned(revision):
            raise SourceError(f"{source}: {revision!r} is no pinned revision: 40 digits of a commit or 64 of a manifest's SHA-256")
        manifest = _manifest(source, revision, say)
    except DownloadError as error:
        raise SourceError(str(error)) from None
    return Listing(revision, tuple(RemoteFile(file.path, file.size_bytes, file.sha256) for file in manifest.files), manifest)


def listing_of_folder(folder: Path, revision: str = "-") -> Listing:
    """The files of a folder as they lie there, without hashes: to look at them, not to fetch them."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return Listing(revision, tuple(RemoteFile(str(path.relative_to(folder)), path.stat().st_size) for path in paths))


def _json(url: str, say: Callable[[str], None]) -> tuple[Any, str | None]:
    text, following = get_text(url, max_bytes=MAX_MANIFEST_BYTES, say=say)
    try:
        return json.loads(text), following
    except (ValueError, RecursionError):
        raise SourceError(f"{url}: not JSON: is it the hub, or a page of a proxy?") from None


def _hf_listing(source: Source, revision: str, say: Callable[[str], None]) -> Listing:
    api = f"{source.base}/api/models/{source.repo}"
    commit = revision if COMMIT.fullmatch(revision) else _hf_commit(api, revision, say)
    url: str | None = f"{api}/tree/{commit}?recursive=true"
    files: list[RemoteFile] = []
    for _ in range(100):
        if url is None:
            break
        content, following = _json(url, say)
        files += parse_hf_tree(content, url)
        url = following
    if not files:
        raise SourceError(f"{source}: no file at {commit}")
    return Listing(commit, tuple(files))


def _hf_commit(api: str, revision: str, say: Callable[[str], None]) -> str:
    """The whole commit of a branch, a tag or the beginning of a commit."""
    begun = re.fullmatch(r"[0-9a-f]{7,39}", revision) is not None
    try:
        content, _ = _json(f"{api}/revision/{quote(revision, safe='')}", say)
        commit = str(content.get("sha", "")) if isinstance(content, Mapping) else ""
        if COMMIT.fullmatch(commit):
            return commit
    except DownloadError:
        if not begun:
            raise
    if begun:
        content, _ = _json(f"{api}/commits/main?limit=1000", say)
        ids = [str(item.get("id", "")) for item in content if isinstance(item, Mapping)] if isinstance(content, list) else []
        found = [commit for commit in ids if commit.startswith(revision) and COMMIT.fullmatch(commit)]
        if len(found) == 1:
            return found[0]
    raise SourceError(f"{api}: revision {revision!r} is not there: take the whole commit from the repository's page")


def _modelscope_listing(source: Source, revision: str, say: Callable[[str], None]) -> Listing:
    if not COMMIT.fullmatch(revision):
        raise SourceError(f"{source}: ModelScope wants the whole commit (40 digits), not {revision!r}: its page shows it")
    url = f"{source.base}/api/v1/models/{source.repo}/repo/files?{urlencode({'Revision': revision, 'Recursive': 'True'})}"
    content, _ = _json(url, say)
    files = parse_modelscope_files(content, url)
    if not files:
        raise SourceError(f"{source}: no file at {revision}")
    return Listing(revision, files)


def _manifest(source: Source, revision: str, say: Callable[[str], None]) -> Manifest:
    place = url_of(source, MANIFEST, revision) if source.kind == "http" else f"{source.base}/{MANIFEST}"
    if source.kind == "http":
        text, _ = get_text(place, max_bytes=MAX_MANIFEST_BYTES, say=say)
    elif source.kind == "rsync":
        with tempfile.TemporaryDirectory() as folder:
            _rsync(source, MANIFEST, Path(folder) / MANIFEST, append=False)
            text = _text_of(Path(folder) / MANIFEST, place)
    else:
        text = _text_of(Path(place), place)
    try:
        return parse_manifest(text, revision)
    except ModelError as error:
        raise SourceError(f"{place}: {error}") from None


def _text_of(path: Path, place: str) -> str:
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise SourceError(f"{place}: over {MAX_MANIFEST_BYTES} bytes, which no manifest is")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise SourceError(f"{place}: not text, so not a manifest") from None
    except FileNotFoundError:
        raise SourceError(f"{place}: not there: `laoka model manifest FOLDER` makes one for a folder of model files") from None
    except OSError as error:
        raise SourceError(f"{place}: {error.strerror}") from None


def url_of(source: Source, path: str, revision: str) -> str:
    """The address of one file of a hub or a web folder."""
    if source.kind == "hf":
        return f"{source.base}/{source.repo}/resolve/{source.revision or revision}/{quote(path)}"
    if source.kind == "modelscope":
        query = urlencode({"Revision": source.revision or revision, "FilePath": path})
        return f"{source.base}/api/v1/models/{source.repo}/repo?{query}"
    return f"{source.base}/{quote(path)}"


def read_part(source: Source, path: str, revision: str, begin: int, end: int) -> bytes:
    """Bytes `begin` to `end` (exclusive) of one file, without fetching the rest; rsync can only have the whole, of a small file.

    Errors: SourceError; none for a short file.
    """
    try:
        if source.kind in ("hf", "modelscope", "http"):
            return get_range(url_of(source, path, revision), begin, end)
    except DownloadError as error:
        raise SourceError(str(error)) from None
    if source.kind == "rsync":
        if begin or end > MAX_MANIFEST_BYTES:
            raise SourceError(f"{source}: rsync can't read a part of a file")
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "copy"
            _rsync(source, path, copy, append=False)
            return copy.read_bytes()[:end]
    try:
        with (Path(source.base) / path).open("rb") as stream:
            stream.seek(begin)
            return stream.read(end - begin)
    except OSError as error:
        raise SourceError(f"{source.base}/{path}: {error.strerror}") from None


def fetch_file(
    source: Source,
    file: RemoteFile,
    revision: str,
    path: Path,
    *,
    stop: threading.Event,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Have one file at `path`, going on from what is there; its hash is for the caller to check.

    Errors: SourceError; download.Stopped; OSError of the disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if source.kind in ("hf", "modelscope", "http"):
            url = url_of(source, file.path, revision)
            download(url, path, file.size_bytes, stop=stop, say=say)
            return
    except DownloadError as error:
        raise SourceError(str(error)) from None
    have = path.stat().st_size if path.exists() else 0
    if have > file.size_bytes:
        path.unlink()
        have = 0
    if path.exists() and have == file.size_bytes:
        return
    if source.kind == "rsync":
        _rsync(source, file.path, path, append=have > 0, stop=stop)
    else:
        _copy(source, file, path, have, stop)


def _copy(source: Source, file: RemoteFile, path: Path, have: int, stop: threading.Event) -> None:
    origin = Path(source.base) / file.path
    try:
        stream = origin.open("rb")
    except OSError as error:
        raise SourceError(f"{origin}: {error.strerror}") from None
    with stream, path.open("ab") as out:
        stream.seek(have)
        while not stop.is_set() and (piece := stream.read(CHUNK_BYTES)):
            out.write(piece)


def _rsync(source: Source, name: str, path: Path, *, append: bool, stop: threading.Event | None = None) -> None:
    """Copy one file by rsync. Errors: SourceError with rsync's last words."""
    if not shutil.which("rsync"):
        raise SourceError("rsync is not installed: apt-get install rsync")
    shell = remote_shell(source, os.environ)
    # --append sends the rest only; what is already there is judged by its hash afterwards.
    argv = ["rsync", "-t", "--inplace", "--partial", "--timeout=60", *(["--append"] if append else []), "-e", shell]
    done = run([*argv, f"{source.base}/{name}", str(path)], deadline_s=RSYNC_DEADLINE_S, stop=stop)
    if stop is not None and stop.is_set():
        raise Stopped
    if not done.ok:
        raise SourceError(f"{source.base}/{name}: {done.last_line()}")


def remote_shell(source: Source, env: Mapping[str, str]) -> str:
    """How rsync reaches a source: RSYNC_RSH where it is set, with the peers' key for another host of the inventory. Pure."""
    shell = env.get("RSYNC_RSH") or RSYNC_RSH
    if source.base.startswith(f"{PEER_USER}@"):
        known = f"-o UserKnownHostsFile={PEER}/known_hosts -o StrictHostKeyChecking=yes"
        shell = f"{RSYNC_RSH} -i {PEER}/key -o IdentitiesOnly=yes {known}"
    return f"{shell} -p {source.port}" if source.port else shell
