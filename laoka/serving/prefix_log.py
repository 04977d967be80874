"""What of a prompt the guard may note: keyed hashes of its token blocks, never text and never token ids. Pure.

Two lists. `prefix`: a hash of everything from the beginning to each of a row of marks, as an engine's prefix cache sees a prompt:
two prompts share a prefix as far as these are the same. `chunks`: hashes of pieces whose borders depend on the tokens themselves,
with their lengths: the same text has the same chunks wherever it stands, which shows what prompts share in the wrong place.
The key is made at the guard's start and kept in memory only, so that nobody can try texts against the log.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

FINE_TOKENS, FINE_UNTIL, COARSE_TOKENS, LAST_MARK = 16, 1024, 256, 65536
DIGEST_BYTES = 8
CHUNK_MIN, CHUNK_MAX, CHUNK_ONE_IN, CHUNK_LOOKS_AT = 8, 128, 24, 4
MAX_CHUNKS = 1024


@dataclass(frozen=True)
class Noted:
    """One request as the log has it. `run` names the guard's run: hashes of two runs have different keys and do not compare."""

    run: str
    time_s: float
    tokens: int
    prefix: tuple[str, ...]
    chunks: tuple[tuple[str, int], ...]

    def line(self) -> str:
        """As a line of the log."""
        values = {"run": self.run, "time_s": round(self.time_s, 3), "tokens": self.tokens, "prefix": self.prefix}
        return json.dumps({**values, "chunks": self.chunks}, separators=(",", ":"))


def marks(tokens: int) -> Iterator[int]:
    """How many tokens from the beginning each hash of `prefix` covers: every 16 at first, every 256 later."""
    yield from range(FINE_TOKENS, min(tokens, FINE_UNTIL) + 1, FINE_TOKENS)
    yield from range(FINE_UNTIL + COARSE_TOKENS, min(tokens, LAST_MARK) + 1, COARSE_TOKENS)


def covered(index: int) -> int:
    """The tokens that hash number `index` (from 0) of `prefix` covers."""
    fine = FINE_UNTIL // FINE_TOKENS
    return FINE_TOKENS * (index + 1) if index < fine else FINE_UNTIL + COARSE_TOKENS * (index - fine + 1)


def note(ids: Sequence[int], key: bytes, run: str, time_s: float) -> Noted:
    """What is noted of a prompt."""
    prefix, before, start = [], b"", 0
    for mark in marks(len(ids)):
        before = _digest(before + _packed(ids[start:mark]), key)
        prefix.append(before.hex())
        start = mark
    chunks = tuple((_digest(_packed(chunk), key).hex(), len(chunk)) for chunk in _chunks(ids[:LAST_MARK]))[:MAX_CHUNKS]
    return Noted(run, time_s, len(ids), tuple(prefix), chunks)


def _chunks(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """Cut where the last few tokens say so, so that what stands before a text does not move its borders."""
    start = 0
    for end in range(1, len(ids) + 1):
        length = end - start
        if length < CHUNK_MIN:
            continue
        seen = sum(
            token * weight for token, weight in zip(ids[end - CHUNK_LOOKS_AT : end], (2654435761, 40503, 69069, 1), strict=True)
        )
        if length >= CHUNK_MAX or (seen >> 7) % CHUNK_ONE_IN == 0:
            yield ids[start:end]
            start = end
    if start < len(ids):
        yield ids[start:]


def _packed(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def _digest(data: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(data, key=key, digest_size=DIGEST_BYTES).digest()


def parse_line(line: str) -> Noted | None:
    """A line of the log; None for what is none (cut off by a restart, say)."""
    try:
        raw = json.loads(line)
        return Noted(
            str(raw["run"]), float(raw["time_s"]), int(raw["tokens"]), tuple(map(str, raw["prefix"])),
            tuple((str(digest), int(length)) for digest, length in raw["chunks"]),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
