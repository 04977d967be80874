"""Following the kernel log live: /dev/kmsg, or a regular file that grows with records of the same format."""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from laoka.agent.kernel_log import KmsgRecord, Position, after_replacement, holds_nothing, interesting, parse_kmsg_record

RECORD_BYTES = 8192
READ_BYTES = 256 * 1024
FILE_POLL_S = 0.2
OPEN_AGAIN_S = 1.0
MAX_LINE_BYTES = 64 * 1024


def boot_id() -> str:
    """The kernel's name for this boot; empty where it can't be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


@dataclass
class Follower:
    """Where we are in the log. `records_total` and `overruns_total` count what came and what the kernel overwrote unread."""

    path: str
    position: Position
    fresh: bool
    """True on the very first run: what the log holds already is then history, not news."""
    fault: str = "not opened yet"
    records_total: int = 0
    overruns_total: int = 0

    def follow(self, stopped: Callable[[], bool], alive: Callable[[], None]) -> Iterator[KmsgRecord]:
        """New records that may matter, for ever. `alive` is called at least every second while the log can be read."""
        while not stopped():
            try:
                mode = Path(self.path).stat().st_mode
                yield from self._device(stopped, alive) if stat.S_ISCHR(mode) else self._file(stopped, alive)
            except OSError as error:
                self.fault = f"{self.path}: {error.strerror}"
                if error.errno == errno.ENOENT:
                    self.fresh = False  # a file that is not there yet: all that it will hold is news
                alive()
                time.sleep(OPEN_AGAIN_S)

    def _device(self, stopped: Callable[[], bool], alive: Callable[[], None]) -> Iterator[KmsgRecord]:
        boot = boot_id()
        if self.position.boot_id != boot:
            # Another boot: its records are all news, but for the very first run.
            self.position = Position(boot)
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if self.fresh:
                os.lseek(descriptor, 0, os.SEEK_END)
                self.fresh = False
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            while not stopped():
                self.fault = ""
                alive()
                poller.poll(1000)
                for _ in range(2000):  # a flood must not keep us from saying that we live
                    try:
                        data = os.read(descriptor, RECORD_BYTES)
                    except BlockingIOError:
                        break
                    except OSError as error:
                        if error.errno == errno.EPIPE:
                            self.overruns_total += 1
                            continue
                        raise
                    self.records_total += 1
                    record = parse_kmsg_record(data) if interesting(data) else None
                    if record and record.sequence > self.position.sequence:
                        self.position = replace(self.position, sequence=record.sequence)
                        yield record
        finally:
            os.close(descriptor)

    def _file(self, stopped: Callable[[], bool], alive: Callable[[], None]) -> Iterator[KmsgRecord]:
        with Path(self.path).open("rb", buffering=0) as stream:
            status = os.fstat(stream.fileno())
            known = self.position.inode == status.st_ino
            again = False
            if self.fresh:
                stream.seek(max(0, status.st_size - READ_BYTES))
                old = [record for line in stream.read(READ_BYTES).split(b"\n") if (record := parse_kmsg_record(line))]
                self.position = Position(boot_id(), old[-1].sequence if old else -1, status.st_ino, status.st_size)
                self.fresh = False
            elif not known or status.st_size < self.position.offset:
                again = self.position.sequence >= 0
                self.position = replace(self.position, inode=status.st_ino, offset=0)
            rest = b""
            stream.seek(self.position.offset)
            while not stopped():
                self.fault = ""
                alive()
                data = stream.read(READ_BYTES)
                if not data:
                    if self._replaced(stream.fileno()):
                        return
                    time.sleep(FILE_POLL_S)
                    continue
                whole, _, last = (rest + data).rpartition(b"\n")
                rest = last[-MAX_LINE_BYTES:]
                wanted: list[bytes] = []
                if whole:
                    self.records_total += whole.count(b"\n") + 1
                    # In a flood only what can matter is parsed, and the last line for its number.
                    wanted = whole.rsplit(b"\n", 1)[-1:]
                    if again:
                        wanted = whole.split(b"\n")
                    elif not holds_nothing(whole):
                        wanted = [line for line in whole.split(b"\n")[:-1] if interesting(line)] + wanted
                records = [record for line in wanted if (record := parse_kmsg_record(line))]
                if again:
                    records = list(after_replacement(records, self.position.sequence))
                    again = False
                self.position = replace(self.position, offset=stream.tell() - len(rest))
                for record in records:
                    self.position = replace(self.position, sequence=record.sequence)
                    if interesting(record.text.encode("utf-8", "replace")):
                        yield record

    def _replaced(self, descriptor: int) -> bool:
        """Whether the file was truncated or another one took its place: it is then opened again."""
        now = Path(self.path).stat()
        ours = os.fstat(descriptor)
        return now.st_ino != ours.st_ino or now.st_dev != ours.st_dev or ours.st_size < self.position.offset
