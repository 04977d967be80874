"""The model store: a revision is visible only whole, resumes, and names what is wrong."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.sandbox.endpoint import make_handler
from laoka.serving import model_store
from laoka.serving.model_store import MANIFEST, ModelError, ModelFile, fetch, make_manifest, parse_manifest, use, verify

EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # of no bytes at all


def quiet(line: str) -> None:
    pass


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "weights.bin").write_bytes(bytes(range(256)) * 5000)
    (folder / MANIFEST).write_text(make_manifest(folder))
    return folder


@pytest.fixture
def url(source: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), make_handler(source / "alerts", source))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def revision_of(folder: Path) -> str:
    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()


def entry(**change: object) -> str:
    return json.dumps({"files": [{"path": "a", "size_bytes": 0, "sha256": EMPTY_SHA256, **change}]})


def test_manifest_lists_every_file_with_size_and_hash(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert parse_manifest(make_manifest(tmp_path)) == (ModelFile("empty", 0, EMPTY_SHA256),)


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../../up", "", ".", MANIFEST, "nul\0"])
def test_paths_that_leave_the_folder_are_refused(path: str) -> None:
    with pytest.raises(ModelError, match="not allowed"):
        parse_manifest(entry(path=path))


@pytest.mark.parametrize("change", [{"size_bytes": -1}, {"size_bytes": "5"}, {"size_bytes": True}, {"sha256": "ab"}, {"sha256": 7}])
def test_entries_without_size_or_hash_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=r"no (size|SHA-256)"):
        parse_manifest(entry(**change))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": []}', '{"files": [1]}', '{"files": {"a": 1}}', "\0"])
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(ModelError):
        parse_manifest(text)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_no_json_breaks_the_manifest_reader(value: object) -> None:
    for text in (json.dumps(value), json.dumps({"files": value})):
        with contextlib.suppress(ModelError):
            assert parse_manifest(text)


def test_fetch_by_http_and_by_folder_gives_the_same(source: Path, url: str, tmp_path: Path) -> None:
    revision = revision_of(source)
    for place in (url, str(source)):
        store = tmp_path / hashlib.sha256(place.encode()).hexdigest()[:8]
        folder = fetch(place, revision, store, quiet)
        assert folder == store / revision
        assert verify(folder) == {}
        assert sorted(path.name for path in store.iterdir()) == [revision]


def test_fetch_resumes_what_an_interrupted_run_left(source: Path, url: str, tmp_path: Path) -> None:
    revision = revision_of(source)
    partial = tmp_path / "store" / f".partial-{revision}" / "sub"
    partial.mkdir(parents=True)
    (partial / "weights.bin").write_bytes((bytes(range(256)) * 5000)[:700_001])
    assert verify(fetch(url, revision, tmp_path / "store", quiet)) == {}


def test_a_damaged_beginning_is_fetched_anew(source: Path, url: str, tmp_path: Path) -> None:
    revision = revision_of(source)
    partial = tmp_path / "store" / f".partial-{revision}" / "sub"
    partial.mkdir(parents=True)
    (partial / "weights.bin").write_bytes(b"rot" * 100)
    assert verify(fetch(url, revision, tmp_path / "store", quiet)) == {}


def test_another_manifest_is_refused_with_both_hashes(source: Path, url: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{revision_of(source)}, not the pinned {'0' * 64}"):
        fetch(url, "0" * 64, tmp_path / "store", quiet)


def test_a_wrong_file_is_never_visible(source: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "TRIES", 1)
    revision = revision_of(source)
    (source / "config.json").write_text("[]")  # changed after the manifest was made, same length
    with pytest.raises(ModelError, match=r"config\.json: SHA-256 .* not .*; run again"):
        fetch(url, revision, tmp_path / "store", quiet)
    assert not (tmp_path / "store" / revision).exists()


def test_a_full_disk_is_told_before_the_first_byte(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(ModelError, match="free some space"):
        fetch(str(source), revision_of(source), tmp_path / "store", quiet)


def test_verify_finds_rot_loss_and_a_swapped_manifest(source: Path, tmp_path: Path) -> None:
    folder = fetch(str(source), revision_of(source), tmp_path / "store", quiet)
    (folder / "config.json").unlink()
    weights = bytearray((folder / "sub" / "weights.bin").read_bytes())
    weights[4711] ^= 1
    (folder / "sub" / "weights.bin").write_bytes(weights)
    faults = verify(folder)
    assert faults["config.json"] == "missing" and faults["sub/weights.bin"].startswith("SHA-256 ")
    (folder / MANIFEST).write_text(make_manifest(folder))
    assert list(verify(folder)) == [MANIFEST]


def test_use_switches_in_one_step_and_refuses_what_is_not_there(source: Path, tmp_path: Path) -> None:
    fetch(str(source), revision_of(source), tmp_path / "store", quiet)
    use(tmp_path / "store", revision_of(source), tmp_path / "current")
    assert (tmp_path / "current" / "config.json").read_text() == "{}"
    with pytest.raises(ModelError, match="fetch it first"):
        use(tmp_path / "store", "f" * 64, tmp_path / "current")
    assert (tmp_path / "current").readlink() == tmp_path / "store" / revision_of(source)
