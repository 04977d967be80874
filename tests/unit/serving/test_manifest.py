"""Manifests: what is none is refused in one line, and one that rotted is known."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.serving.manifest import (
    MANIFEST,
    ModelError,
    ModelFile,
    git_blob_of,
    is_pinned,
    make_manifest,
    manifest_of_commit,
    parse_files,
    parse_manifest,
)

EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # of no bytes at all
EMPTY_BLOB = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"  # `git hash-object` of an empty file
COMMIT = "a" * 40


def entry(**change: object) -> str:
    return json.dumps({"files": [{"path": "a", "size_bytes": 0, "sha256": EMPTY_SHA256, **change}]})


def test_manifest_lists_every_file_with_size_and_hash(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert parse_files(make_manifest(tmp_path)) == (ModelFile("empty", 0, EMPTY_SHA256),)


def test_gits_id_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("what git says\n")
    assert git_blob_of(tmp_path / "empty") == EMPTY_BLOB
    said = subprocess.run(["git", "hash-object", tmp_path / "text"], capture_output=True, text=True, check=True, timeout=20)
    assert git_blob_of(tmp_path / "text") == said.stdout.strip()


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../../up", "", ".", MANIFEST, "nul\0", "two\nlines", 7, None])
def test_paths_that_leave_the_folder_are_refused(path: object) -> None:
    with pytest.raises(ModelError, match="not allowed"):
        parse_files(entry(path=path))


@pytest.mark.parametrize("change", [{"size_bytes": -1}, {"size_bytes": "5"}, {"size_bytes": True}, {"sha256": "ab"}, {"sha256": 7}])
def test_entries_without_size_or_hash_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=r"no (size|SHA-256)"):
        parse_files(entry(**change))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": []}', '{"files": [1]}', '{"files": {"a": 1}}', "\0", "[" * 10000])
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(ModelError):
        parse_files(text)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_no_json_breaks_the_manifest_reader(value: object) -> None:
    for text in (json.dumps(value), json.dumps({"files": value})):
        for revision in (COMMIT, hashlib.sha256(text.encode()).hexdigest()):
            with contextlib.suppress(ModelError):
                assert parse_manifest(text, revision).files


def test_a_manifests_own_hash_is_its_revision() -> None:
    text = entry()
    revision = hashlib.sha256(text.encode()).hexdigest()
    assert parse_manifest(text, revision).size_bytes == 0
    with pytest.raises(ModelError, match=f"{revision}, not the pinned {'0' * 64}"):
        parse_manifest(text, "0" * 64)


def test_a_commits_manifest_names_it_and_knows_its_own_damage() -> None:
    made = manifest_of_commit("org/model", COMMIT, [ModelFile("b", 1, "b" * 64), ModelFile("a", 2, "a" * 64)])
    assert [file.path for file in made.files] == ["a", "b"] and made.size_bytes == 3
    assert parse_manifest(made.text, COMMIT) == made
    with pytest.raises(ModelError, match="not of the pinned"):
        parse_manifest(made.text, "b" * 40)
    with pytest.raises(ModelError, match="damaged"):
        parse_manifest(made.text.replace('"size_bytes": 1', '"size_bytes": 9'), COMMIT)
    with pytest.raises(ModelError, match="damaged"):
        parse_manifest(made.text.replace("b" * 64, "c" * 64), COMMIT)


@pytest.mark.parametrize(
    ("revision", "pinned"), [(COMMIT, True), ("0" * 64, True), ("main", False), ("15d2e47bffe5", False), ("A" * 40, False)]
)
def test_only_a_whole_commit_or_a_hash_pins(revision: str, pinned: bool) -> None:
    assert is_pinned(revision) is pinned
