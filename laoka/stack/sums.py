"""Hashes of release wheels from the release's own SHA256SUMS: a file, or the release page itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import requests

from laoka.catalog.engines import UNVERIFIED, Engine

MAX_SUMS_BYTES = 1024 * 1024
CONNECT_S, READ_S = 10, 30


class SumsError(ValueError):
    """A SHA256SUMS that can't be had or is not one; the message is one line."""


def parse_sums(text: str, where: str) -> dict[str, str]:
    """SHA-256 by file name. Errors: SumsError for a line that is not "HASH  NAME", or a name with two hashes."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = re.fullmatch(r"([0-9a-fA-F]{64}) [ *](?:\./)?([^/\0]+)", line.rstrip())
        if not parts:
            raise SumsError(f"{where}:{number}: not a line of SHA256SUMS (HASH  NAME): {line[:60]!r}")
        name, value = parts.group(2), parts.group(1).lower()
        if found.get(name, value) != value:
            raise SumsError(f"{where}:{number}: {name} stands with two different hashes")
        found[name] = value
    if not found:
        raise SumsError(f"{where}: no hash in it")
    return found


def fetch_text(url: str) -> str:
    """The text behind an address, bounded in time and size. Errors: SumsError."""
    try:
        with requests.get(url, timeout=(CONNECT_S, READ_S), stream=True) as answer:
            if answer.status_code != 200:
                raise SumsError(f"{url}: HTTP {answer.status_code}")
            body = b""
            for piece in answer.iter_content(64 * 1024):
                body += piece
                if len(body) > MAX_SUMS_BYTES:
                    raise SumsError(f"{url}: larger than {MAX_SUMS_BYTES} bytes: not a SHA256SUMS")
    except requests.RequestException as error:
        raise SumsError(f"{url}: {type(error).__name__}: is the network there, or a proxy needed (https_proxy)?") from None
    return body.decode("utf-8", errors="replace")


def hashes_in(sums: Mapping[str, str], engines: Iterable[Engine], where: str) -> dict[str, str]:
    """Hashes by "name==version" of the engines whose wheel is in a SHA256SUMS.

    Errors: SumsError when the catalogue has another hash for the same wheel: one of the two is wrong, and nobody should guess.
    """
    found = {}
    for engine in engines:
        told = sums.get(engine.wheel_file or "")
        if told is None:
            continue
        if engine.wheel_sha256 not in (UNVERIFIED, told):
            raise SumsError(
                f"{where}: {engine.wheel_file} has {told}, the catalogue {engine.wheel_sha256}: "
                "do not install it before that is explained"
            )
        found[engine.pin] = told
    return found


def online_hashes(
    engines: Iterable[Engine], fetch: Callable[[str], str] = fetch_text, say: Callable[[str], None] = lambda text: None
) -> dict[str, str]:
    """The hash of the first engine (newest first) whose release page gives one, by "name==version"; empty when none does.

    Arguments: `fetch` address -> text; `say` is told of each try. Errors: SumsError for a hash that contradicts the catalogue.
    """
    for engine in engines:
        if engine.sums_url is None:
            continue
        say(f"{engine.pin}: {engine.sums_url}")
        try:
            sums = parse_sums(fetch(engine.sums_url), engine.sums_url)
        except SumsError as error:
            say(str(error))
            continue
        found = hashes_in(sums, (engine,), engine.sums_url)
        if found:
            return found
        say(f"{engine.sums_url}: {engine.wheel_file} is not in it")
    return {}
