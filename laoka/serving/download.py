"""One file over HTTP: resumed after an interruption, patient with a busy server, never longer than it should be."""

from __future__ import annotations

import email.utils
import os
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import requests

CHUNK_BYTES = 64 * 1024
"""Small: what had arrived of a piece is lost when the line drops."""
CONNECT_S, READ_S = 10, 60
TRIES = 6
"""Tries in a row that brought no byte; one that did starts the count anew, so a line that drops often still gets there."""
BACKOFF_S, MAX_BACKOFF_S = 1.0, 30.0
MAX_RETRY_AFTER_S = 600.0
BUSY = (408, 425, 429, 500, 502, 503, 504)


SYSTEM_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


class DownloadError(Exception):
    """A file can't be had from this address; the message is one line that names address and reason."""


class Stopped(Exception):
    """The download was told to stop; what has arrived stays."""


def trusted(env: Mapping[str, str], system: Path = SYSTEM_CERTIFICATES) -> str | bool:
    """Whose certificates are trusted: those that the environment names, else the system's, else the ones that requests brings.

    requests by itself does not know what the host's administrator added (update-ca-certificates), such as the root of a proxy.
    """
    named = env.get("REQUESTS_CA_BUNDLE") or env.get("CURL_CA_BUNDLE")
    return named or (str(system) if system.is_file() else True)


def retry_after_s(value: str | None, now_s: float) -> float | None:
    """Seconds that a server asks to wait in Retry-After: a number of them, or a date. None when it does not say.

    Arguments: `now_s` the time now, in seconds since 1970.
    """
    if value is None:
        return None
    if re.fullmatch(r"\s*\d{1,9}\s*", value):
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - now_s)
    except (ValueError, TypeError, OverflowError):
        return None


def backoff_s(number: int) -> float:
    """Seconds to wait before try `number` (1 is the first repetition): doubled each time, with jitter, bounded."""
    return min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** (number - 1)) * random.uniform(0.7, 1.0)  # noqa: S311 - spreads load


class _Again(Exception):
    """This try did not get there; another one may, after `wait_s` seconds where the server asked for that."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.why, self.wait_s = why, wait_s


T = TypeVar("T")


def _patiently(
    what: str,
    attempt: Callable[[], T],
    stop: threading.Event,
    say: Callable[[str], None],
    got_on: Callable[[], bool] = lambda: False,
    tries: int | None = None,
) -> T:
    """Repeat `attempt` until it returns; gives up after `tries` (TRIES) in a row that did not get on."""
    failures, most = 0, tries or TRIES
    while True:
        wait_s: float | None = None
        try:
            return attempt()
        except _Again as again:
            why, wait_s = again.why, again.wait_s
        except requests.RequestException as error:
            why = reason(error)
        failures = 1 if got_on() else failures + 1
        if failures >= most:
            raise DownloadError(f"{what}: {why} ({failures} tries in a row)")
        pause_s = backoff_s(failures) if wait_s is None else wait_s
        if wait_s is not None or failures > 1:
            say(f"{what}: {why}: again in {pause_s:.0f} s")
        if stop.wait(pause_s):
            raise Stopped


def download(
    url: str,
    path: Path,
    size_bytes: int | None,
    *,
    max_bytes: int | None = None,
    headers: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Have the file behind `url` at `path`, going on from what is there already.

    Arguments: `size_bytes` what the file has to have, None when that is not known (then nothing is resumed, and `max_bytes`
    bounds it); `stop` ends it early; `say` gets a line before each wait.
    The content is not judged here: whoever knows the hash does.
    Errors: DownloadError after the last try, or at once where trying again can't help; Stopped; OSError of the disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    stop = stop or threading.Event()
    if path.exists() and (size_bytes is None or path.stat().st_size > size_bytes):
        path.unlink()
    if path.exists() and path.stat().st_size == size_bytes:
        return
    limit = size_bytes if size_bytes is not None else max_bytes
    last = _size(path)

    def attempt() -> None:
        _one_try(url, path, size_bytes, limit, headers or {}, stop)

    def got_on() -> bool:
        nonlocal last
        before, last = last, _size(path)
        return last > before

    _patiently(url, attempt, stop, say, got_on)


def get_text(
    url: str,
    *,
    max_bytes: int,
    stop: threading.Event | None = None,
    say: Callable[[str], None] = lambda line: None,
    tries: int | None = None,
) -> tuple[str, str | None]:
    """The text behind an address, and the address of the next page where the answer names one.

    Errors: DownloadError, also for a text of more than `max_bytes`; Stopped.
    """

    def attempt() -> tuple[str, str | None]:
        with requests.get(url, stream=True, timeout=(CONNECT_S, READ_S), verify=trusted(os.environ)) as answer:
            _judge_status(url, answer, None)
            body = b""
            for piece in answer.iter_content(64 * 1024):
                body += piece
                if len(body) > max_bytes:
                    raise DownloadError(f"{url}: more than {max_bytes} bytes, which this is not supposed to have")
            following = answer.links.get("next", {}).get("url")
        try:
            return body.decode("utf-8"), following
        except UnicodeDecodeError:
            raise DownloadError(f"{url}: not text") from None

    return _patiently(url, attempt, stop or threading.Event(), say, tries=tries)


def get_range(url: str, begin: int, end: int) -> bytes:
    """Bytes `begin` to `end` (exclusive) of the file behind an address.

    Errors: DownloadError, also where the server can't send a part of a file.
    """

    def attempt() -> bytes:
        asked = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        with requests.get(url, headers=asked, stream=True, timeout=(CONNECT_S, READ_S), verify=trusted(os.environ)) as answer:
            _judge_status(url, answer, None)
            if answer.status_code != 206 and begin:
                raise DownloadError(f"{url}: the server can't send a part of the file")
            body = b""
            for piece in answer.iter_content(64 * 1024):
                body += piece
                if len(body) >= end - begin:
                    break
        return body[: end - begin]

    return _patiently(url, attempt, threading.Event(), lambda line: None)


def _judge_status(url: str, answer: requests.Response, have: int | None) -> None:
    """Return for an answer with content. Errors: _Again for a busy server, DownloadError for what stays as it is."""
    status = answer.status_code
    if status in BUSY:
        wait_s = retry_after_s(answer.headers.get("Retry-After"), time.time())
        if wait_s is not None and wait_s > MAX_RETRY_AFTER_S:
            raise DownloadError(f"{url}: HTTP {status}, and the server asks to wait {wait_s:.0f} s: try again later")
        raise _Again(f"HTTP {status}, the server is busy", wait_s)
    if status == 416:
        raise DownloadError(f"{url}: the server has no more than {have} bytes: it is another file, or cut short there")
    if status not in (200, 206):
        raise DownloadError(f"{url}: HTTP {status}{_hint(status)}")


def _one_try(
    url: str,
    path: Path,
    size_bytes: int | None,
    limit: int | None,
    headers: Mapping[str, str],
    stop: threading.Event,
) -> None:
    """Return when the file is whole. Errors: _Again, DownloadError, requests.RequestException, Stopped."""
    have = max(0, _size(path))
    # A compressed transfer could neither be resumed nor counted.
    asked = {**headers, "Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
    with requests.get(url, headers=asked, stream=True, timeout=(CONNECT_S, READ_S), verify=trusted(os.environ)) as answer:
        _judge_status(url, answer, have)
        begin, total = _extent(answer.headers, answer.status_code)
        if total is not None and size_bytes is not None and total != size_bytes:
            raise DownloadError(f"{url}: the server has {total} bytes, the file should have {size_bytes}: it is another file")
        if have and begin != have:
            have = 0
            path.unlink()
            if begin != 0:
                raise _Again(f"the server answered with bytes from {begin} on, which were not asked for")
        with path.open("ab") as out:
            for piece in answer.iter_content(CHUNK_BYTES):
                if limit is not None and have + len(piece) > limit:
                    raise DownloadError(f"{url}: more than the {limit} bytes that the file should have: it is another file")
                out.write(piece)
                have += len(piece)
                if stop.is_set():
                    raise Stopped
    whole = size_bytes if size_bytes is not None else total
    if whole is not None and have < whole:
        raise _Again("the server ended the file early")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _extent(headers: Mapping[str, str], status: int) -> tuple[int, int | None]:
    """(first byte, length of the whole file) of an answer; the length is None when the server does not say."""
    if status == 206:
        found = re.fullmatch(r"\s*bytes (\d+)-\d+/(\d+|\*)\s*", headers.get("Content-Range", ""))
        if found:
            return int(found[1]), None if found[2] == "*" else int(found[2])
        return -1, None
    length = headers.get("Content-Length", "")
    return 0, int(length) if length.isdigit() else None


def _hint(status: int) -> str:
    hints = {
        401: ": it wants an access token, or there is no such repository",
        403: ": access is refused (a gated repository? a mirror that leaves it out?)",
        404: ": not there",
        407: ": the proxy wants a password",
    }
    return hints.get(status, "")


def reason(error: requests.RequestException) -> str:
    """Why a request got no answer, in a few words for people."""
    text = str(error)
    for words, meaning in (
        ("Connection refused", "connection refused"),
        ("Name or service not known", "the name is not known"),
        ("Temporary failure in name resolution", "the name server does not answer"),
        ("Network is unreachable", "the network is unreachable"),
        ("No route to host", "no route to the host"),
        ("Connection reset", "the connection was reset"),
        ("RemoteDisconnected", "the server closed the connection"),
        ("IncompleteRead", "the server ended the file early"),
        ("CERTIFICATE_VERIFY_FAILED", "the TLS certificate is not trusted"),
        ("ProxyError", "the proxy does not answer"),
        ("timed out", "no answer in time"),
    ):
        if words in text:
            return meaning
    return type(error).__name__
