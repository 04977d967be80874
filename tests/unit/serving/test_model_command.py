"""`laoka model` as an operator types it: words on stdout and stderr, exit status, both languages."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from laoka.cli.main import cli
from laoka.serving import download
from laoka.serving.manifest import MANIFEST
from tests.unit.serving.hub import COMMIT, REPO, Hub, serve

FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 100}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(download, "BACKOFF_S", 0.01)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with serve(Hub(dict(FILES))) as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


def laoka(store: Path, *words: str, lang: str = "en") -> Result:
    return CliRunner().invoke(cli, ["--lang", lang, "model", "--store", str(store), *words], standalone_mode=False)


def failure(store: Path, *words: str) -> str:
    done = laoka(store, *words)
    assert done.exception is not None and "\n" not in str(done.exception.message)  # type: ignore[attr-defined]
    return str(done.exception.message)  # type: ignore[attr-defined]


def usb(tmp_path: Path) -> tuple[Path, str]:
    folder = tmp_path / "usb"
    folder.mkdir()
    (folder / "config.json").write_text('{"other": 1}')
    (folder / "model.safetensors").write_bytes(b"w" * 100)
    return folder, laoka(tmp_path, "manifest", str(folder)).stdout.strip()


def test_from_nothing_to_in_use_and_back(hub: Hub, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert "no model yet" in laoka(store, "list").stderr
    plan = laoka(store, "fetch", REPO, "--revision", "main", "--dry")
    assert f"{REPO} at {COMMIT}: 2 files" in plan.stdout and not store.exists()
    first = laoka(store, "fetch", REPO, "--revision", COMMIT)
    assert first.stdout.strip() == str(store / "org--model" / COMMIT)
    assert "is here already" in laoka(store, "fetch", REPO, "--revision", COMMIT).stderr
    folder, revision = usb(tmp_path)
    laoka(store, "fetch", "own/tuned", "--revision", revision, "--from", str(folder))
    assert laoka(store, "use", REPO).stdout == f"{REPO}@{COMMIT[:12]} is in use\n"
    assert "in use already" in laoka(store, "use", REPO).stderr
    dry = laoka(store, "use", "own/tuned", "--dry")
    assert str(store / "own--tuned" / revision) in dry.stderr and (store / "current").resolve().name == COMMIT
    assert laoka(store, "use", "own/tuned").return_value == 0
    assert (store / "current").resolve().name == revision and (store / "previous").resolve().name == COMMIT
    assert laoka(store, "rollback").return_value == 0
    assert (store / "current").resolve().name == COMMIT and (store / "previous").resolve().name == revision
    rows = json.loads(laoka(store, "list", "--json").stdout)
    assert {row["model"]: row["used_as"] for row in rows} == {REPO: ["current"], "own/tuned": ["previous"]}
    table = laoka(store, "list").stdout.splitlines()
    assert table[0].split()[0] == "MODEL" and COMMIT[:12] in table[1] and "current" in table[1]


def test_rot_is_found_told_and_mended(hub: Hub, tmp_path: Path) -> None:
    laoka(tmp_path, "fetch", REPO, "--revision", COMMIT)
    laoka(tmp_path, "use", REPO)
    assert "every SHA-256 right" in laoka(tmp_path, "verify").stderr
    path = tmp_path / "org--model" / COMMIT / "model.safetensors"
    path.write_bytes(FILES["model.safetensors"][:-1] + b"x")
    bad = laoka(tmp_path, "verify", "--json")
    assert bad.return_value == 1 and list(json.loads(bad.stdout)[f"{REPO}@{COMMIT}"]) == ["model.safetensors"]
    assert f"laoka model verify {REPO}@{COMMIT[:12]} --repair" in bad.stderr
    hub.asked.clear()
    # Where it came from was noted: HF_ENDPOINT and all.
    mended = laoka(tmp_path, "verify", "--repair")
    assert mended.return_value == 0 and {name for name, _ in hub.asked} == {"model.safetensors"}
    assert laoka(tmp_path, "verify", "--all").return_value == 0


def test_a_model_with_a_file_missing_is_not_switched_to(hub: Hub, tmp_path: Path) -> None:
    laoka(tmp_path, "fetch", REPO, "--revision", COMMIT)
    (tmp_path / "org--model" / COMMIT / "model.safetensors").unlink()
    assert "is missing: laoka model verify" in failure(tmp_path, "use", REPO)
    assert not (tmp_path / "current").exists()


def test_prune_asks_and_keeps_what_is_in_use(hub: Hub, tmp_path: Path) -> None:
    store, revisions = tmp_path / "store", []
    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"w" * (number + 1))
        revisions.append(laoka(store, "manifest", str(folder)).stdout.strip())
        laoka(store, "fetch", "own/m", "--revision", revisions[-1], "--from", str(folder))
    laoka(store, "use", f"own/m@{revisions[0]}")
    laoka(store, "use", f"own/m@{revisions[1]}")

    def here() -> set[str]:
        return {path.name for path in (store / "own--m").iterdir() if not path.name.startswith(".")}

    assert laoka(store, "prune", "--dry").return_value == 0 and here() == set(revisions)
    refused = laoka(store, "prune")
    assert refused.return_value == 1 and "--yes" in refused.stderr and here() == set(revisions)
    done = laoka(store, "prune", "--yes", "--json")
    assert {row["revision"] for row in json.loads(done.stdout)} == set(revisions[2:]) and here() == set(revisions[:2])
    assert "nothing to remove" in laoka(store, "prune").stderr


def test_what_goes_wrong_is_one_line(hub: Hub, tmp_path: Path) -> None:
    assert "no model is here yet: laoka model fetch ORG/NAME" in failure(tmp_path, "use", "org/other")
    assert "ORG/NAME" in failure(tmp_path, "fetch", "nonsense", "--revision", "0" * 40)
    assert "write PATH=SHA256" in failure(tmp_path, "fetch", REPO, "--revision", COMMIT, "--pin", "x=1")
    assert "name a revision" in failure(tmp_path, "fetch", REPO)
    assert laoka(tmp_path, "rollback").return_value == 1
    hub.files["config.json"] = b"[]"
    hub.wrong["config.json"] = [b"()"] * 9
    assert "run again to resume" in failure(tmp_path, "fetch", REPO, "--revision", COMMIT)
    shown = laoka(tmp_path, "list")
    assert "not whole yet" in shown.stdout


def test_it_speaks_chinese(hub: Hub, tmp_path: Path) -> None:
    assert "还没有模型" in laoka(tmp_path, "list", lang="zh").stderr
    laoka(tmp_path, "fetch", REPO, "--revision", COMMIT)
    assert "已切换到" in laoka(tmp_path, "use", REPO, lang="zh").stdout


def test_a_folder_that_can_not_be_written_to_is_told(tmp_path: Path) -> None:
    folder, revision = usb(tmp_path)
    assert len(revision) == 64 and (folder / MANIFEST).is_file()
    assert os.geteuid() != 0 or laoka(tmp_path, "manifest", str(folder)).stdout.strip() == revision
