"""Starts as they were measured: what is kept, and what a next one may take."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.serving import starts


@pytest.mark.parametrize(
    ("measured_s", "deadline_s"),
    [((), 1200), ((95.0, 271.0), 1200), ((401.0,), 1260), ((500.5, 20.0), 1560), ((9000.0,), 7200)],
)
def test_three_times_the_longest_within_bounds(measured_s: tuple[float, ...], deadline_s: int) -> None:
    assert starts.deadline_s(measured_s) == deadline_s


def test_the_longest_stays_when_the_oldest_go(tmp_path: Path) -> None:
    path = tmp_path / "state" / "starts.json"
    assert starts.read(path) == ()
    for start_s in (600.0, *range(10, 40)):
        starts.add(path, start_s)
    found = starts.read(path)
    assert len(found) == starts.KEPT and found[0] == 600.0 and found[-1] == 39.0


@given(st.binary(max_size=60) | st.sampled_from([b"[]", b'{"starts_s": 3}', b'{"starts_s": ["x"]}', b'{"starts_s": [NaN, -1]}']))
def test_what_is_no_such_file_counts_as_none(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("starts") / "starts.json"
    path.write_bytes(content)
    assert starts.read(path) == ()
