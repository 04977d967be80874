"""The outbox: in order, once, past dead channels, across restarts, and never more than the cap."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from laoka.agent import outbox
from laoka.agent.clock import Now
from laoka.agent.outbox import Addresses, Outbox, channel_name, read_urls

PHONE, MAIL = "json://127.0.0.1/phone-secret", "json://127.0.0.1/mail-secret"


class Channels:
    """Stands for the services: takes messages, or refuses them while a channel is in `down`."""

    def __init__(self) -> None:
        self.got: list[tuple[str, str]] = []
        self.down: set[str] = set()

    def __call__(self, url: str, title: str, body: str, kind: str) -> bool:
        if url in self.down:
            return False
        self.got.append((url, title))
        return True


@pytest.fixture
def channels() -> Channels:
    return Channels()


def box(folder: Path, per_hour: int = 20) -> Outbox:
    return Outbox(folder, per_hour=per_hour)


def test_in_order_and_once(tmp_path: Path, channels: Channels) -> None:
    out = box(tmp_path)
    for name in "abc":
        assert out.put(name, "opened", name.upper(), "body")
    assert not out.put("b", "opened", "B again", "body")
    assert out.waiting == 3
    out.deliver(
        Addresses(
            (
                PHONE,
                MAIL,
            )
        ),
        channels,
    )
    out.deliver(
        Addresses(
            (
                PHONE,
                MAIL,
            )
        ),
        channels,
    )
    assert [title for url, title in channels.got if url == PHONE] == ["A", "B", "C"]
    assert [title for url, title in channels.got if url == MAIL] == ["A", "B", "C"]
    assert (out.waiting, out.delivered_total) == (0, 6)


def test_a_dead_channel_holds_back_only_itself(tmp_path: Path, channels: Channels, monkeypatch: pytest.MonkeyPatch) -> None:
    out = box(tmp_path)
    out.put("a", "opened", "A", "")
    out.put("b", "opened", "B", "")
    channels.down = {PHONE}
    wait_s = out.deliver(
        Addresses(
            (
                PHONE,
                MAIL,
            )
        ),
        channels,
    )
    assert channels.got == [(MAIL, "A"), (MAIL, "B")]
    assert (out.waiting, out.failing()) == (2, {channel_name(PHONE): 1})
    assert 0 < wait_s <= outbox.BACKOFF_S[0]
    channels.down = set()
    out.deliver(
        Addresses(
            (
                PHONE,
                MAIL,
            )
        ),
        channels,
    )
    assert len(channels.got) == 2  # not before its time
    now_s = outbox.time.monotonic()
    monkeypatch.setattr(outbox.time, "monotonic", lambda: now_s + 10)
    out.deliver(
        Addresses(
            (
                PHONE,
                MAIL,
            )
        ),
        channels,
    )
    assert channels.got[2:] == [(PHONE, "A"), (PHONE, "B")]
    assert (out.waiting, out.failing()) == (0, {})


def test_what_waits_survives_a_restart_and_what_was_delivered_does_not_come_again(tmp_path: Path, channels: Channels) -> None:
    out = box(tmp_path)
    out.put("a", "opened", "A", "body")
    channels.down = {PHONE}
    out.deliver(
        Addresses(
            (
                PHONE,
                MAIL,
            )
        ),
        channels,
    )
    again = box(tmp_path)
    assert (again.waiting, again.put("a", "opened", "A", "body")) == (1, False)
    channels.down = set()
    again.deliver(
        Addresses(
            (
                PHONE,
                MAIL,
            )
        ),
        channels,
    )
    assert channels.got == [(MAIL, "A"), (PHONE, "A")]
    third = box(tmp_path)
    assert (third.waiting, third.put("a", "opened", "A", "body")) == (0, False)
    assert third.put("b", "opened", "B", "body")
    third.deliver(Addresses((PHONE,)), channels)
    assert channels.got[-1] == (PHONE, "B")


def test_files_are_for_root_only_and_hold_no_address(tmp_path: Path, channels: Channels) -> None:
    out = box(tmp_path)
    out.put("a", "opened", "A", "body")
    out.put("b", "opened", "B", "body")
    channels.down = {PHONE}
    out.deliver(
        Addresses(
            (
                PHONE,
                MAIL,
            )
        ),
        channels,
    )
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 2
    for path in files:
        assert path.stat().st_mode & 0o777 == 0o600
        assert "secret" not in path.read_text()
    assert "secret" not in channel_name(PHONE)


def test_the_cap_holds_back_and_sums_up(tmp_path: Path, channels: Channels, monkeypatch: pytest.MonkeyPatch) -> None:
    out = box(tmp_path, per_hour=2)
    for name in "abcd":
        out.put(name, "opened", name.upper(), "body")
    assert (out.waiting, out.held) == (2, 2)
    assert not out.release(lambda titles: ("S", ",".join(titles)))
    again = box(tmp_path, per_hour=2)  # the cap counts across a restart
    assert (again.waiting, again.held) == (2, 2)
    now_s = outbox.time.monotonic()
    monkeypatch.setattr(outbox.time, "monotonic", lambda: now_s + outbox.HOUR_S + 1)
    assert again.release(lambda titles: (f"{len(titles)} held", ",".join(titles)))
    again.deliver(Addresses((PHONE,)), channels)
    assert [title for _, title in channels.got] == ["A", "B", "2 held"]
    assert (again.held, again.release(lambda titles: ("S", ""))) == (0, False)
    assert not box(tmp_path).put("c", "opened", "C", "body")


def test_a_full_disk_does_not_stop_an_alert(tmp_path: Path, channels: Channels, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outbox, "write_atomic", full)
    out = box(tmp_path)
    assert out.put("a", "opened", "A", "body")
    out.deliver(Addresses((PHONE,)), channels)
    assert channels.got == [(PHONE, "A")]
    assert any("No space left" in line for line in out.faults)


def test_a_broken_file_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "00000001_a.json").write_text("{")
    (tmp_path / "00000002_b.json").write_text(json.dumps({"name": "b"}))
    out = box(tmp_path)
    assert (out.waiting, len(out.faults)) == (0, 2)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".unreadable", ".unreadable"]


def test_the_queue_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "PENDING_MAX", 3)
    out = box(tmp_path, per_hour=100)
    for number in range(5):
        out.put(f"n{number}", "opened", "t", "b")
    assert (out.waiting, out.dropped) == (3, 2)


def test_without_a_channel_alerts_do_not_pile_up(tmp_path: Path, channels: Channels) -> None:
    out = box(tmp_path)
    out.put("a", "opened", "A", "body")
    out.deliver(Addresses(), channels)
    assert (out.waiting, channels.got) == (0, [])


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    path = tmp_path / "urls"
    path.write_text(f"# phone\n{PHONE}\n\n  {MAIL}  \n{PHONE}\n")
    assert read_urls(str(path)) == ((PHONE, MAIL), str(path))
    with pytest.raises(OSError, match="No such file"):
        read_urls(str(tmp_path / "none"))
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(credentials))
    assert read_urls(str(path))[0] == (PHONE, MAIL)
    (credentials / "alert-urls").write_text(f"{MAIL}\n")
    assert read_urls(str(path)) == ((MAIL,), str(credentials / "alert-urls"))


class Clock:
    """Time of a test: both clocks, moved by hand."""

    def __init__(self, unix_s: float = 1_796_000_000.0) -> None:
        self.unix_s, self.mono_s = unix_s, 1000.0

    def __call__(self) -> Now:
        return Now(self.unix_s, self.mono_s)

    def on(self, seconds: float) -> None:
        self.unix_s += seconds
        self.mono_s += seconds


def local_time(hour: int) -> float:
    """Some day's hour in local time."""
    return time.mktime((2026, 12, 2, hour, 0, 0, 0, 0, -1))


def summary(titles: Sequence[str]) -> tuple[str, str]:
    return f"{len(titles)} held", "\n".join(titles)


def test_an_endpoint_that_is_down_for_an_hour_gets_everything_once_and_in_order(tmp_path: Path, channels: Channels) -> None:
    clock = Clock()
    out = Outbox(tmp_path, per_hour=20, now=clock)
    channels.down = {PHONE}
    for minute in range(60):
        if minute % 10 == 0:
            out.put(f"a{minute}", "opened", f"A{minute}", "")
        out.deliver(Addresses((PHONE, MAIL)), channels)
        clock.on(60)
        if minute == 30:  # the host restarts meanwhile
            out = Outbox(tmp_path, per_hour=20, now=clock)
    channels.down = set()
    clock.on(outbox.BACKOFF_S[-1])
    out.deliver(Addresses((PHONE, MAIL)), channels)
    wanted = [f"A{minute}" for minute in range(0, 60, 10)]
    assert [title for url, title in channels.got if url == PHONE] == wanted
    assert [title for url, title in channels.got if url == MAIL] == wanted
    assert out.waiting == 0


@pytest.mark.parametrize("jump_s", [-3e8, 3e8])
def test_a_wall_clock_that_jumps_neither_frees_the_hour_nor_blocks_it(tmp_path: Path, channels: Channels, jump_s: float) -> None:
    clock = Clock()
    out = Outbox(tmp_path, per_hour=2, now=clock)
    out.put("a", "opened", "A", "")
    out.put("b", "opened", "B", "")
    clock.unix_s += jump_s
    out.put("c", "opened", "C", "")
    assert (out.waiting, out.held) == (2, 1)
    clock.on(3601)
    assert out.release(summary)
    assert (out.waiting, out.held) == (3, 0)


def test_severities_have_their_channels(tmp_path: Path, channels: Channels) -> None:
    addresses = outbox.parse_addresses(f"# who\ncritical = {PHONE}\n{MAIL}\nheartbeat = https://hc.example/x?a=b\n")
    assert (addresses.urls, addresses.heartbeat) == ((PHONE, MAIL), "https://hc.example/x?a=b")
    out = Outbox(tmp_path, per_hour=20)
    out.put("w", "opened", "W", "", severity="warning")
    out.put("c", "opened", "C", "", severity="critical")
    out.deliver(addresses, channels)
    assert channels.got == [(MAIL, "W"), (PHONE, "C"), (MAIL, "C")]
    assert out.waiting == 0


def test_an_address_with_an_equals_sign_is_no_route() -> None:
    url = "ntfys://host/topic?priority=high"
    assert outbox.parse_addresses(f"{url}\ncritical,warning={url}2\n") == Addresses(
        (url, f"{url}2"), {f"{url}2": frozenset({"critical", "warning"})}
    )


def test_in_quiet_hours_only_what_is_critical_is_sent(tmp_path: Path, channels: Channels) -> None:
    clock = Clock(local_time(23))
    out = Outbox(tmp_path, per_hour=20, quiet_hours="22:30-07:00", now=clock)
    out.put("w", "opened", "W", "", severity="warning", incident="i")
    out.put("c", "opened", "C", "", severity="critical")
    out.put("r", "recovered", "R", "", severity="warning", incident="i")
    assert not out.release(summary)
    out.deliver(Addresses((PHONE,)), channels)
    assert channels.got == [(PHONE, "C")]
    out = Outbox(tmp_path, per_hour=20, quiet_hours="22:30-07:00", now=clock)
    clock.on(8.5 * 3600)
    assert out.release(summary)
    out.deliver(Addresses((PHONE,)), channels)
    assert channels.got == [(PHONE, "C"), (PHONE, "2 held")]


@pytest.mark.parametrize(
    ("hours", "minute", "quiet"),
    [
        ("", 0, False),
        ("22:30-07:00", 1350, True),
        ("22:30-07:00", 1349, False),
        ("22:30-07:00", 419, True),
        ("13:00-14:00", 840, False),
    ],
)
def test_quiet_hours(hours: str, minute: int, quiet: bool) -> None:
    assert outbox.is_quiet(hours, minute) is quiet


def test_the_same_warning_again_within_the_hour_waits_and_a_critical_one_does_not(tmp_path: Path) -> None:
    clock = Clock()
    out = Outbox(tmp_path, per_hour=20, now=clock)
    for name in "abc":
        out.put(f"w{name}", "opened", "the same", "", severity="warning")
        out.put(f"c{name}", "opened", "worse", "", severity="critical")
    assert (out.waiting, out.held) == (4, 2)
    assert not out.release(summary)
    clock.on(3601)
    assert out.release(summary)


def test_killed_between_the_channels_yes_and_the_note_it_comes_once_more_with_a_mark(tmp_path: Path, channels: Channels) -> None:
    out = box(tmp_path)
    out.put("a", "opened", "A", "")

    def killed(url: str, title: str, body: str, kind: str) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        out.deliver(Addresses((PHONE,)), killed)
    box(tmp_path).deliver(Addresses((PHONE,)), channels, "again? {title}")
    assert channels.got == [(PHONE, "again? A")]
