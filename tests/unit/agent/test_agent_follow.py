"""Following a kernel log that is a file: growth, truncation, replacement, not there yet, and where it was left off."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from laoka.agent import follow
from laoka.agent.follow import Follower
from laoka.agent.kernel_log import KmsgRecord, Position


def line(sequence: int, text: str = "NVRM: Xid (PCI:0000:03:00): 79, GPU has fallen off the bus.") -> str:
    return f"3,{sequence},100,-;{text}\n"


class Reader:
    """A follower in a thread, and what it found."""

    def __init__(self, path: Path, position: Position | None) -> None:
        self.follower = Follower(str(path), position or Position(), fresh=position is None)
        self.found: list[KmsgRecord] = []
        self.looks = 0
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        for record in self.follower.follow(self.stopped.is_set, self._alive):
            self.found.append(record)

    def _alive(self) -> None:
        self.looks += 1

    def sees(self, *sequences: int) -> bool:
        return until(lambda: [record.sequence for record in self.found] == list(sequences))

    def ready(self) -> None:
        assert until(lambda: self.looks > 1 and not self.follower.fault)

    def end(self) -> Position:
        self.stopped.set()
        self.thread.join(5)
        return self.follower.position


def until(condition: Callable[[], bool], deadline_s: float = 5) -> bool:
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


Start = Callable[[Path, Position | None], Reader]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(follow, "FILE_POLL_S", 0.01)
    monkeypatch.setattr(follow, "OPEN_AGAIN_S", 0.02)
    readers: list[Reader] = []

    def begin(path: Path, position: Position | None = None) -> Reader:
        readers.append(Reader(path, position))
        return readers[-1]

    yield begin
    for reader in readers:
        reader.end()


def add(path: Path, text: str) -> None:
    with path.open("a") as stream:
        stream.write(text)


def test_growth_and_half_a_line(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "kmsg"
    path.write_text(line(0))
    reader = start(path, None)
    reader.ready()
    add(path, line(1) + line(2, "usb 1-1: new device") + line(3)[:20])
    assert reader.sees(1)  # not 0: on the very first run that is history
    add(path, line(3)[20:])
    assert reader.sees(1, 3)


def test_a_file_that_is_not_there_yet(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "kmsg"
    reader = start(path, None)
    assert until(lambda: "No such file" in reader.follower.fault)
    path.write_text(line(0))
    assert reader.sees(0)


def test_truncation(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "kmsg"
    path.write_text("")
    reader = start(path, None)
    reader.ready()
    add(path, line(5) + line(6))
    assert reader.sees(5, 6)
    path.write_text(line(0))  # shorter, and numbered anew
    assert reader.sees(5, 6, 0)


def test_replacement_that_goes_on(tmp_path: Path, start: Start) -> None:
    path, other = tmp_path / "kmsg", tmp_path / "new"
    path.write_text("")
    reader = start(path, None)
    reader.ready()
    add(path, line(5))
    assert reader.sees(5)
    other.write_text(line(4) + line(5) + line(6))
    other.replace(path)
    assert reader.sees(5, 6)


def test_where_it_was_left_off(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "kmsg"
    path.write_text(line(0))
    first = start(path, None)
    first.ready()
    add(path, line(1))
    assert first.sees(1)
    position = first.end()
    add(path, line(2))
    second = start(path, position)
    assert second.sees(2)
    add(path, line(3))
    assert second.sees(2, 3)
    position = second.end()
    # Another boot of a host whose log is a file: the log goes on, so nothing old is told again.
    third = start(path, replace(position, boot_id="another"))
    add(path, line(4))
    assert third.sees(4)


def test_a_flood_of_corrected_errors_is_read_past(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "kmsg"
    path.write_text("")
    reader = start(path, None)
    reader.ready()
    aer = "pcieport 0000:00:03.0: PCIe Bus Error: severity=Correctable, type=Physical Layer, (Receiver ID)"
    add(path, "".join(line(number, aer) for number in range(20_000)) + line(20_000))
    assert reader.sees(20_000)
    assert reader.follower.position.sequence == 20_000
