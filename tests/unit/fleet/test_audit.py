"""The audit as a command: exit statuses, a table of twenty hosts in a hundred columns, and what changed since the last one."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from laoka.cli.main import cli
from laoka.fleet.audit import NotAnAudit, changes
from laoka.fleet.show import history_lines
from laoka.host.deployed import read_deploy
from laoka.host.sections import render
from laoka.stack.lock import Lock, LockedGroup, write_lock
from tests.unit.fleet import deployed_host
from tests.unit.fleet.deployed_host import DATA, STACK

CAPTURES = Path("captures")


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An inventory of three hosts, their lock, and captures of all that are as the lock says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.setenv("COLUMNS", "100")
    make(["a", "b", "c"])
    return tmp_path


def make(names: list[str]) -> None:
    data = {**DATA, "expected_gpus": [{key: gpu[key] for key in ("bdf", "device_id")} for gpu in DATA["expected_gpus"]]}
    Path("lab.py").write_text(f"hosts = ([(name, {{}}) for name in {names!r}], {data!r})\n")
    # A lock that is read has to name things as the catalogue does; this one is only compared.
    write_lock(Path("stack.lock.toml"), Lock("sha256:0", "sha256:0", (LockedGroup("g", tuple(names), {}, STACK),)))
    CAPTURES.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        capture(name, number)


def capture(name: str, number: int = 0, **changed: Any) -> None:
    """Write a capture; each host has cards of its own."""
    smi = (
        deployed_host.smi()
        .replace("000000000006", f"{number + 1:06d}000006", 1)
        .replace("000000000006", f"{number + 1:06d}000007", 1)
    )
    (CAPTURES / f"{name}.probe.txt").write_text(render(deployed_host.given(**{"nvidia_smi_xml": smi, **changed})))


def run(*words: str, lang: str = "en") -> Result:
    return CliRunner().invoke(cli, ["--lang", lang, "audit", *words], standalone_mode=False)


def audit(*words: str, lang: str = "en") -> Result:
    return run("lab.py", "--captures", "captures", *words, lang=lang)


def test_a_fleet_as_its_lock_says_is_fine(fleet: Path) -> None:
    done = audit()
    assert done.return_value == 0, done.output
    assert "3 hosts: 3 info; 0 gave no answer" in done.stdout or "3 hosts: 3 ok; 0 gave no answer" in done.stdout


def test_drift_is_1_and_named_once_with_its_hosts(fleet: Path) -> None:
    for name in ("a", "c"):
        capture(name, ord(name), nvidia_smi_xml=deployed_host.smi("250.00 W"))
    done = audit()
    assert done.return_value == 1
    assert done.stdout.count("the cap is 250 W, 175 W is wanted  audit.caps") == 2  # one for each card's address
    assert "  a, c" in done.stdout
    assert done.stdout.splitlines()[1].startswith("a ") and done.stdout.splitlines()[3].startswith("b ")  # worst first


def test_a_host_that_gives_no_answer_is_one_line_and_2(fleet: Path) -> None:
    (CAPTURES / "b.probe.txt").unlink()
    done = audit()
    assert done.return_value == 2
    assert [line for line in done.stderr.splitlines() if "b" in line] == ["laoka audit: b: no b.tar.gz in captures"]
    assert done.stdout.splitlines()[1].startswith("b ")


def test_twenty_hosts_fit_a_hundred_columns_worst_first(fleet: Path) -> None:
    names = [f"x99-workshop-{number:02d}" for number in range(20)]
    make(names)
    capture(names[7], 7, nvidia_smi_xml=deployed_host.smi("250.00 W"))
    for lang in ("en", "zh"):
        done = audit(lang=lang)
        lines = done.stdout.splitlines()
        from rich.cells import cell_len

        assert max(cell_len(line) for line in lines) <= 100
        assert lines[1].startswith(names[7]) and all(line.startswith("x99-") for line in lines[1:21])


def test_the_lock_decides_and_must_have_the_host(fleet: Path) -> None:
    write_lock(
        Path("other.toml"), Lock("sha256:0", "sha256:0", (LockedGroup("g", ("a",), {}, {**STACK, "driver_version": "580.1"}),))
    )
    done = audit("--lock", "other.toml", "--json")
    told = {host["host"]: {(f["id"], f["case"]) for f in host["findings"]} for host in json.loads(done.stdout)["hosts"]}
    assert ("audit.driver", "other") in told["a"] and ("audit.locked", "missing") in told["b"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere.py",), "there is no such inventory file"),
        (("lab.py", "--lock", "gone.toml"), "gone.toml: No such file or directory"),
        (("lab.py", "--limit", "zz*"), "has no such host or group"),
        (("lab.py", "--since", "lab.py"), "not JSON"),
        ((), "name an INVENTORY"),
        (("lab.py", "--history", "zz"), "has no such host"),
    ],
)
def test_bad_input_is_one_line(fleet: Path, words: tuple[str, ...], said: str) -> None:
    done = run(*words)
    assert said in str(done.exception) and "\n" not in str(done.exception)


def test_all_renderers_tell_the_same(fleet: Path) -> None:
    capture("b", 1, nvidia_smi_xml=deployed_host.smi("250.00 W"), dmi="/sys/class/dmi/id/board_name:<b>|")
    audit("--junit", "a.xml", "--html", "a.html")
    root = ElementTree.parse("a.xml").getroot()
    failed = [case.get("name") for case in root.iter("testcase") if case.find("failure") is not None]
    assert "audit.caps 0000:02:00.0" in failed and root.get("name") == "laoka audit"
    page = Path("a.html").read_text()
    assert "the cap is 250 W" in page and "width=device-width" in page and "http" not in page.replace("http-equiv", "")
    assert '<a href="#b">b</a>' in page and 'id="b"' in page
    # A phone has no room for the last column: what is wrong stands under its host.
    assert page.count('<tr class="under">') == 1 and page.index('<tr class="under">') > page.index('<a href="#b">')
    text = audit("--markdown").stdout
    assert "| `b` |" in text and "audit.caps" in text
    told = json.loads(audit("--json").stdout)
    assert told["verdict"] == "fail" and told["lock"] == "stack.lock.toml" and told["hosts"][1]["seen"]["driver"] == "580.173.02"


def test_since_prints_the_difference_only(fleet: Path) -> None:
    assert audit("--since", "last.json", "--save", "last.json").stdout  # none yet: everything
    silent = audit("--since", "last.json", "--save", "last.json")
    assert (silent.stdout, silent.return_value) == ("", 0)
    capture("b", 1, nvidia_smi_xml=deployed_host.smi("250.00 W", draw="20 W"))
    (CAPTURES / "c.probe.txt").unlink()
    done = audit("--since", "last.json", "--save", "last.json")
    assert "! b: new: 0000:02:00.0: the cap is 250 W, 175 W is wanted [audit.caps]" in done.stdout
    assert "! c: gives no answer any more" in done.stdout and " a:" not in done.stdout
    capture("b", 1)
    capture("c", 2)
    back = audit("--since", "last.json")
    assert "  b: no longer: 0000:02:00.0: the cap is 250 W" in back.stdout and "  c: answers again" in back.stdout
    assert "!" not in back.stdout


def test_a_file_of_another_form_is_refused() -> None:
    with pytest.raises(NotAnAudit, match="format 9"):
        changes({"format": 9}, {})
    with pytest.raises(NotAnAudit, match="damaged"):
        changes({"format": 1, "hosts": [{}]}, {"hosts": [], "fleet": []})


def test_a_policy_accepts_a_finding_of_the_audit(fleet: Path) -> None:
    capture("b", 1, nvidia_smi_xml=deployed_host.smi("250.00 W"))
    Path("policy.toml").write_text('[[accept]]\nid = "audit.caps"\nhost = "b"\nreason = "test bench"\nuntil = 2099-01-01\n')
    assert audit("--policy", "policy.toml").return_value == 0


def test_history_tells_who_what_and_from_which_lock() -> None:
    line = read_deploy(json.dumps(deployed_host.deploy()))
    assert line is not None
    told = "\n".join(history_lines([line], "en"))
    assert "ann@desk  deploys/full.py  done (200 s)" in told
    assert "inventory inventories/lab.py, lock abc123, laoka 0.1.0-aa" in told and "changed 1: Unit" in told
