"""The lock file, the hashes of releases, and the two commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from laoka.catalog.engines import engines
from laoka.cli.lock import gather_hashes, wanted_engines
from laoka.cli.main import cli
from laoka.fleet.inventory import HostEntry, InventoryUnread, load_inventory
from laoka.fleet.requests import request_of
from laoka.host import sections
from laoka.host.report import HostReport
from laoka.stack.from_report import facts_of
from laoka.stack.lock import LockError, make_lock, moved, parse_lock, read_lock, to_toml, write_lock
from laoka.stack.request import Request, RequestError
from laoka.stack.resolve import Stack, resolve, unlisted
from laoka.stack.sums import MAX_SUMS_BYTES, SumsError, fetch_text, hashes_in, online_hashes, parse_sums
from tests.unit.stack.asking import request

HEX = "ab" * 32
ONECAT = [engine for engine in engines() if engine.name == "1cat-vllm"]
V154, V151 = next(e for e in ONECAT if e.version == "1.5.4"), next(e for e in ONECAT if e.version == "1.5.1")
INVENTORY = """
print("an inventory may print")
pcie = [{"bdf": "0000:03:00.0", "device_id": "10de:1db6"}, {"bdf": "0000:04:00.0", "device_id": "10de:1db6"}]
sxm2 = [{"device_id": "10de:1db1"}, {"device_id": "10de:1db1"}]
tiny = {"model": "tiny-qwen3", "os_release": "debian-12", "context_tokens": 4096}
lab = (
    [
        ("tower", {"expected_gpus": pcie}),
        ("twin", {"expected_gpus": [{"device_id": card["device_id"]} for card in pcie]}),
        ("small", {"expected_gpus": sxm2, "serve_flags": {"max-model-len": 16384}}),
    ],
    {"model_id": "QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4"},
)
cpu = [("sandbox", {"engine_name": "vllm-cpu", "engine_version": "0.32.0", **tiny})]
"""


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    path = tmp_path / "lab.py"
    path.write_text(INVENTORY)
    return path


@cache
def loaded(text: str) -> tuple[HostEntry, ...]:
    """An inventory's hosts: each text is loaded once, as it takes a second."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lab.py"
        path.write_text(text)
        return load_inventory(path)


def hosts(path: Path) -> dict[str, Request]:
    return {entry.name: request_of(entry.name, entry.data, {}) for entry in loaded(path.read_text())}


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args], obj=None, standalone_mode=False)


def status(result: Result) -> int:
    """The exit status as laoka's entry point makes it of a command's return value."""
    if result.exception is not None:
        return int(getattr(result.exception, "exit_code", 99))
    return int(result.return_value or 0)


# --- inventories ---


def test_an_inventory_by_pyinfra_s_own_loader(inventory: Path) -> None:
    (inventory.parent / "group_data").mkdir()
    (inventory.parent / "group_data" / "all.py").write_text("streams = 2\nmodel_id = 'from all'\n")
    found = {entry.name: entry for entry in load_inventory(inventory)}
    assert list(found) == ["tower", "twin", "small", "sandbox"]
    assert found["tower"].data["streams"] == 2
    assert found["tower"].data["model_id"] == "QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4", (
        "the group's own data wins over group_data/all.py"
    )
    assert "lab" in found["tower"].groups and "cpu" in found["sandbox"].groups


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise RuntimeError('boom')", "boom"),
        ("import nothing_of_this_name", "nothing_of_this_name"),
        ("x = (", "SyntaxError"),
        ("x = 1", "no host in it"),
        ("import sys; sys.exit(3)", "can't be loaded"),
    ],
)
def test_an_inventory_that_fails_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(InventoryUnread, match=said) as caught:
        load_inventory(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(InventoryUnread, match="no such inventory file"):
        load_inventory(tmp_path / "none.py")


def test_what_an_inventory_asks_for() -> None:
    found = request_of(
        "h",
        {
            "expected_gpus": [{"device_id": "10de:1db6"}],
            "engine_name": "1cat-vllm",
            "engine_version": "1.5.1",
            "driver_branch": "580",
        },
        {},
    )
    assert (found.os_release, found.context_tokens, found.streams, found.speculative) == ("ubuntu-24.04", 32768, 1, "auto")
    assert (found.engine, found.engine_version, found.checkpoint.name) == ("1cat-vllm", "1.5.1", "qwen3.8-27b-quasar-nvfp4")
    assert found.driver is not None and found.driver.branch == "580"
    written = request_of("h", {"serve_flags": {"speculative-config": '{"method": "dflash2"}'}}, {})
    assert written.speculative_config == {"method": "dflash2"}


@pytest.mark.parametrize(
    "data",
    [
        {"expected_gpus": "two"},
        {"expected_gpus": [{"bdf": "0000:03:00.0"}]},
        {"expected_gpus": [1]},
        {"speculative": "dflash"},
        {"context_tokens": "8k"},
        {"streams": 0},
        {"model": "no-such"},
        {"model": 3},
        {"engine": "magic"},
        {"engine": "1cat-vllm=1.5.1"},
        {"driver": "newest!"},
        {"serve_flags": 3},
        {"serve_flags": {"speculative-config": "{"}},
        {"serve_flags": {"speculative-config": "[]"}},
    ],
)
def test_a_wrong_key_is_one_line_with_the_host(data: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"^host h: ") as caught:
        request_of("h", data, {})
    assert "\n" not in str(caught.value)


# --- SHA256SUMS ---


def test_sums_are_read_and_matched_to_engines() -> None:
    text = f"{HEX}  {V154.wheel_file}\n{V151.wheel_sha256} *{V151.wheel_file}\n{'cd' * 32}  other.tar.gz\n"
    found = hashes_in(parse_sums(text, "S"), ONECAT, "S")
    assert found == {"1cat-vllm==1.5.4": HEX, "1cat-vllm==1.5.1": V151.wheel_sha256}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# only a comment\n",
        "<html>not found</html>",
        f"{HEX[:-1]}  x.whl",
        f"{HEX} x.whl",
        f"{HEX}  a/../x.whl",
        f"{HEX}  x\n{'cd' * 32}  x",
    ],
)
def test_what_is_no_sums_file_is_refused(text: str) -> None:
    with pytest.raises(SumsError) as caught:
        parse_sums(text, "S")
    assert "\n" not in str(caught.value)


@given(st.text(max_size=100))
def test_no_text_crashes_the_sums_reader(text: str) -> None:
    try:
        found = parse_sums(text, "S")
    except SumsError:
        return
    assert found and all(len(value) == 64 for value in found.values())


def test_a_hash_that_contradicts_the_catalogue_stops_everything() -> None:
    with pytest.raises(SumsError, match="before that is explained"):
        hashes_in({V151.wheel_file or "": HEX}, ONECAT, "S")


class Release(BaseHTTPRequestHandler):
    """A release page: SHA256SUMS by version."""

    pages: dict[str, bytes] = {}

    def do_GET(self) -> None:
        body = self.pages.get(self.path)
        self.send_response(200 if body is not None else 404)
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def release_page() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Release)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(5)


def local(page: str) -> Any:
    """A fetch that asks the local page instead of the release's address, by the version in it."""
    return lambda url: fetch_text(f"{page}/{url.split('/download/')[1]}")


def test_the_newest_release_that_tells_its_hash_is_taken(release_page: str) -> None:
    Release.pages = {"/v1.5.4/SHA256SUMS": f"{HEX}  {V154.wheel_file}\n".encode()}
    requests = [request("4xv100-sxm2-32gb")]
    found = gather_hashes(requests, None, True, lambda line: None, local(release_page))
    assert found == {"1cat-vllm==1.5.4": HEX}
    outcome = resolve(request("4xv100-sxm2-32gb", hashes=found))
    assert isinstance(outcome, Stack) and outcome.engine.pin == "1cat-vllm==1.5.4" and outcome.wheel_sha256 == HEX


def test_without_its_page_the_next_is_asked_and_at_last_the_catalogue_stands(release_page: str) -> None:
    Release.pages = {
        "/v1.5.3/SHA256SUMS": f"{'cd' * 32}  {V154.wheel_file}\n".encode(),
        "/v1.5.2/SHA256SUMS": b"<html>",
        "/v1.5.1/SHA256SUMS": f"{V151.wheel_sha256}  {V151.wheel_file}\n".encode(),
    }
    told: list[str] = []
    found = gather_hashes([request("4xv100-sxm2-32gb")], None, True, told.append, local(release_page))
    assert found == {"1cat-vllm==1.5.1": V151.wheel_sha256}
    assert any("HTTP 404" in line for line in told) and any("is not in it" in line for line in told)


def test_a_page_that_contradicts_the_catalogue_stops(release_page: str) -> None:
    Release.pages = {"/v1.5.1/SHA256SUMS": f"{HEX}  {V151.wheel_file}\n".encode()}
    with pytest.raises(SumsError, match="before that is explained"):
        gather_hashes([request("4xv100-sxm2-32gb", engine="1cat-vllm==1.5.1")], None, True, lambda line: None, local(release_page))


def test_a_release_that_is_not_listed_by_its_own_page(release_page: str) -> None:
    wheel = unlisted(ONECAT, "1.6.0").wheel_file
    Release.pages = {"/v1.6.0/SHA256SUMS": f"{HEX}  {wheel}\n".encode()}
    asked = request("4xv100-sxm2-32gb", engine="1cat-vllm==1.6.0")
    assert gather_hashes([asked], None, True, lambda line: None, local(release_page)) == {"1cat-vllm==1.6.0": HEX}


def test_pages_are_bounded_and_a_dead_one_is_one_line(release_page: str) -> None:
    Release.pages = {"/big": b"x" * (MAX_SUMS_BYTES + 1)}
    with pytest.raises(SumsError, match="larger than"):
        fetch_text(f"{release_page}/big")
    with pytest.raises(SumsError, match="is the network there"):
        fetch_text("http://127.0.0.1:9/SHA256SUMS")
    assert online_hashes(ONECAT, lambda url: (_ for _ in ()).throw(SumsError("down"))) == {}


def test_nothing_is_asked_for_hosts_that_need_nothing() -> None:
    assert wanted_engines([request("none", "debian-12", model="tiny-qwen3", engine="vllm-cpu")]) == ()
    assert wanted_engines([request("none", "debian-12", model="tiny-qwen3")]) == ()


# --- the lock ---


def test_a_lock_is_the_same_text_for_the_same_inventory(inventory: Path, tmp_path: Path) -> None:
    lock, problems = make_lock(hosts(inventory))
    assert lock is not None and problems == ()
    text = to_toml(lock)
    assert text == to_toml(parse_lock(text, "x"))
    again, _ = make_lock(dict(reversed(hosts(inventory).items())))
    assert again is not None and to_toml(again) == text
    write_lock(tmp_path / "stack.lock.toml", lock)
    assert read_lock(tmp_path / "stack.lock.toml").group_of("twin").hosts == ("tower", "twin")


def test_one_stack_for_each_group_of_like_hosts(inventory: Path) -> None:
    lock, _ = make_lock(hosts(inventory))
    assert lock is not None
    assert {group.id: group.hosts for group in lock.groups} == {
        "2x v100-pcie-32gb, ubuntu-24.04": ("tower", "twin"),
        "2x v100-sxm2-16gb, ubuntu-24.04": ("small",),
        "no GPU, debian-12": ("sandbox",),
    }
    pinned = lock.group_of("tower").stack
    assert pinned["wheel_sha256"] == V151.wheel_sha256 and pinned["driver_version"] == "580.173.02" and pinned["torch"] == "2.10.0"
    assert lock.group_of("small").stack["serve_flags"]["max-model-len"] == "16384"
    cpu = lock.group_of("sandbox").stack
    assert (cpu["engine"], cpu["torch_backend"], cpu["dist_info_alias"]) == ("vllm-cpu", "cpu", "vllm==0.32.0+cpu")
    assert cpu["remove_after_install"] == ["torchvision", "torchaudio", "torchcodec"]
    with pytest.raises(LockError, match="host other is not in it"):
        lock.group_of("other")


def test_a_host_that_is_refused_keeps_everything_from_being_locked(inventory: Path) -> None:
    asked = hosts(inventory) | {"bad": request("rtx-4080")}
    lock, problems = make_lock(asked)
    assert lock is None and "bad: memory" in problems[0].say() and "bad" in problems[0].say("zh")


def test_without_a_hash_nothing_is_locked() -> None:
    lock, (problem,) = make_lock({"h": request("4xv100-sxm2-32gb", engine="1cat-vllm==1.5.4")})
    assert lock is None and "--online" in problem.say()


def test_what_is_not_known_to_fit_is_not_locked() -> None:
    lock, (problem,) = make_lock({"h": request("cmp-100-210")})
    assert lock is None and "memory is not known" in problem.say()


def test_what_moved_is_told(inventory: Path) -> None:
    lock, _ = make_lock(hosts(inventory))
    assert lock is not None
    assert moved(lock, hosts(inventory)) == ()
    assert "the catalogue moved on" in moved(lock, hosts(inventory), "sha256:other")[0].say()
    inventory.write_text(INVENTORY.replace("16384", "8192"))
    said = [item.say() for item in moved(lock, hosts(inventory))]
    assert said == [
        "the inventory moved on since it was locked",
        "small: serve_flags.max-model-len is locked as 16384, it would now be 8192",
    ]
    inventory.write_text(INVENTORY.replace('"twin"', '"other"'))
    said = [item.say() for item in moved(lock, hosts(inventory))]
    assert said[1:] == [f"{name} is in the inventory or in the lock, not in both" for name in ("other", "twin")]


def test_a_locked_release_stays_locked_offline() -> None:
    asked = {"h": request("4xv100-sxm2-32gb", hashes={"1cat-vllm==1.5.4": HEX})}
    lock, _ = make_lock(asked)
    assert lock is not None and lock.hashes == {"1cat-vllm==1.5.4": HEX}
    assert moved(lock, {"h": request("4xv100-sxm2-32gb", hashes=lock.hashes)}) == ()


@pytest.mark.parametrize(
    "change",
    [
        ("format = 1", "format = 2"),
        ("[[group]]", "[[grup]]"),
        (V151.wheel_sha256, "abc"),
        ('id = "', 'od = "'),
        ("catalogue", "katalog"),
    ],
)
def test_a_damaged_lock_is_one_line(inventory: Path, change: tuple[str, str]) -> None:
    lock, _ = make_lock(hosts(inventory))
    assert lock is not None
    with pytest.raises(LockError) as caught:
        parse_lock(to_toml(lock).replace(*change), "x.toml")
    assert "\n" not in str(caught.value) and "laoka lock" in str(caught.value)


@given(st.text(max_size=60))
def test_no_text_is_taken_for_a_lock(text: str) -> None:
    with pytest.raises(LockError):
        parse_lock(text, "x")


# --- the commands ---


def test_lock_and_check(inventory: Path, tmp_path: Path) -> None:
    path = tmp_path / "stack.lock.toml"
    assert status(run("--lang", "en", "lock", inventory, "--output", path, "--dry")) == 0 and not path.exists()
    written = run("--lang", "en", "lock", inventory, "--output", path)
    assert status(written) == 0 and "2x v100-pcie-32gb, ubuntu-24.04: 1cat-vllm==1.5.1" in written.stdout
    before = path.read_text()
    assert status(run("lock", inventory, "--output", path, "--check")) == 0
    inventory.write_text(INVENTORY.replace("16384", "8192"))
    checked = run("--lang", "en", "lock", inventory, "--output", path, "--check", "--json")
    assert status(checked) == 1 and json.loads(checked.stdout)["current"] is False
    inventory.write_text(INVENTORY.replace("10de:1db1", "10de:1b38"))
    refused = run("--lang", "en", "lock", inventory, "--output", path)
    assert status(refused) == 1 and "small: compute-capability" in refused.stderr and path.read_text() == before
    assert status(run("lock", tmp_path / "none.py")) == 2
    assert status(run("lock", inventory, "--output", tmp_path / "none.toml", "--check")) == 2


def test_lock_with_a_sums_file_and_again_without(inventory: Path, tmp_path: Path) -> None:
    path, sums = tmp_path / "stack.lock.toml", tmp_path / "SHA256SUMS"
    sums.write_text(f"{HEX}  {V154.wheel_file}\n")
    assert status(run("lock", inventory, "--output", path, "--sha256sums", sums)) == 0
    assert read_lock(path).group_of("tower").stack["engine_version"] == "1.5.4"
    assert status(run("lock", inventory, "--output", path, "--check")) == 0
    assert status(run("lock", inventory, "--output", path)) == 0, "what is locked stays locked without the file"
    assert read_lock(path).group_of("tower").stack["engine_version"] == "1.5.4"
    sums.write_text(f"{HEX}  other.whl\n")
    assert status(run("lock", inventory, "--output", path, "--sha256sums", sums)) == 2
    assert status(run("lock", inventory, "--output", path, "--sha256sums", tmp_path / "none")) == 2


def plan(*args: str) -> tuple[int, Any]:
    result = run("plan", *args, "--json")
    return status(result), json.loads(result.stdout) if result.stdout.startswith("{") else result.stderr


def test_plan_prints_one_object() -> None:
    code, content = plan("--gpu", "4xv100-sxm2-32gb", "--context", "262144", "--streams", "4")
    assert code == 0 and content["stack"]["engine_version"] == "1.5.1" and "refusal" not in content
    memory = content["memory"]
    assert (
        memory["fits"] is True
        and memory["per_gpu"]["kv"] == 8 * 1024**3
        and memory["max_context"] == 262144
        and memory["max_streams"] >= 4
    )
    assert sum(memory["per_gpu"].values()) == memory["total_bytes"]
    assert {line["item"] for line in memory["lines"]} == set(memory["per_gpu"])
    assert content["expected"][0]["source"] and content["ceilings"]["prefill_tok_s"] > 0
    code, content = plan("--gpu", "rtx-4080")
    assert code == 1 and "stack" not in content and content["memory"]["fits"] is False
    assert all(set(item) == {"constraint", "evidence", "way_out"} for item in content["refusal"])
    code, content = plan("--gpu", "2xv100-pcie-32gb", "--driver", "595")
    assert code == 1 and [item["constraint"] for item in content["refusal"]] == ["driver"]


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--gpu", "v101"),
        ("--gpu", "0xv100-pcie-32gb"),
        ("--gpu", "9999xv100-pcie-32gb"),
        ("--gpu", "rtx-4080", "--os", "beos"),
        ("--gpu", "rtx-4080", "--model", "no-such"),
        ("--gpu", "rtx-4080", "--engine", "magic"),
        ("--gpu", "rtx-4080", "--driver", "?"),
        ("--gpu", "rtx-4080", "--context", "0"),
        ("--gpu", "rtx-4080", "--inventory", "x.py"),
        ("--inventory", "none.py"),
        ("--capture", "none"),
        ("--gpu", "rtx-4080", "--host", "x"),
    ],
)
def test_bad_input_is_exit_2_and_one_line(args: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-m", "laoka.cli", "plan", *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr


def test_plan_of_an_inventory_and_for_people(inventory: Path) -> None:
    code, content = plan("--inventory", str(inventory), "--host", "tower")
    assert code == 0 and list(content["hosts"]) == ["tower"]
    code, content = plan("--inventory", str(inventory), "--host", "tower", "--os", "ubuntu-22.04", "--engine", "1cat-vllm")
    assert code == 1 and content["hosts"]["tower"]["refusal"][0]["constraint"] == "glibc"
    shown = run("--lang", "en", "plan", "--gpu", "2xv100-sxm2-16gb")
    for text in ("KV cache", "does not fit at TP2", "laoka measured none of this", "46.1", "GDN prefill scratch"):
        assert text in shown.stdout
    chinese = run("--lang", "zh", "plan", "--gpu", "rtx-4080")
    assert "拒绝" in chinese.stdout and "GiB" in chinese.stdout
    chinese = run("--lang", "zh", "plan", "--gpu", "2xv100-pcie-32gb")  # an advisory and why there is speculation or none
    assert "后恢复正常" in chinese.stdout and "cured it" not in chinese.stdout
    reason = next(line for line in chinese.stdout.splitlines() if "speculative_reason" in line)
    assert re.search(r"[\u4e00-\u9fff]", reason)


def test_plan_names_no_terminal_width_when_piped() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "laoka.cli", "plan", "--gpu", "4xv100-sxm2-32gb"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "LANG": "C.UTF-8", "COLUMNS": "40"},
    )
    assert done.returncode == 0 and "757f2200ba6bd20f7e3e5c8fc68c7e05461df6d284baf676ac0c16ce19434959" in done.stdout


# --- captures ---

LSPCI = """\
03:00.0 3D controller [0302]: NVIDIA Corporation GV100GL [Tesla V100 PCIe 32GB] [10de:1db6] (rev a1)
"""


def test_facts_of_a_report_and_what_it_does_not_say() -> None:
    report = HostReport.from_files({"lspci": LSPCI, "os-release": 'ID=ubuntu\nVERSION_ID="24.04"\n'})
    facts = facts_of(report, "ubuntu-24.04")
    assert [card.device_id for card in facts.cards] == ["10de:1db6"] and facts.os_release == "ubuntu-24.04"
    with pytest.raises(RequestError, match="not in the catalogue"):
        facts_of(report, "beos-5")
    with pytest.raises(RequestError, match="--gpu"):
        facts_of(HostReport.from_files({"cmdline": "quiet"}), "ubuntu-24.04")


def test_plan_of_a_capture(tmp_path: Path) -> None:
    texts = {"lspci": LSPCI, "os-release": 'NAME="Ubuntu"\nID=ubuntu\nVERSION_ID="22.04"\nPRETTY_NAME="Ubuntu 22.04.5 LTS"\n'}
    capture = tmp_path / "host.probe"
    capture.write_text(sections.render(replace(sections.from_files(texts), complete=True)))
    code, content = plan("--capture", str(capture))
    assert code == 0
    assert (content["stack"]["gpu"], content["stack"]["os_release"], content["stack"]["engine"]) == (
        "v100-pcie-32gb",
        "ubuntu-22.04",
        "revolta",
    )
    capture.write_text("not a probe")
    assert plan("--capture", str(capture))[0] == 2
