"""Sources: written as people write them, listed as hubs list them, and no answer of a stranger's server that misleads."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.catalog.models import drafters
from laoka.serving.manifest import ModelError
from laoka.serving.model_names import wish_of
from laoka.serving.model_source import (
    RemoteFile,
    Source,
    SourceError,
    listing_of,
    parse_hf_tree,
    parse_modelscope_files,
    parse_source,
    read_part,
)
from laoka.serving.model_store import told
from tests.unit.serving.hub import COMMIT, OTHER_COMMIT, REPO, Hub, serve

HF = "https://huggingface.co"


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("hf", Source("hf", HF, REPO)),
        ("hf:other/name@abc", Source("hf", HF, "other/name", "abc")),
        ("hf-mirror", Source("hf", "https://hf-mirror.com", REPO)),
        ("modelscope", Source("modelscope", "https://modelscope.cn", REPO)),
        (f"modelscope:o/n@{OTHER_COMMIT}", Source("modelscope", "https://modelscope.cn", "o/n", OTHER_COMMIT)),
        ("hf+https://hub.example/", Source("hf", "https://hub.example", REPO)),
        ("hf+http://hub.example:8080#o/n@abc", Source("hf", "http://hub.example:8080", "o/n", "abc")),
        ("https://web.example/models/x/", Source("http", "https://web.example/models/x")),
        ("rsync://host/module/x", Source("rsync", "rsync://host/module/x")),
        ("ssh://root@10.0.0.5:2222/srv/m", Source("rsync", "root@10.0.0.5:/srv/m", port=2222)),
        ("ssh://nas/srv/m/", Source("rsync", "nas:/srv/m")),
        ("/mnt/usb/m", Source("folder", "/mnt/usb/m")),
        ("file:///mnt/usb/m", Source("folder", "/mnt/usb/m")),
    ],
)
def test_sources_as_people_write_them(text: str, source: Source) -> None:
    found = parse_source(text, REPO, {})
    assert found == source
    assert parse_source(told(found), "un/used", {}) == source  # what is noted on the disk is read again


def test_the_hubs_own_variable_names_another_hub() -> None:
    assert parse_source("hf", REPO, {"HF_ENDPOINT": "https://near.example/"}).base == "https://near.example"
    assert parse_source("hf-mirror", REPO, {"HF_ENDPOINT": "https://near.example/"}).base == "https://hf-mirror.com"


@pytest.mark.parametrize("text", ["", "huggingface", "models/x", "ssh://host", "ssh://-oProxyCommand=x/y", "hf:name", "ftp://h/x"])
def test_what_is_no_source_is_told_in_one_line(text: str) -> None:
    with pytest.raises(ModelError, match=r"^source .*(write|not ORG/NAME)"):
        parse_source(text, REPO, {})


FILES = {
    "config.json": b"{}",
    "sub/tokenizer.json": b"[]",
    "a.safetensors": b"w" * 2000,
    "b.safetensors": b"v" * 3000,
    "é.txt": b"x",
}


def test_a_hubs_pages_are_read_to_the_end() -> None:
    with serve(Hub(dict(FILES))) as hub:
        listing = listing_of(parse_source(f"hf+{hub.url}", REPO, {}), COMMIT)
    assert {file.path: file.size_bytes for file in listing.files} == {path: len(content) for path, content in FILES.items()}
    hashes = {file.path: (file.sha256 is not None, file.git_blob is not None) for file in listing.files}
    assert hashes["a.safetensors"] == (True, False) and hashes["config.json"] == (False, True)


@pytest.mark.parametrize("revision", ["main", "dedf8df68adf", COMMIT])
def test_a_branch_or_the_beginning_of_a_commit_becomes_the_commit(revision: str) -> None:
    with serve(Hub(dict(FILES))) as hub:
        assert listing_of(parse_source(f"hf+{hub.url}", REPO, {}), revision).revision == COMMIT


@pytest.mark.parametrize("revision", ["nobranch", "0123456789ab"])
def test_a_revision_that_is_not_there_is_told(revision: str) -> None:
    with serve(Hub(dict(FILES))) as hub, pytest.raises(SourceError, match=rf"{revision}|HTTP 404"):
        listing_of(parse_source(f"hf+{hub.url}", REPO, {}), revision)


def test_modelscope_lists_every_hash() -> None:
    with serve(Hub(dict(FILES))) as hub:
        listing = listing_of(parse_source(f"modelscope+{hub.url}", REPO, {}), OTHER_COMMIT)
        assert all(file.sha256 for file in listing.files) and len(listing.files) == len(FILES)
        with pytest.raises(SourceError, match="whole commit"):
            listing_of(parse_source(f"modelscope+{hub.url}", REPO, {}), "master")
        with pytest.raises(SourceError, match="revision not found"):
            listing_of(parse_source(f"modelscope+{hub.url}", REPO, {}), "0" * 40)


def test_a_page_of_a_proxy_is_no_listing() -> None:
    with serve(Hub({"x": b"<html>log in first</html>"})) as hub, pytest.raises(SourceError):
        listing_of(Source("http", f"{hub.url}/folder"), "0" * 64)


@pytest.mark.parametrize("scheme", ["hf", "modelscope"])
def test_parts_of_a_file_are_read_without_the_rest(scheme: str) -> None:
    with serve(Hub({**FILES, "a.safetensors": bytes(range(200)) * 20})) as hub:
        source = parse_source(f"{scheme}+{hub.url}", REPO, {})
        assert read_part(source, "a.safetensors", COMMIT, 5, 9) == bytes([5, 6, 7, 8])
        assert hub.asked == [("a.safetensors", "bytes=5-8")]


KEYS = st.sampled_from(["type", "path", "oid", "size", "lfs", "Path", "Size", "Sha256"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8), lambda x: st.lists(x, max_size=4) | st.dictionaries(KEYS, x)
)


@given(JSON)
def test_no_answer_breaks_the_readers_of_listings(content: Any) -> None:
    for read, wrapped in ((parse_hf_tree, content), (parse_hf_tree, [content]),
                          (parse_modelscope_files, content), (parse_modelscope_files, {"Data": {"Files": content}})):  # fmt: skip
        with contextlib.suppress(ModelError):
            assert all(isinstance(file, RemoteFile) for file in read(wrapped, "hub"))


@pytest.mark.parametrize(
    "entry",
    [
        {"type": "file", "path": "../x", "size": 1, "oid": "a" * 40},
        {"type": "file", "path": "x", "size": 1, "oid": "short"},
        {"type": "file", "path": "x", "oid": "a" * 40},
        {"type": "file", "path": "x", "size": 1, "oid": "a" * 40, "lfs": {"oid": "b" * 63, "size": 1}},
        {"type": "file", "path": "x", "size": -1, "oid": "a" * 40},
    ],
)
def test_a_listing_with_a_bad_entry_is_refused(entry: dict[str, object]) -> None:
    with pytest.raises(ModelError):
        parse_hf_tree([entry], "hub")


def test_the_catalogues_drafter_is_pinned_by_commit_and_hashes() -> None:
    drafter = drafters()["qwen3.8-27b-dflash2"]
    wish = wish_of("qwen3.8-27b-dflash2", None, ("hf-mirror", "modelscope"), env={})
    assert (wish.model_id, wish.revision) == (drafter.repo, drafter.revision)
    assert wish.pins == {"config.json": drafter.config_sha256, "*.safetensors": drafter.weights_sha256}
    assert wish.sources[1] == Source("modelscope", "https://modelscope.cn", drafter.repo, drafter.modelscope_revision)


def test_another_revision_has_none_of_the_catalogues_pins() -> None:
    wish = wish_of("qwen3.8-27b-dflash2", "f" * 40, ("modelscope",), env={})
    assert wish.pins == {} and wish.sources[0].revision is None


def test_a_name_without_revision_asks_for_one() -> None:
    with pytest.raises(ModelError, match="name a revision"):
        wish_of("org/model", None, ())
