"""Policies, the JSON that scripts rely on, JUnit and HTML, and the check command end to end."""

from __future__ import annotations

import datetime
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import x99_host as x99
from click.testing import CliRunner

from laoka import checks
from laoka.checks.policy import Accepted, PolicyError, apply, parse_policy
from laoka.checks.result import HostResult, as_html, as_json, as_junit, by_area
from laoka.cli.check import check_many, exit_status, ssh_target
from laoka.cli.main import cli
from laoka.host.collect import CouldNotCollect
from laoka.host.report import HostReport
from laoka.host.sections import render

CAPTURES = Path(__file__).parents[2] / "data" / "captures"
TODAY = datetime.date(2026, 12, 1)
ROW = Accepted("power.persistence", "lab-*", "known, card goes back next week", datetime.date(2026, 12, 31))
OFF = x99.smi(*(x99.smi_gpu(card, persistence="Disabled") for card in x99.CARDS))


def result(**changes: str) -> HostResult:
    report = x99.host(**changes)
    return HostResult("lab-1", report, checks.run(report, expected_gpus=2))


def test_a_policy_accepts_by_id_host_and_date() -> None:
    findings = checks.run(x99.host(nvidia_smi_xml=OFF))
    assert checks.verdict(findings) == "warn"
    assert checks.verdict(apply((ROW,), findings, "lab-1", TODAY)) == "info"
    assert checks.verdict(apply((ROW,), findings, "shop-1", TODAY)) == "warn"
    assert checks.verdict(apply((ROW,), findings, "lab-1", datetime.date(2027, 1, 1))) == "warn"


def test_a_policy_file() -> None:
    text = '[[accept]]\nid = "power.limit"\nhost = "*"\nreason = "water cooled"\nuntil = 2027-01-31\n'
    assert parse_policy(text, "p.toml", checks.CHECKS) == (
        Accepted("power.limit", "*", "water cooled", datetime.date(2027, 1, 31)),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[accept]", "p.toml"),
        ('[[accept]]\nid = "power.limit"\nhost = "*"\nreason = "x"\n', "exactly"),
        ('[[accept]]\nid = "power.nothing"\nhost = "*"\nreason = "x"\nuntil = 2027-01-31\n', "power.nothing"),
        ('[[accept]]\nid = "power.limit"\nhost = "*"\nreason = " "\nuntil = 2027-01-31\n', "reason"),
        ('[[accept]]\nid = "power.limit"\nhost = "*"\nreason = "x"\nuntil = "soon"\n', "date"),
        ("accept = 3\n", "exactly"),
    ],
)
def test_a_wrong_policy_says_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(PolicyError, match=words) as caught:
        parse_policy(text, "p.toml", checks.CHECKS)
    assert "\n" not in str(caught.value)


def test_json_has_the_keys_that_scripts_rely_on() -> None:
    told = json.loads(json.dumps(as_json(result(glibc="glibc 2.35"), "en")))
    assert set(told) == {"host", "verdict", "findings", "unread"}
    assert (told["host"], told["verdict"]) == ("lab-1", "warn")
    assert all(set(finding) == {"id", "area", "severity", "evidence", "why", "next"} for finding in told["findings"])
    glibc = next(finding for finding in told["findings"] if finding["id"] == "system.glibc")
    assert (glibc["area"], glibc["severity"], glibc["evidence"]) == ("system", "warn", ["glibc 2.35"])
    assert all(finding["next"] for finding in told["findings"] if finding["severity"] in ("warn", "unknown", "fail"))


def test_json_lists_what_was_not_read() -> None:
    report = HostReport.from_files({"cmdline": "ro quiet"})
    unread = as_json(HostResult("files", report, checks.run(report)), "en")["unread"]
    assert {"field": "pci", "reason": "not in the input"} in unread  # type: ignore[operator]


def test_junit_counts_failures_and_errors() -> None:
    root = ElementTree.fromstring(as_junit([result(nvidia_smi_xml=OFF, glibc=""), HostResult("x", None, (), "no route")], "en"))
    first, second = root.findall("testsuite")
    assert (first.get("failures"), first.get("errors")) == ("2", "1")
    assert second.get("errors") == "1"


def test_html_escapes_what_a_host_said() -> None:
    page = as_html([result(dmi="/sys/class/dmi/id/board_name:<script>alert(1)</script>")], "zh")
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_areas_come_worst_first() -> None:
    areas = by_area(result(holds="", pci_config=next(iter(x99.CARDS)) + " ff" * 64).findings)
    assert areas[0][0] == "cards"
    assert areas[0][1][0].severity == "fail"


def test_check_many_keeps_the_order_and_tells_unreachable_hosts() -> None:
    def unreachable() -> HostReport:
        raise CouldNotCollect("b: ssh could not connect: no route to host")

    done: list[str] = []
    results = check_many(
        [("a", x99.host), ("b", unreachable), ("c", x99.host)],
        expected_gpus={"a": 2, "c": 3},
        on_done=lambda r: done.append(r.host),
    )
    assert [r.host for r in results] == ["a", "b", "c"]
    assert [r.verdict for r in results] == ["info", "unknown", "fail"]
    assert sorted(done) == ["a", "b", "c"]
    assert exit_status(results) == 2
    assert exit_status(results[:1]) == 0
    assert exit_status(results[2:]) == 1


@pytest.mark.parametrize(
    ("words", "host", "port", "user"),
    [
        ("box", "box", 22, None),
        ("me@box:2222", "box", 2222, "me"),
        ("[fe80::1]:2222", "fe80::1", 2222, None),
        ("me@fe80::1", "fe80::1", 22, "me"),
    ],
)
def test_ssh_targets(words: str, host: str, port: int, user: str | None) -> None:
    target = ssh_target(words, None, None)
    assert (target.host, target.port, target.user) == (host, port, user)


@pytest.mark.parametrize("words", ["", "-oProxyCommand=x", "me@-x", "box:port", "box:0", "@"])
def test_no_ssh_target(words: str) -> None:
    result = CliRunner().invoke(cli, ["check", "--", words])
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def invoke(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["--lang", "en", *words], standalone_mode=False)
    status = done.return_value if done.exception is None else 2
    return int(status), done.output if done.exception is None else str(done.exception)


def test_the_command_judges_a_saved_probe(tmp_path: Path) -> None:
    saved = tmp_path / "probe.txt"
    saved.write_text(render(x99.sections()), encoding="utf-8")
    assert invoke("check", str(saved))[0] == 0
    status, output = invoke("check", str(saved), "--expect", "3", "--only", "cards")
    assert status == 1
    assert "2 of 3 cards are on the PCI bus" in output


def test_the_command_judges_a_snippet_of_a_forum(tmp_path: Path) -> None:
    junit, html = tmp_path / "j.xml", tmp_path / "p.html"
    name = CAPTURES / "dmesg_v100_16g_bar1_0m_dell7920.txt"
    status, output = invoke("check", "--file", f"dmesg={name}", "--json", "--junit", str(junit), "--html", str(html))
    told = json.loads(output)
    assert (status, told["host"], told["verdict"]) == (1, "files", "fail")
    assert [f["id"] for f in told["findings"] if f["severity"] == "fail"] == ["firmware.above-4g"]
    assert junit.read_text().startswith("<?xml")
    assert "firmware.above-4g" in html.read_text()


@pytest.mark.parametrize(
    "words",
    [
        ("check",),
        ("check", "--only", "nothing", "@local"),
        ("check", "--file", "nonsense=x"),
        ("check", "--file", "dmesg=/does/not/exist"),
        ("check", "/does/not/exist"),
        ("check", "--explain", "nothing"),
        ("check", "x", "--file", "dmesg=x"),
    ],
)
def test_wrong_use_ends_in_2_with_one_message(words: tuple[str, ...]) -> None:
    status, output = invoke(*words)
    assert status == 2
    assert output.strip()
    assert "Traceback" not in output


def test_a_file_that_is_no_capture_could_not_run(tmp_path: Path) -> None:
    for data in (b"hello", b"\x1f\x8bnot gzip at all", b""):
        path = tmp_path / "x"
        path.write_bytes(data)
        assert invoke("check", str(path))[0] == 2


def test_explain_and_list() -> None:
    assert (
        "evidence ladder" in invoke("check", "--explain", "firmware.above-4g")[1]
        or "rung" in invoke("check", "--explain", "firmware.above-4g")[1]
    )
    assert len(invoke("check", "--list")[1].splitlines()) == len(checks.CHECKS)
