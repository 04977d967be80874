"""Whether the run that took a host's lock is still under way: by its process, its announced reboot, and the clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.host.deploy_lock import ALONE_S, LockFile, Owner, Stale, read_lock, read_owner, stale

NOW_S = 1_700_000_000
WITH_PROCESS, ALONE = ("b1", "12", "34", "r1", NOW_S), ("b1", "-", "-", "r1", NOW_S)
ANNOUNCED = (NOW_S, NOW_S + 600)


@pytest.mark.parametrize(
    ("lock", "owner", "why"),
    [
        (LockFile(*WITH_PROCESS), Owner("b1", "34", NOW_S + 90_000), None),  # however long it takes
        (LockFile(*WITH_PROCESS), Owner("b1", "", NOW_S + 1), "gone"),
        (LockFile(*WITH_PROCESS), Owner("b1", "35", NOW_S + 1), "gone"),  # another process got its number
        # A crash, or a reboot by anybody else: free from the first second of the new boot, whatever process has the number there.
        (LockFile(*WITH_PROCESS), Owner("b2", "34", NOW_S + 1), "boot"),
        # The run's own reboot: on the way down, in the new boot, and past what it gave itself.
        (LockFile(*WITH_PROCESS, ANNOUNCED), Owner("b1", "", NOW_S + 2), None),
        (LockFile(*WITH_PROCESS, ANNOUNCED), Owner("b2", "", NOW_S + 599), None),
        (LockFile(*WITH_PROCESS, ANNOUNCED), Owner("b2", "34", NOW_S + 600), "late"),
        (LockFile(*WITH_PROCESS, ANNOUNCED), Owner("b1", "34", NOW_S + 600), None),  # the reboot did not happen, the run lives
        (LockFile(*WITH_PROCESS, ANNOUNCED), Owner("b1", "", NOW_S + 600), "gone"),
        (LockFile(*WITH_PROCESS, ANNOUNCED), Owner("b2", "", NOW_S - 1), "late"),  # the board's clock fell back in the boot
        (LockFile(*ALONE), Owner("b1", "", NOW_S + ALONE_S - 1), None),
        (LockFile(*ALONE), Owner("b1", "", NOW_S + ALONE_S), "old"),
        (LockFile(*ALONE), Owner("b1", "", NOW_S - 1), "old"),
        (LockFile(*ALONE), Owner("b2", "", NOW_S + 1), "boot"),
    ],
)
def test_who_holds_it(lock: LockFile, owner: Owner, why: Stale | None) -> None:
    assert stale(lock, owner) == why


def test_the_file_is_read_and_a_damaged_one_is_none() -> None:
    second = f"b1 12 34 r1 {NOW_S}"
    assert read_lock(["{}", second]) == LockFile(*WITH_PROCESS)
    assert read_lock(["{}", second, f"reboot {ANNOUNCED[0]} {ANNOUNCED[1]}"]) == LockFile(*WITH_PROCESS, ANNOUNCED)
    for lines in ([], ["{}"], ["{}", ""], ["{}", "b1 12 34 r1"], ["{}", second, "reboot soon"]):
        assert read_lock(lines) is None
    assert read_owner(f"b1 {NOW_S} 34") == Owner("b1", "34", NOW_S)
    assert read_owner(f"b1 {NOW_S} ") == Owner("b1", "", NOW_S)
    assert read_owner("") is None and read_owner("b1") is None


@given(st.lists(st.text(), max_size=4), st.text())
def test_no_text_breaks_it(lines: list[str], line: str) -> None:
    lock, owner = read_lock(lines), read_owner(line)
    if lock is not None and owner is not None:
        stale(lock, owner)


@given(st.integers(0, 10**10), st.integers(0, 10**6))
def test_no_lock_of_another_boot_outlives_what_its_run_announced(now_s: int, span_s: int) -> None:
    lock = LockFile(*WITH_PROCESS, (NOW_S, NOW_S + span_s))
    assert (stale(lock, Owner("b2", "", now_s)) is None) == (NOW_S <= now_s < NOW_S + span_s)
