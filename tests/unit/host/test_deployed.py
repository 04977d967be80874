"""What laoka has put on a host, out of the probe's section: hashes as the deploy makes them, and nothing that fails on bad text."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laoka.host.deployed import Deployed, config_hash, read_deployed, read_flags
from laoka.host.redact import redact
from laoka.host.sections import Section, Sections
from laoka.host.unread import Unread
from laoka.serving.unit_config import config_hash_command
from tests.unit.fleet import deployed_host


def read(text: str) -> Deployed:
    found = read_deployed(Sections({"laoka": Section("laoka", 0, text)}))
    assert not isinstance(found, Unread)
    return found


def test_the_hash_is_the_one_that_a_deploy_notes(tmp_path: Path) -> None:
    file, target, link, missing = tmp_path / "unit", tmp_path / "target", tmp_path / "link", tmp_path / "missing"
    file.write_text("[Unit]\n")
    target.write_text("x")
    link.symlink_to(target)
    paths = [str(path) for path in (file, link, missing)]
    noted = subprocess.run(["sh", "-c", config_hash_command(paths)], capture_output=True, text=True, check=True).stdout.strip()
    digest = subprocess.run(["sha256sum", str(file)], capture_output=True, text=True, check=True).stdout.split()[0]
    assert config_hash(paths, {str(link): str(target)}, {str(file): digest}) == noted


def test_a_deployed_host_is_read_whole() -> None:
    found = read(deployed_host.section())
    assert found.agent == "0.1.0-aa"
    assert found.model is not None and (found.model.repo, found.model.revision) == (deployed_host.MODEL, deployed_host.REVISION)
    assert not isinstance(found.engine, Unread) and found.engine is not None
    assert (found.engine.name, found.engine.version, found.engine.wheel_sha256) == ("1cat-vllm", "1.5.1", deployed_host.WHEEL)
    assert dict(found.flags)["qwen-serve.service"]["kv-cache-dtype"] == "fp8_e5m2"
    assert [(unit.unit, unit.as_started) for unit in found.units] == [("qwen-serve.service", True)]
    assert [deploy.who for deploy in found.deploys] == ["ann@desk"]


def test_a_host_without_laoka_says_so() -> None:
    found = read_deployed(Sections({}, {"laoka": "nothing of it is installed here"}))
    assert found == Unread("nothing of it is installed here")


def test_a_lock_that_is_held_is_the_last_deploy() -> None:
    held = json.dumps(deployed_host.deploy(who="bob@lap", outcome="running", ended_unix_s=None)) + "\nboot-1 12 34 r2 1700000000"
    text = deployed_host.section({"/var/lib/laoka/deploys/lock": held})

    def told(owner: str) -> list[tuple[str, str]]:
        return [(line.who, line.outcome) for line in read(f"{text}{owner}").deploys]

    assert told("\n@owner boot-1 1700000009 34") == [("ann@desk", "done"), ("bob@lap", "running")]
    for owner in (
        "",
        "\n@owner boot-1 1700000009 ",
        "\n@owner boot-1 1700000009 35",
        "\n@owner boot-2 1700000009 34",
        "\n@owner x",
    ):
        assert told(owner) == [("ann@desk", "done"), ("bob@lap", "interrupted")], owner


@settings(max_examples=200, deadline=None)
@given(
    st.text(max_size=400),
    st.sampled_from(["/run/laoka/watchdog.json", "/var/lib/laoka/deploys/ledger", "/etc/qwen-serve/vllm.yaml"]),
)
def test_nothing_that_a_file_holds_makes_it_fail(text: str, path: str) -> None:
    read("\n".join(f"{path}:{line}" for line in text.split("\n")))


def test_flags_that_are_not_json_stay_text() -> None:
    assert read_flags(["a: 1", "b: x y", "c: true", "# d: 2", ""]) == {"a": 1, "b": "x y", "c": True}


@pytest.mark.parametrize("word", [deployed_host.WHEEL, deployed_host.REVISION])
def test_a_capture_keeps_hashes_and_hides_who(word: str) -> None:
    cleaned, _ = redact(deployed_host.given())
    text = cleaned.by_name["laoka"].stdout
    assert word in text and "ann@desk" not in text
    assert [unit.as_started for unit in read(text).units] == [True]
