"""The model store: a revision is visible only whole, resumes, names what is wrong, mends what rotted, prunes what is idle."""

from __future__ import annotations

import fcntl
import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.serving import download, model_store
from laoka.serving.download import retry_after_s
from laoka.serving.manifest import MANIFEST, ModelError, make_manifest
from laoka.serving.model_source import parse_source
from laoka.serving.model_store import Revision, Wish, fetch, find, look, repair, revisions, to_prune, verify
from laoka.serving.switch import set_link
from tests.unit.serving.hub import COMMIT, OTHER_COMMIT, REPO, Hub, serve, sha256

WEIGHTS = bytes(range(256)) * 5000
FILES = {"config.json": b"{}", "sub/weights.safetensors": WEIGHTS, "other.safetensors": b"0123" * 4000}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "BACKOFF_S", 0.01)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve(Hub(dict(FILES))) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A plain folder with a manifest, as on a USB disk."""
    place = tmp_path / "usb"
    for path, content in FILES.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(content)
    (place / MANIFEST).write_text(make_manifest(place))
    return place


def wish(*sources: str, revision: str = COMMIT, pins: dict[str, str] | None = None) -> Wish:
    return Wish(REPO, revision, tuple(parse_source(source, REPO, {}) for source in sources), pins or {})


def revision_of(folder: Path) -> str:
    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()


def web(hub: Hub, folder: Path) -> Wish:
    hub.files[MANIFEST] = (folder / MANIFEST).read_bytes()
    return wish(f"{hub.url}/folder", revision=revision_of(folder))


def visible(store: Path) -> list[str]:
    return sorted(path.name for path in (store / "org--model").iterdir() if not path.name.startswith("."))


# ---- every kind of source gives the same files --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hf", "modelscope"])
def test_a_hub_gives_a_whole_revision(hub: Hub, tmp_path: Path, kind: str) -> None:
    target = fetch(tmp_path, wish(f"{kind}+{hub.url}"))
    assert target == tmp_path / "org--model" / COMMIT and visible(tmp_path) == [COMMIT]
    assert {path: (target / path).read_bytes() for path in FILES} == FILES
    assert verify(target) == {}
    assert json.loads((target / MANIFEST).read_text())["revision"] == COMMIT


def test_web_folder_and_local_folder_give_a_whole_revision(hub: Hub, folder: Path, tmp_path: Path) -> None:
    for number, wanted in enumerate((web(hub, folder), wish(str(folder), revision=revision_of(folder)))):
        target = fetch(tmp_path / str(number), wanted)
        assert verify(target) == {} and target.name == revision_of(folder)


def test_hub_and_modelscope_make_the_same_manifest(hub: Hub, tmp_path: Path) -> None:
    texts = {(fetch(tmp_path / kind, wish(f"{kind}+{hub.url}")) / MANIFEST).read_text() for kind in ("hf", "modelscope")}
    assert len(texts) == 1


def test_what_is_whole_is_not_asked_for_again(hub: Hub, tmp_path: Path) -> None:
    fetch(tmp_path, wish(f"hf+{hub.url}"))
    hub.asked.clear()
    assert fetch(tmp_path, wish("hf+http://127.0.0.1:9")).name == COMMIT
    assert hub.asked == []


def test_files_come_at_once(hub: Hub, tmp_path: Path) -> None:
    """Both weights wait for each other at the server: a fetch of one at a time would never end."""
    meeting = threading.Barrier(2, timeout=10)
    wanted = {"sub/weights.safetensors", "other.safetensors"}

    class Meeting(dict[str, bytes]):
        def get(self, path: str, default: object = None) -> bytes:  # type: ignore[override]
            if path in wanted:
                meeting.wait()
            return FILES[path]

    hub.files = Meeting(FILES)
    assert verify(fetch(tmp_path, wish(f"hf+{hub.url}"), parallel=2)) == {}


# ---- what servers do to a download --------------------------------------------------------------------------------------


def test_a_connection_that_is_reset_is_resumed_where_it_was(hub: Hub, tmp_path: Path) -> None:
    path = "sub/weights.safetensors"
    hub.cut_at[path] = [400_000, 300_000, 1]
    assert verify(fetch(tmp_path, wish(f"hf+{hub.url}"))) == {}
    ranges = hub.asked_for(path)
    assert ranges[0] is None and len(ranges) == 4
    begun = [int((part or "bytes=0-").removeprefix("bytes=").rstrip("-")) for part in ranges]
    assert begun == sorted(begun) and begun[-1] > 0


def test_a_line_that_drops_more_often_than_there_are_tries_still_gets_there(hub: Hub, tmp_path: Path) -> None:
    hub.cut_at["sub/weights.safetensors"] = [100_000] * (download.TRIES + 3)
    assert verify(fetch(tmp_path, wish(f"hf+{hub.url}"))) == {}


def test_a_server_that_always_cuts_at_once_is_given_up(hub: Hub, tmp_path: Path) -> None:
    hub.cut_at["config.json"] = [0] * 50
    with pytest.raises(ModelError, match=rf"config\.json: .*{download.TRIES} tries in a row"):
        fetch(tmp_path, wish(f"hf+{hub.url}"))
    assert visible(tmp_path) == [] and len(hub.asked_for("config.json")) == download.TRIES


def test_a_server_that_can_not_resume_sends_the_file_anew(hub: Hub, tmp_path: Path) -> None:
    hub.no_range = True
    hub.cut_at["sub/weights.safetensors"] = [400_000]
    assert verify(fetch(tmp_path, wish(f"hf+{hub.url}"))) == {}


@pytest.mark.parametrize("wait", ["0", "Wed, 21 Oct 2015 07:28:00 GMT", None, "soon"])
@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_waited_for(hub: Hub, tmp_path: Path, status: int, wait: str | None) -> None:
    hub.statuses["sub/weights.safetensors"] = [(status, wait)] * 3
    said: list[str] = []
    assert verify(fetch(tmp_path, wish(f"hf+{hub.url}"), say=said.append)) == {}
    assert any(f"HTTP {status}" in line for line in said)


def test_a_server_that_asks_to_wait_for_hours_is_left(hub: Hub, tmp_path: Path) -> None:
    hub.statuses["config.json"] = [(429, "86400")]
    with pytest.raises(ModelError, match="asks to wait 86400 s"):
        fetch(tmp_path, wish(f"hf+{hub.url}"))


def test_certificates_are_the_systems_unless_the_environment_names_others(tmp_path: Path) -> None:
    system = tmp_path / "ca.crt"
    assert download.trusted({}, system) is True
    system.touch()
    assert download.trusted({}, system) == str(system)
    assert download.trusted({"CURL_CA_BUNDLE": "/c"}, system) == "/c"
    assert download.trusted({"CURL_CA_BUNDLE": "/c", "REQUESTS_CA_BUNDLE": "/r"}, system) == "/r"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120.0),
        (" 0 ", 0.0),
        ("Thu, 01 Jan 1970 00:02:00 GMT", 60.0),
        ("Thu, 01 Jan 1970 00:00:01 GMT", 0.0),
        ("x", None),
        (None, None),
        ("-5", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str | None, seconds: float | None) -> None:
    assert retry_after_s(value, 60.0) == seconds


def test_a_file_cut_short_on_the_server_is_told_and_nothing_is_visible(hub: Hub, tmp_path: Path) -> None:
    hub.short["sub/weights.safetensors"] = 1000
    with pytest.raises(ModelError, match=r"has 1000 bytes, the file should have 1280000"):
        fetch(tmp_path, wish(f"hf+{hub.url}"))
    assert visible(tmp_path) == []


def test_a_wrong_file_is_fetched_once_more(hub: Hub, tmp_path: Path) -> None:
    hub.wrong["sub/weights.safetensors"] = [WEIGHTS[::-1]]
    said: list[str] = []
    assert verify(fetch(tmp_path, wish(f"hf+{hub.url}"), say=said.append)) == {}
    assert any("fetching it anew" in line for line in said)


@pytest.mark.parametrize("path", ["config.json", "sub/weights.safetensors"])
def test_a_wrong_file_is_never_visible(hub: Hub, tmp_path: Path, path: str) -> None:
    hub.wrong[path] = [FILES[path][::-1]] * 9
    with pytest.raises(ModelError, match=rf"{path}: (SHA-256|git's id) [0-9a-f]+, not [0-9a-f]+.*run again"):
        fetch(tmp_path, wish(f"hf+{hub.url}"))
    assert visible(tmp_path) == []


def test_what_one_source_gives_wrong_another_gives_right(hub: Hub, tmp_path: Path) -> None:
    with serve(Hub(dict(FILES))) as second:
        hub.wrong["sub/weights.safetensors"] = [WEIGHTS[::-1]] * 9
        del hub.files["other.safetensors"]
        hub.files["other.safetensors"] = FILES["other.safetensors"]
        hub.statuses["other.safetensors"] = [(404, None)] * 9
        assert verify(fetch(tmp_path, wish(f"hf+{hub.url}", f"modelscope+{second.url}"))) == {}
        assert {path for path, _ in second.asked} == {"sub/weights.safetensors", "other.safetensors"}


def test_a_source_that_does_not_answer_is_passed_over(hub: Hub, tmp_path: Path) -> None:
    said: list[str] = []
    target = fetch(tmp_path, wish("hf+http://127.0.0.1:9", f"hf+{hub.url}"), say=said.append)
    assert verify(target) == {} and any("connection refused" in line for line in said)


def test_all_that_no_source_said_is_told(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"connection refused.*; .*no pinned|connection refused.*; .*not there"):
        fetch(tmp_path, wish("hf+http://127.0.0.1:9", str(tmp_path / "nothing")))


# ---- resuming, room, two at once ----------------------------------------------------------------------------------------


def test_an_interrupted_fetch_is_resumed(hub: Hub, tmp_path: Path) -> None:
    hub.wrong["config.json"] = [b"[]"] * 9
    with pytest.raises(ModelError):
        fetch(tmp_path, wish(f"hf+{hub.url}"))
    partial = tmp_path / "org--model" / f".partial-{COMMIT}"
    left = partial / "sub" / "weights.safetensors"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(WEIGHTS[:700_001])
    assert [(item.revision, item.whole) for item in revisions(tmp_path)] == [(COMMIT, False)]
    hub.wrong.clear()
    hub.asked.clear()
    assert verify(fetch(tmp_path, wish(f"hf+{hub.url}"))) == {}
    assert hub.asked_for("sub/weights.safetensors") == ["bytes=700001-"]
    assert not partial.exists()


def test_a_damaged_beginning_is_fetched_anew(hub: Hub, tmp_path: Path) -> None:
    partial = tmp_path / "org--model" / f".partial-{COMMIT}" / "sub"
    partial.mkdir(parents=True)
    (partial / "weights.safetensors").write_bytes(b"rot" * 100)
    assert verify(fetch(tmp_path, wish(f"hf+{hub.url}"))) == {}


def test_an_interrupted_fetch_goes_on_without_a_listing(hub: Hub, tmp_path: Path) -> None:
    """The hub's own pages may be away while the files are not: a mirror of files alone is enough then."""
    hub.wrong["config.json"] = [b"[]"] * 9
    with pytest.raises(ModelError):
        fetch(tmp_path, wish(f"hf+{hub.url}"))
    plain = tmp_path / "plain"
    for path, content in FILES.items():
        (plain / path).parent.mkdir(parents=True, exist_ok=True)
        (plain / path).write_bytes(content)
    assert verify(fetch(tmp_path, wish(str(plain)))) == {}


def test_a_full_disk_is_told_before_the_first_byte(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spare = model_store.SPARE_BYTES
    free = spare + sum(map(len, FILES.values())) - 1
    monkeypatch.setattr(model_store.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free})())
    with pytest.raises(ModelError, match="free some space"):
        fetch(tmp_path, wish(f"hf+{hub.url}"))
    assert hub.asked == []
    free += 1
    assert verify(fetch(tmp_path, wish(f"hf+{hub.url}"))) == {}


def test_two_fetches_of_one_model_do_not_meet(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "org--model").mkdir()
    with (tmp_path / "org--model" / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match="another laoka is at work"):
            fetch(tmp_path, wish(f"hf+{hub.url}"))


def test_a_look_writes_nothing(hub: Hub, tmp_path: Path) -> None:
    listing, _, missing = look(tmp_path, wish(f"hf+{hub.url}", revision="main"))
    assert listing.revision == COMMIT and missing == sum(map(len, FILES.values()))
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_by_the_listing_comes_before_the_first_weight(hub: Hub, tmp_path: Path) -> None:
    def judge(listing: object, source: object) -> None:
        raise ModelError("not this format")

    with pytest.raises(ModelError, match="not this format"):
        fetch(tmp_path, wish(f"hf+{hub.url}"), judge=judge)
    assert hub.asked == []


# ---- pins ---------------------------------------------------------------------------------------------------------------


def test_a_pin_that_the_listing_contradicts_stops_with_both_values(hub: Hub, tmp_path: Path) -> None:
    pins = {"*weights.safetensors": "0" * 64}
    with pytest.raises(ModelError, match=f"{sha256(WEIGHTS)}, not the pinned {'0' * 64}"):
        fetch(tmp_path, wish(f"modelscope+{hub.url}", pins=pins))
    assert hub.asked == []


def test_a_pin_is_kept_where_the_hub_lists_no_sha256(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: SHA-256 {sha256(b'{}')}, not {'0' * 64}"):
        fetch(tmp_path, wish(f"hf+{hub.url}", pins={"config.json": "0" * 64}))
    assert verify(fetch(tmp_path, wish(f"hf+{hub.url}", pins={"config.json": sha256(b"{}")}))) == {}


def test_another_hubs_commit_stands_for_the_pinned_one_only_by_its_hashes(hub: Hub, tmp_path: Path) -> None:
    place = f"modelscope+{hub.url}#{REPO}@{OTHER_COMMIT}"
    with pytest.raises(ModelError, match="nothing pins its files"):
        fetch(tmp_path, wish(place))
    target = fetch(tmp_path, wish(place, pins={"*weights.safetensors": sha256(WEIGHTS)}))
    assert target.name == COMMIT and verify(target) == {}


# ---- verify and repair --------------------------------------------------------------------------------------------------


def test_rot_is_found_and_only_the_bad_files_are_fetched_again(hub: Hub, tmp_path: Path) -> None:
    wanted = wish(f"hf+{hub.url}")
    target = fetch(tmp_path, wanted)
    good = (target / "other.safetensors").stat().st_ino
    rotten = bytearray(WEIGHTS)
    rotten[4711] ^= 1
    (target / "sub" / "weights.safetensors").write_bytes(rotten)
    (target / "config.json").unlink()
    faults = verify(target)
    assert faults["config.json"] == "missing" and faults["sub/weights.safetensors"].startswith("SHA-256 ") and len(faults) == 2
    hub.asked.clear()
    repair(tmp_path, wanted, faults)
    assert verify(target) == {} and (target / "other.safetensors").stat().st_ino == good
    assert {path for path, _ in hub.asked} == set(faults)


def test_a_rotten_manifest_is_found_and_written_again(hub: Hub, tmp_path: Path) -> None:
    wanted = wish(f"hf+{hub.url}")
    target = fetch(tmp_path, wanted)
    text = (target / MANIFEST).read_text()
    (target / MANIFEST).write_text(text.replace('"size_bytes": 2\n', '"size_bytes": 3\n'))
    faults = verify(target)
    assert list(faults) == [MANIFEST] and "damaged" in faults[MANIFEST]
    hub.asked.clear()
    repair(tmp_path, wanted, faults)
    assert (target / MANIFEST).read_text() == text and hub.asked == []


def test_a_repair_that_fails_leaves_the_rest_as_it_was(hub: Hub, tmp_path: Path) -> None:
    wanted = wish(f"hf+{hub.url}")
    target = fetch(tmp_path, wanted)
    (target / "config.json").write_bytes(b"[]")
    hub.wrong["config.json"] = [b"()"] * 9
    with pytest.raises(ModelError):
        repair(tmp_path, wanted, verify(target))
    assert list(verify(target)) == ["config.json"] and (target / "config.json").read_bytes() == b"[]"


# ---- finding and pruning ------------------------------------------------------------------------------------------------


def item(model: str, number: int, used: tuple[str, ...] = (), whole: bool = True) -> Revision:
    return Revision(model, f"{number:040x}", Path(f"/x/{model}/{number}"), 1, whole, used, float(number), ())


def test_what_is_meant_is_found_by_link_name_and_beginning(hub: Hub, folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    target = fetch(store, wish(f"hf+{hub.url}"))
    fetch(store, wish(str(folder), revision=revision_of(folder)))
    set_link(store / "current", str(target))
    for words in ("current", f"org/model@{COMMIT[:8]}", COMMIT[:12], COMMIT):
        assert find(store, words).revision == COMMIT
    assert find(store, "current").used_as == ("current",)
    with pytest.raises(ModelError, match="names 2 revisions here"):
        find(store, "org/model")
    with pytest.raises(ModelError, match="names no revision here; there is: org/model@"):
        find(store, "org/other")


def test_pruning_keeps_the_newest_and_what_is_in_use() -> None:
    old = item("a/b", 1, ("current",))
    everything = [item("a/b", 5), item("a/b", 4), item("a/b", 3), item("a/b", 2, ("previous",)), old, item("c/d", 1)]
    assert [found.fetched_unix_s for found in to_prune(everything, 2)] == [5.0, 4.0, 3.0]
    assert [found.fetched_unix_s for found in to_prune(everything, 3)] == [4.0, 3.0]
    assert to_prune(everything, 5) == ()
    with pytest.raises(ModelError, match="at least 1"):
        to_prune(everything, 0)


USES: st.SearchStrategy[tuple[str, ...]] = st.sampled_from([(), ("current",), ("previous",), ("drafter",)])
REVISIONS = st.lists(st.builds(item, st.sampled_from(["a/b", "c/d"]), st.integers(0, 99), USES, st.booleans()), max_size=12)


@given(REVISIONS, st.integers(1, 5))
def test_pruning_never_takes_what_is_in_use_or_the_last_ones(everything: list[Revision], keep: int) -> None:
    gone = to_prune(everything, keep)
    assert not any(found.used_as or not found.whole for found in gone)
    for model in ("a/b", "c/d"):
        have = sum(found.whole and found.model_id == model for found in everything)
        left = have - sum(found.model_id == model for found in gone)
        assert left >= min(keep, have)


def test_what_a_link_points_to_is_not_removed_whatever_the_caller_believes(hub: Hub, tmp_path: Path) -> None:
    target = fetch(tmp_path, wish(f"hf+{hub.url}"))
    believed = revisions(tmp_path)[0]
    set_link(tmp_path / "current", str(target))
    with pytest.raises(ModelError, match="in use now"):
        model_store.remove(tmp_path, believed)
    (tmp_path / "current").unlink()
    model_store.remove(tmp_path, believed)
    assert revisions(tmp_path) == () and visible(tmp_path) == []
