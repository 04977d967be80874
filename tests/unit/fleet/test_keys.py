"""A misspelt key of an inventory is told by every command that reads one, with its place and the key that was meant."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from laoka.cli.main import cli
from laoka.fleet.inventory import HostEntry, InventoryUnread, load_inventory
from laoka.fleet.keys import known_keys, unknown_lines
from tests.documented import ROOT

# Port 1 refuses at once: what is asked of a host is not what this is about.
INVENTORY = """\
gpu_hosts = [
    ("a", {"ssh_hostname": "127.0.0.1", "ssh_port": 1, "modle_id": "some/model"}),
    ("b", {"ssh_hostname": "127.0.0.1", "ssh_port": 1}),
]
"""
LOOKS: tuple[tuple[str, ...], ...] = (
    ("check", "FILE"),
    ("audit", "FILE", "--deadline", "5"),
    ("diagnose", "FILE", "--host", "b"),
    ("watchdog", "status", "FILE"),
    ("bench", "run", "http://127.0.0.1:1", "--host", "b", "--inventory", "FILE"),
    ("cache", "run", "http://127.0.0.1:1", "--host", "b", "--inventory", "FILE"),
)
COMPUTES: tuple[tuple[str, ...], ...] = (("plan", "--inventory", "FILE"), ("lock", "FILE"), ("lock", "FILE", "--check"))


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "lab.py"
    file.write_text(INVENTORY)
    return file


@pytest.mark.parametrize("words", LOOKS, ids=lambda words: words[0])
def test_a_command_that_looks_at_hosts_tells_it_and_goes_on(inventory: Path, words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, ["--lang", "en", *(word.replace("FILE", str(inventory)) for word in words)])
    lines = done.stderr.splitlines()
    assert lines.count(f"{inventory}:2: host a: unknown key modle_id: did you mean model_id?") == 1, done.output
    assert len(lines) > 1, "and then what the hosts said, or that they did not answer"


@pytest.mark.parametrize("words", COMPUTES, ids=lambda words: " ".join(words[:1] + words[2:]))
def test_a_command_that_computes_from_it_refuses_it(inventory: Path, words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(
        cli, ["--lang", "en", *(word.replace("FILE", str(inventory)) for word in words)], standalone_mode=False
    )
    assert done.return_value == 2
    told = f"laoka {words[0]}: {inventory}:2: host a: unknown key modle_id: did you mean model_id?"
    assert done.stderr.splitlines() == [told] and not (inventory.parent / "stack.lock.toml").exists()


def test_it_is_told_in_chinese() -> None:
    assert unknown_lines([HostEntry("a", (), {"modle_id": 1})], known_keys(), (), "zh") == (
        "主机 a：未知的键 modle_id：是否想写 model_id？",
    )


def test_a_key_of_many_hosts_is_one_line() -> None:
    entries = [HostEntry(f"h{number}", (), {"zzz": 1, "ssh_user": "x", "_sudo": True}) for number in range(5)]
    assert unknown_lines(entries, known_keys(), (), "en") == (
        "host h0, h1, h2 and 2 more: unknown key zzz: no setting has a name like it; docs/inventory.md lists them all",
    )


def test_every_inventory_of_the_project_has_known_keys_only() -> None:
    done = CliRunner().invoke(cli, ["plan", "--inventory", str(ROOT / "inventories" / "example.py"), "--json"])
    assert "unknown key" not in done.stderr and done.stdout


WRONG = (
    ('"ssh_port": "twenty"', "ssh_port = 'twenty': write a port, from 1 to 65535"),
    ('"expected_gpus": 2', "expected_gpus = 2: write a list of cards, each"),
    ('"power_limit_w": "low"', "power_limit_w = 'low': write a number of watts"),
    ('"serve_flags": ["x"]', "serve_flags = ['x']: write a table of flags"),
    ('"serve_instances": {"a": 8001}', "serve_instances = {'a': 8001}: write a table of servers"),
)


@pytest.mark.parametrize("words", (*LOOKS, *COMPUTES), ids=lambda words: " ".join(words[:1] + words[2:3]))
def test_a_value_of_another_form_stops_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """It would count as not said, or be a traceback."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "lab.py"
    entries = ",\n".join(f'    ("h{number}", {{{entry}}})' for number, (entry, _) in enumerate(WRONG))
    file.write_text(f'gpu_hosts = [\n    ("b", {{"ssh_hostname": "127.0.0.1"}}),\n{entries},\n]\n')
    done = CliRunner().invoke(cli, ["--lang", "en", *(word.replace("FILE", str(file)) for word in words)], standalone_mode=False)
    said = done.stderr + (done.exception.format_message() if isinstance(done.exception, click.ClickException) else "")
    assert done.exception is None or isinstance(done.exception, click.ClickException), done.exception
    for number, (_, told) in enumerate(WRONG):
        assert f"{file}:{number + 3}: host h{number}: {told}" in said


def test_an_inventory_that_raises_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "lab.py"
    file.write_text('import os\n\nKEY = os.environ["LAB_NONE"]\ngpu_hosts = ["a"]\n')
    with pytest.raises(InventoryUnread, match=r"lab\.py: can't be loaded: line 3: KeyError: 'LAB_NONE'"):
        load_inventory(file)
