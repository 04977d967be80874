"""An engine's installation from a server that misbehaves: each fault has its clear error, and the engine that runs is not touched.

The wheel is a stand-in with the name, tags and modules of 1Cat-vLLM 1.5.1; pip, the environment and the server are real.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from laoka.serving import download, engine_install, engine_wheel
from laoka.serving.engine_install import (
    Options,
    check_glibc,
    constraints_of,
    fill_environment,
    find_python,
    install,
    install_commands,
    main,
    make_environment,
    site_packages,
    stamp_of,
)
from laoka.serving.engine_pin import RECORD, STAMP, EngineError, EnginePin, parse_pin
from laoka.serving.engine_wheel import Places, files_in, have_wheel
from laoka.serving.switch import set_link
from tests.unit.serving.engine_files import pin_of, python_312, stand_in_1cat, stand_in_torch, write_wheel
from tests.unit.serving.hub import Hub, serve, sha256


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No uv, no index, no settings of this machine: what is not in the test's own folders is not there."""
    monkeypatch.setattr(download, "BACKOFF_S", 0.01)
    monkeypatch.setattr(engine_install.shutil, "which", lambda name: None)
    monkeypatch.setattr(engine_install, "WHEELS", tmp_path / "fetched")
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return stand_in_1cat(tmp_path / "made")


@pytest.fixture
def release(wheel: Path) -> Iterator[Hub]:
    """The release page: the wheel and SHA256SUMS."""
    content = wheel.read_bytes()
    sums = f"{sha256(content)}  {wheel.name}\n"
    with serve(Hub({wheel.name: content, "SHA256SUMS": sums.encode()})) as hub:
        yield hub


@pytest.fixture
def engines(tmp_path: Path) -> Path:
    """A host on which another version runs."""
    folder = tmp_path / "engines"
    running = folder / "1cat-vllm-1.5.0"
    running.mkdir(parents=True)
    (running / STAMP).write_text("1cat-vllm 1.5.0 x\n")
    set_link(folder / "current", running.name)
    return folder


def pinned(wheel: Path, hub: Hub, **change: object) -> EnginePin:
    base = f"{hub.url}/folder"
    return pin_of(wheel, **{"wheel_url": f"{base}/{wheel.name}", "sums_url": f"{base}/SHA256SUMS", **change})


def untouched(engines: Path) -> bool:
    return [path.name for path in sorted(engines.iterdir())] == ["1cat-vllm-1.5.0", "current"] and (
        engines / "current" / STAMP
    ).exists()


@pytest.fixture(scope="module")
def empty_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with pip alone: making one takes seconds, copying it does not."""
    folder = tmp_path_factory.mktemp("environments") / "empty"
    assert make_environment(folder, python_312()[0], pin_of(stand_in_1cat(folder.parent)), Options(), print) == "pip"
    return folder


@pytest.fixture
def copied(empty_environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments are copies of an empty one."""

    def copy(folder: Path, *rest: object) -> str:
        shutil.copytree(empty_environment, folder, symlinks=True)
        return "pip"

    monkeypatch.setattr(engine_install, "make_environment", copy)


def options(engines: Path, house: Path | None = None, **change: object) -> Options:
    return replace(Options(engines, house, python=python_312()[0], live=False), **change)  # type: ignore[arg-type]


# ---- the whole way ------------------------------------------------------------------------------------------------------


def test_from_the_release_to_a_proven_environment_beside_the_one_that_runs(
    wheel: Path, release: Hub, engines: Path, tmp_path: Path
) -> None:
    house, said = tmp_path / "house", []
    stand_in_torch(house)
    pin = pinned(wheel, release)
    folder = install(pin, options(engines, house), said.append)
    assert folder == engines / "1cat-vllm-1.5.1" and stamp_of(folder) == pin.stamp
    assert (engines / "current").readlink() == Path("1cat-vllm-1.5.0")
    version = subprocess.run([folder / "bin" / "vllm", "--version"], capture_output=True, text=True, timeout=60)
    assert version.stdout == "1.5.1\n"
    record = json.loads((folder / RECORD).read_text())
    assert record["wheel_sha256"] == pin.wheel_sha256 and record["source"] == pin.wheel_url and record["installer"] == "pip"
    assert record["kernels"]["ok"] and record["kernels"]["verifier_width"] == 16
    assert any("SHA256SUMS: it has the pinned SHA-256 too" in line for line in said)
    assert (folder / "laoka-constraints.txt").read_text() == "torch==2.10.0\n"
    # Once more: nothing is asked for and nothing is made.
    release.asked.clear()
    made = (folder / STAMP).stat().st_mtime_ns
    assert install(pin, options(engines, house)) == folder
    assert release.asked == [] and (folder / STAMP).stat().st_mtime_ns == made


def test_a_full_folder_of_wheels_needs_no_network(copied: None, wheel: Path, engines: Path, tmp_path: Path) -> None:
    house = tmp_path / "house"
    stand_in_torch(house)
    wheel = stand_in_1cat(house)
    folder = install(pin_of(wheel, wheel_url="http://127.0.0.1:9/x.whl"), options(engines, house))
    assert json.loads((folder / RECORD).read_text())["source"] == str(house / wheel.name)


def test_a_folder_of_wheels_is_filled_once_and_then_needs_no_index(
    copied: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "simple" / "torch"
    torch = stand_in_torch(page)
    (page / "index.html").write_text(f'<a href="{torch.name}">{torch.name}</a>')
    house = tmp_path / "wheels of mine"
    wheel = stand_in_1cat(house)
    monkeypatch.setenv("PIP_INDEX_URL", f"file://{tmp_path}/simple")
    install(pin_of(wheel), options(tmp_path / "one", house))
    assert sorted(path.name for path in house.glob("*.whl")) == sorted([torch.name, wheel.name])
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    install(pin_of(wheel), options(tmp_path / "two", house))


def test_what_is_missing_is_told_and_nothing_is_left(
    copied: None, wheel: Path, release: Hub, engines: Path, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=r"1cat-vllm==1\.5\.1: installing failed: .*torch"):
        install(pinned(wheel, release), options(engines, tmp_path / "empty"))
    assert untouched(engines)


def test_a_separate_attention_package_is_removed_first(empty_environment: Path, wheel: Path, tmp_path: Path) -> None:
    house = tmp_path / "house"
    stand_in_torch(house)
    wheel = stand_in_1cat(house)
    other = write_wheel(house, "flash-attn-v100", "26.2", "py3-none-any", {"flash_attn_v100/__init__.py": b"old = True\n"})
    folder, pin, how = tmp_path / "env", pin_of(wheel), options(tmp_path, house)
    shutil.copytree(empty_environment, folder, symlinks=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--no-index", other]
    subprocess.run(pip, check=True, timeout=60)
    assert "old" in (site_packages(folder) / "flash_attn_v100" / "__init__.py").read_text()
    fill_environment(folder, wheel, pin, how, "pip", print)
    assert not list(site_packages(folder).glob("flash_attn_v100-*.dist-info"))
    assert engine_install.prove_environment(folder, pin).ok


# ---- what goes wrong, and that the running engine stays -----------------------------------------------------------------


def test_another_hash_stops_with_both_values(wheel: Path, release: Hub, engines: Path) -> None:
    pin = pinned(wheel, release, sums_url=None)
    release.files[wheel.name] = wheel.read_bytes()[:-1] + b"x"
    seen = sha256(release.files[wheel.name])
    with pytest.raises(EngineError, match=rf"SHA-256 {seen} \(\d+ bytes\), pinned is {pin.wheel_sha256}: not installed"):
        install(pin, options(engines))
    assert untouched(engines)


def test_a_release_page_that_says_another_hash_stops_with_both_values(wheel: Path, release: Hub, engines: Path) -> None:
    release.files["SHA256SUMS"] = f"{'ab' * 32}  {wheel.name}\n".encode()
    pin = pinned(wheel, release)
    with pytest.raises(EngineError, match=rf"SHA-256 {'ab' * 32} there, pinned is {pin.wheel_sha256}: one of the two is wrong"):
        install(pin, options(engines))
    assert untouched(engines) and release.asked_for(wheel.name) == []


@pytest.mark.parametrize("sums", [None, b"", b"<html>no</html>", b"00  nothing"])
def test_a_release_page_that_says_nothing_leaves_the_pinned_hash_to_decide(
    wheel: Path, release: Hub, tmp_path: Path, sums: bytes | None
) -> None:
    if sums is None:
        del release.files["SHA256SUMS"]
    else:
        release.files["SHA256SUMS"] = sums
    said: list[str] = []
    path, _ = have_wheel(pinned(wheel, release), tmp_path / "w", Places(), said.append)
    assert path.is_file() and any("going by the pinned SHA-256 alone" in line for line in said)


def test_a_truncated_wheel_is_told_by_its_size(wheel: Path, release: Hub, engines: Path) -> None:
    release.short[wheel.name] = 1000
    with pytest.raises(EngineError, match=rf"the server has 1000 bytes, the file should have {wheel.stat().st_size}"):
        install(pinned(wheel, release, wheel_bytes=wheel.stat().st_size), options(engines))
    assert untouched(engines)


def test_a_truncated_wheel_of_unknown_size_is_told_by_its_hash(wheel: Path, release: Hub, engines: Path) -> None:
    release.files[wheel.name] = wheel.read_bytes()[:1000]
    with pytest.raises(EngineError, match=r"SHA-256 [0-9a-f]{64} \(1000 bytes\), pinned is"):
        install(pinned(wheel, release, sums_url=None), options(engines))
    assert untouched(engines)


def test_a_server_that_resets_the_connection_is_resumed(wheel: Path, release: Hub, tmp_path: Path) -> None:
    release.cut_at[wheel.name] = [70_000, 10]
    path, source = have_wheel(pinned(wheel, release), tmp_path / "w", Places())
    assert path.read_bytes() == wheel.read_bytes() and source.startswith(release.url)
    assert [part is None for part in release.asked_for(wheel.name)] == [True, True, False] or len(
        release.asked_for(wheel.name)
    ) == 3


def test_a_server_that_resets_every_time_is_given_up_and_the_next_run_goes_on(wheel: Path, release: Hub, engines: Path) -> None:
    release.cut_at[wheel.name] = [66_000] + [0] * 50
    with pytest.raises(EngineError, match=r"can't be had: .*reset.*; put it into"):
        install(pinned(wheel, release), options(engines))
    assert untouched(engines)
    release.cut_at.clear()
    release.asked.clear()
    have_wheel(pinned(wheel, release), engine_install.WHEELS, Places())
    assert [part for part in release.asked_for(wheel.name) if part]


@pytest.mark.parametrize("width", [8, None])
def test_old_kernels_are_refused_before_anything_is_installed(engines: Path, tmp_path: Path, width: int | None) -> None:
    old = stand_in_1cat(tmp_path / "old", width)
    with serve(Hub({old.name: old.read_bytes()})) as hub:
        pin = pin_of(old, wheel_url=f"{hub.url}/folder/{old.name}")
        with pytest.raises(EngineError, match="takes 8 query tokens, DFlash2 needs 16"):
            install(pin, options(engines))
    assert untouched(engines)


def test_what_is_no_wheel_is_told(engines: Path, tmp_path: Path) -> None:
    house = tmp_path / "house"
    house.mkdir()
    path = house / "1cat_vllm-1.5.1-cp312-cp312-linux_x86_64.whl"
    path.write_bytes(b"<html>rate limit</html>")
    with pytest.raises(EngineError, match="not a wheel, or damaged"):
        install(pin_of(path), options(engines, house))
    assert untouched(engines)


def test_a_damaged_file_in_the_folder_of_wheels_stops_with_both_values(wheel: Path, engines: Path, tmp_path: Path) -> None:
    pin = pin_of(wheel)
    house = tmp_path / "house"
    house.mkdir()
    (house / wheel.name).write_bytes(b"rot")
    with pytest.raises(EngineError, match=rf"SHA-256 {sha256(b'rot')}, pinned is {pin.wheel_sha256}.*take the file away"):
        install(pin, options(engines, house))


def test_an_environment_of_another_wheel_is_not_rebuilt_under_the_server_that_runs_it(wheel: Path, engines: Path) -> None:
    running = engines / "1cat-vllm-1.5.1"
    running.mkdir()
    (running / STAMP).write_text("1cat-vllm 1.5.1 of another wheel\n")
    set_link(engines / "current", running.name)
    with pytest.raises(EngineError, match=r"made from another wheel .*switch to another version first"):
        install(pin_of(wheel), options(engines))
    assert (running / STAMP).exists()


def test_what_a_killed_run_left_is_made_anew(copied: None, wheel: Path, engines: Path, tmp_path: Path) -> None:
    house = tmp_path / "house"
    stand_in_torch(house)
    wheel = stand_in_1cat(house)
    left = engines / "1cat-vllm-1.5.1" / "lib"
    left.mkdir(parents=True)
    (left / "half").write_text("x")
    folder = install(pin_of(wheel), options(engines, house))
    assert not (folder / "lib" / "half").exists() and stamp_of(folder)


def test_the_command_prints_the_folder_or_one_line(
    wheel: Path, release: Hub, engines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release.files[wheel.name] += b"x"
    words = ["--pin", pinned(wheel, release).to_json(), "--engines", str(engines), "--wheelhouse", str(tmp_path / "w")]
    assert main([*words, "--only-wheel"]) == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err.splitlines()[-1].startswith("engine: ") and "Traceback" not in told.err
    release.files[wheel.name] = wheel.read_bytes()
    assert main([*words, "--only-wheel"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"]["ok"]


# ---- where the wheel comes from -----------------------------------------------------------------------------------------


def test_the_mirror_comes_before_the_release(wheel: Path, release: Hub, tmp_path: Path) -> None:
    with serve(Hub({wheel.name: wheel.read_bytes()})) as mirror:
        _, source = have_wheel(pinned(wheel, release), tmp_path / "a", Places(mirror=f"{mirror.url}/folder/"))
        assert source.startswith(mirror.url) and release.asked == []
        del mirror.files[wheel.name]
        _, source = have_wheel(pinned(wheel, release), tmp_path / "b", Places(mirror=f"{mirror.url}/folder"))
        assert source.startswith(release.url)


def test_a_package_index_is_read_in_both_its_forms(wheel: Path, tmp_path: Path) -> None:
    """By PEP 503 and PEP 691; the index's own hash has to be the pinned one too."""
    digest = sha256(wheel.read_bytes())
    html = f'<html><body><a href="../../folder/{wheel.name}#sha256={digest}" data-requires-python="&gt;=3.12">x</a></body></html>'
    as_json = json.dumps({"files": [{"filename": wheel.name, "url": f"../../folder/{wheel.name}", "hashes": {"sha256": digest}}]})
    for number, page in enumerate((html, as_json)):
        with serve(Hub({wheel.name: wheel.read_bytes(), "1cat-vllm/": page.encode()})) as hub:
            pin = pin_of(wheel, package="1cat_vllm")
            path, _ = have_wheel(pin, tmp_path / str(number), Places(index=f"{hub.url}/cdn"))
            assert path.is_file()
            hub.files["1cat-vllm/"] = page.replace(digest, "cd" * 32).encode()
            with pytest.raises(EngineError, match=f"{'cd' * 32} there, pinned is {digest}"):
                have_wheel(pin, tmp_path / f"{number}x", Places(index=f"{hub.url}/cdn"))


@pytest.mark.parametrize("text", ["", "{}", '{"files": [1, {"url": 2}]}', "<a>x</a>", '<a href="http://[x">y</a>', "[" * 5000])
def test_no_page_breaks_the_reader_of_an_index(text: str) -> None:
    assert files_in(text, "http://index/simple/x/") == {}


# ---- what the host has --------------------------------------------------------------------------------------------------


def test_an_old_glibc_is_told_before_anything_is_fetched(wheel: Path, release: Hub, engines: Path) -> None:
    pin = pinned(wheel, release, glibc_min="9.99")
    with pytest.raises(EngineError, match=r"needs glibc 9\.99, this host has .*ReVolta"):
        install(pin, options(engines))
    assert release.asked == [] and untouched(engines)
    check_glibc(replace(pin, glibc_min="2.38"), "2.39")
    check_glibc(replace(pin, glibc_min="2.9"), "2.36")  # by numbers, not by letters
    with pytest.raises(EngineError):
        check_glibc(replace(pin, glibc_min="2.38"), "2.36")


def test_a_python_of_another_version_is_told(wheel: Path) -> None:
    pin = pin_of(wheel, python=("3.99",))
    with pytest.raises(EngineError, match=r"runs on CPython 3\.99; engine_python .* is 3\."):
        find_python(pin, Options(python=sys.executable))
    with pytest.raises(EngineError, match="there is no such Python"):
        find_python(pin, Options(python="/nowhere/python"))
    assert find_python(pin, Options()) == "3.99"  # uv is asked for it


def test_pip_and_uv_are_told_the_same(wheel: Path, tmp_path: Path) -> None:
    pin = pin_of(wheel, pins=("tilelang==0.1.10",))
    assert constraints_of(pin) == "torch==2.10.0\ntilelang==0.1.10\n"
    folder, plain, house = tmp_path / "env", Options(), Options(house=tmp_path / "house", torch_index="https://torch/whl/cu128")
    named = f"1cat-vllm @ {wheel.as_uri()}#sha256={pin.wheel_sha256}"
    (pip,) = install_commands(folder, wheel, pin, plain, None)
    assert pip[0] == str(folder / "bin" / "python") and pip[-1] == named and "-c" in pip
    offline, fill, again = install_commands(folder, wheel, pin, house, None)
    assert "--no-index" in offline and offline == again and fill[0] == "flock" and "https://torch/whl/cu128" in fill
    offline, online = install_commands(folder, wheel, pin, house, "/x/uv")
    assert "--no-index" in offline and online[-1] == named and "--index" in online
    (cpu,) = install_commands(folder, wheel, replace(pin, torch_backend="cpu"), plain, "/x/uv")
    assert cpu[cpu.index("--torch-backend") + 1] == "cpu"


NUMBER = '{"name": 1, "version": "1", "wheel_file": "x.whl", "wheel_sha256": "0"}'


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "x"}', NUMBER])
def test_what_is_no_pin_is_told(text: str) -> None:
    with pytest.raises(EngineError):
        parse_pin(text)


def test_a_pin_survives_its_way_to_the_host(wheel: Path) -> None:
    pin = pin_of(wheel, pins=("a==1",), wheel_bytes=5)
    assert parse_pin(pin.to_json()) == pin
    with pytest.raises(EngineError, match="unknown key"):
        parse_pin(pin.to_json().replace('"pins"', '"pinns"'))
    with pytest.raises(EngineError, match="no wheel's name"):
        parse_pin(pin.to_json().replace(wheel.name, "../../x.whl"))


def test_the_index_of_this_host_is_pips_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    assert engine_wheel.own_index() == "https://mirror.example/simple"
