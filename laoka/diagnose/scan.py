"""Reads a log of any size once, in constant memory, and notes where each signature of the catalogue stands in it.

All signatures are looked for at once (Aho-Corasick) in the text without white space and colours, so that a line which a terminal
wrapped is as good as a whole one. Lines near an error are then looked at again without what Docker or journald put before them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Protocol

import ahocorasick_rs

from laoka.catalog.failures import Failure, failures
from laoka.diagnose.lines import ANSI, Line, clean
from laoka.host.kernel_log import Xid, read_events

CHUNK_BYTES = 4 * 1024 * 1024
TAIL_BYTES = 64 * 1024
"""Kept from one chunk to the next: what stands across the border, and the other words of a signature."""
NEAR = 16_000
"""Characters (without white space) in which all texts of one signature stand: a traceback of several workers, interleaved."""
EVIDENCE_CHARS = 500
LINE_BYTES = 8192
WINDOWS = 400
"""So many lines with an error are looked at closely; what comes after them is found by the fast pass only."""
WINDOW_BEFORE, WINDOW_AFTER = 1, 8
UNCONFIRMED = 5000
MAX_HITS = 300
XID_LENGTH = 100
"""An Xid says more than any words of its line."""

_QUOTES = bytes.maketrans(b'`"', b"''")
_BLANK = b" \t\r\n\v\f\\"
_ERROR_WORDS = (
    "ERROR", "CRITICAL", "Error:", "AssertionError", "Exception:", "error:", "Traceback (most recent call last)",
    "Segmentation fault", "segfault at", "Exception in thread", "Fatal Python error", "terminate called", "Kernel panic",
    "Killed process", "NVRM:",
)  # fmt: skip
_STARTED = "Application startup complete"
_XID = "NVRM: Xid ("
_VERSION = re.compile(rb"vLLM (?:API server )?version:? ?v?([\w.+-]+)")
_ARGUMENTS = re.compile(rb"non-default args: (.{1,2000})")


class Readable(Protocol):
    """What a log is read from."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class Hit:
    """A signature's first place in one stretch between two good starts. `xid` is set for an Xid instead of a row's id."""

    key: str
    line_number: int
    evidence: str
    level: str = ""
    process: str = ""
    stretch: int = 0
    order: int = 0
    length: int = 0
    """How much of the line the signature explains: the longer one of two in a line says more."""
    count: int = 1
    xid: Xid | None = None


@dataclass(frozen=True)
class FirstError:
    """The first line that tells of an error."""

    line_number: int
    text: str


@dataclass(frozen=True)
class Scan:
    """What a log has in it, in the order of its lines."""

    name: str
    hits: tuple[Hit, ...] = ()
    first_error: FirstError | None = None
    lines: int = 0
    size_bytes: int = 0
    starts: int = 0
    version: str = ""
    arguments: str = ""


@dataclass(frozen=True)
class _Pattern:
    """What one pattern stands for: wordings of rows that begin with it, rows that it clears, or one of the special texts."""

    wordings: tuple[tuple[Failure, tuple[bytes, ...]], ...] = ()
    clears: tuple[str, ...] = ()
    special: str = ""


def squeeze(text: bytes) -> bytes:
    """Without white space, quotes alike."""
    return text.translate(_QUOTES, _BLANK)


@cache
def _patterns(*, with_errors: bool) -> tuple[ahocorasick_rs.BytesAhoCorasick, tuple[_Pattern, ...]]:
    found: dict[bytes, _Pattern] = {}

    def add(text: str, **change: object) -> None:
        key = squeeze(text.encode())
        old = found.get(key, _Pattern())
        found[key] = replace(
            old,
            wordings=(*old.wordings, *change.get("wordings", ())),  # type: ignore[misc]
            clears=(*old.clears, *change.get("clears", ())),  # type: ignore[misc]
            special=str(change.get("special", "")) or old.special,
        )

    for row in failures():
        for wording in row.wordings:
            add(wording[0], wordings=((row, tuple(squeeze(text.encode()) for text in wording)),))
        for text in row.cleared_by:
            add(text, clears=(row.id,))
    add(_STARTED, special="started")
    add(_XID, special="xid")
    for word in _ERROR_WORDS if with_errors else ():
        add(word, special="error")
    machine = ahocorasick_rs.BytesAhoCorasick(
        list(found), matchkind=ahocorasick_rs.MatchKind.Standard, implementation=ahocorasick_rs.Implementation.DFA
    )
    return machine, tuple(found.values())


class _Chunk:
    """A piece of the log, without colours, and the way back from a place in its squeezed text to a line."""

    BLOCK = 16 * 1024

    def __init__(self, text: bytes, first_line: int) -> None:
        self.text, self.squeezed, self.first_line = text, squeeze(text), first_line
        self._ends: list[int] = []
        self._newlines: list[int] = []

    def place(self, squeezed: int) -> int:
        """Where the character at `squeezed` stands in the text."""
        if not self._ends:
            total = newlines = 0
            for begin in range(0, len(self.text), self.BLOCK):
                piece = self.text[begin : begin + self.BLOCK]
                self._newlines.append(newlines)
                newlines += piece.count(b"\n")
                total += len(squeeze(piece))
                self._ends.append(total)
        block = bisect_right(self._ends, squeezed)
        start, left = block * self.BLOCK, squeezed - (self._ends[block - 1] if block else 0)
        width = self.BLOCK
        while width > 1:  # halve the block: squeezing half of it says on which side the character is
            width //= 2
            before = len(squeeze(self.text[start : start + width]))
            if before <= left:
                start, left = start + width, left - before
        return start

    def line_number(self, place: int) -> int:
        """The number of the line with this place, from 1, in the whole log."""
        block = place // self.BLOCK
        within = self.text.count(b"\n", block * self.BLOCK, place)
        known = self._newlines[block] if block < len(self._newlines) else self.text.count(b"\n", 0, block * self.BLOCK)
        return self.first_line + known + within

    def line_start(self, place: int) -> int:
        return self.text.rfind(b"\n", max(0, place - LINE_BYTES), place) + 1 or max(0, place - LINE_BYTES)

    def line(self, place: int) -> str:
        """The line with this place; of a progress bar, the state with it. Cut to LINE_BYTES on either side."""
        start = self.line_start(place)
        end = self.text.find(b"\n", place, place + LINE_BYTES)
        whole = self.text[start : end if end >= 0 else place + LINE_BYTES]
        begin = whole.rfind(b"\r", 0, place - start) + 1
        stop = whole.find(b"\r", place - start)
        return whole[begin : stop if stop > 0 else len(whole)].decode(errors="replace")

    def window(self, place: int) -> Iterator[tuple[int, str]]:
        """(place, line) of the lines around a place."""
        start = self.line_start(place)
        for _ in range(WINDOW_BEFORE):
            start = self.line_start(start - 1) if start > 0 else start
        for _ in range(WINDOW_BEFORE + 1 + WINDOW_AFTER):
            end = self.text.find(b"\n", start, start + LINE_BYTES)
            stop = end if end >= 0 else min(len(self.text), start + LINE_BYTES)
            yield start, self.text[start:stop].decode(errors="replace")
            if end < 0:
                return
            start = end + 1


@dataclass
class _Reader:
    """What is known of the log so far."""

    hits: dict[tuple[str, int], Hit] = field(default_factory=dict)
    first_error: FirstError | None = None
    stretch: int = 0
    order: int = 0
    windows: int = 0
    unconfirmed: int = 0
    last_window_line: int = 0

    @property
    def looks_for_errors(self) -> bool:
        return (self.first_error is None and self.unconfirmed < UNCONFIRMED) or self.windows < WINDOWS

    def take(self, chunk: _Chunk, seen: int) -> None:
        """Note what is new in a chunk: what ends within its first `seen` squeezed characters was noted before."""
        machine, patterns = _patterns(with_errors=self.looks_for_errors)
        for index, start, end in machine.find_matches_as_indexes(chunk.squeezed, overlapping=True):
            if end <= seen:
                continue
            pattern = patterns[index]
            for row, texts in pattern.wordings:
                self._wording(chunk, row, texts, start)
            for key in pattern.clears:
                for found in [found for found in self.hits if found[0] == key]:
                    del self.hits[found]
            if pattern.special == "started":
                self.stretch += 1
            elif pattern.special == "xid":
                self._xid(chunk, start)
            elif pattern.special == "error" and self.looks_for_errors:
                self._error(chunk, start)

    def _wording(self, chunk: _Chunk, row: Failure, texts: tuple[bytes, ...], start: int) -> None:
        known = self.hits.get((row.id, self.stretch))
        if known is not None:
            self.hits[row.id, self.stretch] = replace(known, count=known.count + 1)
            return
        if len(texts) > 1:
            near = chunk.squeezed[max(0, start - NEAR) : start + NEAR]
            if not all(text in near for text in texts[1:]):
                return
        place = chunk.place(start)
        self._note(row, texts, chunk.line_number(place), clean(chunk.line(place)))

    def _note(self, row: Failure, texts: tuple[bytes, ...], line_number: int, line: Line, count: int = 1) -> None:
        if len(self.hits) >= MAX_HITS:
            return
        self.order += 1
        self.hits[row.id, self.stretch] = Hit(
            row.id, line_number, line.text.strip()[:EVIDENCE_CHARS], line.level, line.process, self.stretch, self.order,
            sum(map(len, texts)), count,
        )  # fmt: skip

    def _xid(self, chunk: _Chunk, start: int) -> None:
        place = chunk.place(start)
        raw = clean(chunk.line(place)).text
        for event in read_events(raw[raw.find("NVRM") :] if "NVRM" in raw else raw):
            if not isinstance(event, Xid):
                continue
            key = (f"xid-{event.code} {event.address}", self.stretch)
            if (known := self.hits.get(key)) is not None:
                self.hits[key] = replace(known, count=known.count + 1)
            elif len(self.hits) < MAX_HITS:
                self.order += 1
                self.hits[key] = Hit(
                    f"xid-{event.code}", chunk.line_number(place), raw.strip()[:EVIDENCE_CHARS], "", "kernel", self.stretch,
                    self.order, XID_LENGTH, xid=event,
                )  # fmt: skip

    def _error(self, chunk: _Chunk, start: int) -> None:
        place = chunk.place(start)
        number = chunk.line_number(place)
        if self.first_error is None:
            line = clean(chunk.line(place))
            if line.is_error:
                self.first_error = FirstError(number, line.text.strip()[:EVIDENCE_CHARS])
            else:
                self.unconfirmed += 1
        if self.windows < WINDOWS and number > self.last_window_line:
            self.windows += 1
            self.last_window_line = number
            self._window(chunk, place)

    def _window(self, chunk: _Chunk, place: int) -> None:
        """The lines around an error again, each without what stands before its own words, as one text."""
        joined, starts, lines = b"", [], []
        for at, raw in chunk.window(place):
            line = clean(raw)
            starts.append(len(joined))
            lines.append((at, line))
            joined += squeeze(line.text.encode())
        machine, patterns = _patterns(with_errors=False)
        for index, start, _ in machine.find_matches_as_indexes(joined, overlapping=True):
            for row, texts in patterns[index].wordings:
                if (row.id, self.stretch) not in self.hits and all(text in joined for text in texts):
                    at, line = lines[bisect_right(starts, start) - 1]
                    self._note(row, texts, chunk.line_number(at), line, count=0)  # the fast pass counts it


def strip_colours(text: bytes) -> bytes:
    """Without ANSI sequences. A log has few different ones, so each is replaced everywhere at once, which is fast."""
    for _ in range(64):
        escape = text.find(b"\x1b")
        if escape < 0:
            return text
        match = ANSI.match(text, escape)
        text = text.replace(match[0], b"") if match else text[:escape] + text[escape + 1 :]
    return ANSI.sub(b"", text)


def scan(stream: Readable, name: str, on_bytes: Callable[[int], None] = lambda count: None) -> Scan:
    """Read a log to its end.

    Arguments: `stream` is read in pieces and never kept; `on_bytes` gets the number of bytes read so far.
    Errors: OSError of the stream.
    """
    reader = _Reader()
    tail, first_line, size, lines = b"", 1, 0, 0
    version = arguments = ""
    while data := stream.read(CHUNK_BYTES):
        size += len(data)
        lines += data.count(b"\n")
        text = strip_colours(tail + data)
        chunk = _Chunk(text, first_line)
        reader.take(chunk, len(squeeze(tail)))
        version = version or _first(_VERSION, text)
        arguments = arguments or _first(_ARGUMENTS, text)
        # The next chunk begins with the end of this one, at the beginning of a line where there is one.
        cut = max(0, len(text) - TAIL_BYTES)
        newline = text.find(b"\n", cut)
        cut = newline + 1 if cut and newline >= 0 else cut
        first_line += text.count(b"\n", 0, cut)
        tail = text[cut:]
        on_bytes(size)
        last = data
    if size and not last.endswith(b"\n"):
        lines += 1
    counted = [replace(hit, count=max(1, hit.count)) for hit in reader.hits.values()]
    hits = tuple(sorted(counted, key=lambda hit: (hit.line_number, -hit.length)))
    return Scan(name, hits, reader.first_error, lines, size, reader.stretch, version, arguments)


def _first(pattern: re.Pattern[bytes], text: bytes) -> str:
    match = pattern.search(text)
    return match[1].decode(errors="replace") if match else ""


def rows_of(hits: Iterable[Hit]) -> Mapping[str, Failure]:
    """The rows of the catalogue that hits are of."""
    wanted = {hit.key for hit in hits}
    return {row.id: row for row in failures() if row.id in wanted}
