"""What people read: alerts in both languages with host, card and slot; the status; the unit file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jinja2
import pytest
from click.testing import CliRunner

from laoka.agent import state, wording
from laoka.agent.clock import Now
from laoka.agent.config import Config, ExpectedGpu
from laoka.agent.history import Row
from laoka.agent.incidents import Alert, Incident, Seen, Tracker
from laoka.agent.ladder import Attempt, Decision, Rung
from laoka.agent.signals import CLASS_OF_KIND, Reading, Signal
from laoka.catalog import xids
from laoka.cli import watchdog
from laoka.cli.main import cli
from laoka.process import Completed

ROOT = Path(__file__).resolve().parents[3]
BDF = "0000:03:00.0"
V100 = ExpectedGpu(bdf=BDF, device_id="10de:1db6", slot="riser 2")

# Everything that a signal's words need, as the sensors fill it.
VALUES: dict[str, str | int | float] = {
    "found": "a", "expected": "b", "body": "words", "severity": "fatal", "layer": "x", "codes": "0x24:0x65", "client": "1",
    "module": "2", "error": "e", "deadline_s": "10", "count": 3, "part": "HBM", "temperature_c": 92, "limit_c": "85",
    "limit_w": "250", "expected_w": "175", "unit": "qwen-serve.service", "state": "failed", "result": "exit-code", "kind": "k",
    "detail": "d", "path": "/", "free_mb": 1, "min_mb": 512, "sensor": "pci", "age_s": 20,
    "running": 1, "waiting": 0, "seconds": 130, "reasons": "sw_thermal", "device": BDF, "rate": "5.0", "width": "8", "most": "16",
    "driver": "vfio-pci", "last": "systemd[1]: Started x",
}  # fmt: skip


def config(lang: str = "en", **changes: Any) -> Config:
    return Config(host="box-7", lang=lang, gpu=(V100,), **changes)  # type: ignore[arg-type]


def alert(signal: Signal, kind: str = "opened") -> Alert:
    seen = Seen(signal, 1_796_000_000.0, signal.lasting)
    incident = Incident("20261129T214640Z-0000", 1_796_000_000.0, (seen,), closed_unix_s=1_796_000_100.0)
    return Alert(kind, incident, seen)  # type: ignore[arg-type]


SIGNALS = [Signal(kind, "s", BDF, values=VALUES) for kind in CLASS_OF_KIND] + [
    Signal("xid", "kernel_log", BDF, row.number, values=VALUES) for row in xids.xids()
]


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("kind", ["opened", "worse", "recovered"])
def test_every_alert_has_host_card_slot_and_a_next_step(lang: str, kind: str) -> None:
    for signal in SIGNALS:
        words = wording.of_alert(alert(signal, kind), config(lang))
        assert words.title.startswith("box-7")
        assert f"Tesla V100 PCIe 32GB {BDF}" in words.title
        assert "riser 2" in words.title
        assert "\n" not in words.title
        assert ("Next: " if lang == "en" else "下一步：") in words.body
        assert "{" not in words.title + words.body


def test_simulated_and_drill_stand_before_everything() -> None:
    words = wording.of_alert(alert(Signal("xid", "kernel_log", BDF, 79, values=VALUES, drill=True)), config(simulated=True))
    assert words.title.startswith("[simulated card] [DRILL] box-7: ")
    assert words.body.startswith("This is a drill")
    assert "simulated" in words.body
    assert not wording.of_alert(alert(Signal("card_gone", "pci", BDF)), config()).title.startswith("[")


def test_a_card_that_nobody_expected_and_no_card_at_all() -> None:
    other = wording.of_alert(alert(Signal("xid", "kernel_log", "0000:99:00.0", 79, values=VALUES)), config()).title
    assert "0000:99:00.0 (not in the inventory)" in other
    assert wording.of_alert(alert(Signal("disk_full", "disk", values=VALUES)), config()).title.endswith(": the host")


def test_an_unknown_xid_is_said_to_be_unknown() -> None:
    body = wording.of_alert(alert(Signal("xid", "kernel_log", BDF, 9999, values=VALUES)), config()).body
    assert "Xid 9999 (not in the catalogue)" in body


def test_it_says_what_it_will_do_and_what_it_will_not() -> None:
    signal = Signal("card_gone", "pci", BDF)
    allowed = Decision("wait", "stop_users", "standing", (Rung("stop_users"), Rung("remove_rescan")))
    forbidden = Decision("blocked", None, "policy", (Rung("stop_users", "policy"), Rung("remove_rescan", "policy")))
    assert "does next, by itself: stop what uses the cards." in wording.of_alert(alert(signal), config(), allowed).body
    body = wording.of_alert(alert(signal), config(), forbidden).body
    assert "does nothing by itself: the inventory's recovery policy does not allow it. What it would do: take the card off" in body
    assert "does nothing about this by itself" in wording.of_alert(alert(signal), config()).body
    row = Row(Attempt(1, "x", "remove_rescan", 0.0, "recovered", "links at full width"), "card_gone", (BDF,), 0.0)
    over = wording.of_alert(alert(signal, "recovered"), config(), None, (row,)).body
    assert "look for it again: all is back (links at full width)" in over
    assert "did not repair anything" in wording.of_alert(alert(signal, "recovered"), config()).body


# ---- status ----

CARD = {"bdf": BDF, "state": "present", "device_id": "10de:1db6", "driver": "nvidia", "link": "8.0 GT/s PCIe x16"}
ALERTS = {"channels": 1, "source": "s", "waiting": 0, "held": 0, "failing": {}, "delivered": 0, "dropped": 0}


def written(
    tmp_path: Path, *, age_s: float = 0, reading: Reading | None = None, incident: Incident | None = None, **alerts: Any
) -> Path:
    now = Now(time.time(), time.monotonic() - age_s)
    pci = reading or Reading("pci", "ok", detail="1 of 1 cards on the bus", facts={"cards": [CARD], "seen": 1, "unexpected": []})
    readings = {name: Reading(name, "ok", detail="fine") for name in state.SENSORS} | {"pci": pci}
    current = state.build(
        config(),
        readings,
        dict.fromkeys(state.SENSORS, now.mono_s),
        Tracker(),
        (incident,) if incident else (),
        ALERTS | alerts,
        (),
        now,
    )
    path = tmp_path / "watchdog.json"
    path.write_text(json.dumps(current))
    return path


def status(path: Path, *words: str, lang: str = "en") -> tuple[int, str, str]:
    done = CliRunner().invoke(cli, ["--lang", lang, "watchdog", "status", "--state", str(path), *words], standalone_mode=False)
    if done.exception:
        return 2, "", str(done.exception.format_message())  # type: ignore[attr-defined]
    return int(done.return_value), done.stdout, done.stderr


def test_status_of_a_healthy_host(tmp_path: Path) -> None:
    code, out, err = status(written(tmp_path))
    assert (code, err) == (0, "")
    assert "box-7: 1 of 1 card(s) seen, 0 open incident(s)" in out
    assert "riser 2" in out
    assert "recovery: engine-only; reboots: never" in out
    assert "自动恢复：engine-only；重启：不允许" in status(written(tmp_path), lang="zh")[1]


def test_status_that_is_not_well(tmp_path: Path) -> None:
    gone = Reading("pci", "bad", detail="gone", facts={"cards": [CARD | {"state": "gone"}], "seen": 0, "unexpected": []})
    code, out, _ = status(written(tmp_path, reading=gone))
    assert code == 1
    assert "GONE" in out
    assert status(written(tmp_path, reading=Reading("pci", "unknown", detail="no answer")))[0] == 1
    code, out, _ = status(written(tmp_path, channels=0, source="/etc/laoka/alert-urls"))
    assert code == 1
    assert "NO CHANNEL" in out


def test_status_of_a_watchdog_that_died(tmp_path: Path) -> None:
    path = written(tmp_path, age_s=60)
    code, _, err = status(path)
    assert code == 1
    assert "is 60 s old: the watchdog is not running or is stuck" in err
    code, out, _ = status(path, "--json")
    assert (code, json.loads(out)["stale"]) == (1, True)
    # The monotonic time of an earlier boot can lie ahead.
    assert status(written(tmp_path, age_s=-500))[0] == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 99}'])
def test_status_of_a_file_that_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    code, _, err = status(path)
    assert code == 2
    assert "not a watchdog's state" in err
    code, _, err = status(tmp_path / "none.json")
    assert code == 2
    assert "systemctl status qwen-watchdog" in err


def done(status: int, stdout: str = "", stderr: str = "", *, timed_out: bool = False) -> Completed:
    return Completed(("ssh",), status, stdout, stderr, timed_out)


def test_what_another_host_tells(tmp_path: Path) -> None:
    _, out, _ = status(written(tmp_path), "--json")
    told = watchdog.answer_of("root@gpu1", done(0, out), "en")
    assert told.current is not None and told.current["target"] == "root@gpu1" and not told.current["stale"]
    # Status 1 is "not well", not "could not ask".
    assert watchdog.answer_of("gpu1", done(1, out), "en").current is not None


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (done(127, "", "sh: 1: exec: laoka: not found"), "gpu1: no laoka there. Next: pyinfra INVENTORY deploys/watchdog.py"),
        (done(255, "", "ssh: connect to host gpu1 port 22: No route to host"), "No route to host"),
        (done(124, "", "", timed_out=True), "no answer before the deadline"),
        (
            done(2, "", "Error: /run/laoka/watchdog.json: No such file or directory"),
            "could not ask its watchdog: Error: /run/laoka",
        ),
        (done(0, '{"schema": 1}'), "of another version of laoka"),
    ],
)
def test_a_host_that_can_not_be_asked(answer: Completed, said: str) -> None:
    told = watchdog.answer_of("gpu1", answer, "en")
    assert told.current is None and said in told.fault


def test_hosts_are_asked_over_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an ssh of our own that answers for one host and refuses for the other."""
    answer = tmp_path / "answer.json"
    _, out, _ = status(written(tmp_path), "--json")
    answer.write_text(out)
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f'#!/bin/sh\ncase "$*" in *"-- gpu1 "*"laoka watchdog status --json") cat {answer};; *) echo no >&2; exit 255;; esac\n'
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    run = CliRunner().invoke
    one = run(cli, ["--lang", "en", "watchdog", "status", "ops@gpu1"], standalone_mode=False)
    assert (one.return_value, one.stderr) == (0, "")
    assert "box-7: 1 of 1 card(s) seen" in one.stdout
    both = run(cli, ["--lang", "en", "watchdog", "status", "--json", "gpu1", "gpu2"], standalone_mode=False)
    assert both.return_value == 2
    first, second = json.loads(both.stdout)
    assert (first["host"], first["target"]) == ("box-7", "gpu1")
    assert second == {"target": "gpu2", "error": "gpu2: could not ask its watchdog: no"}


def test_a_recovered_incident_is_shown(tmp_path: Path) -> None:
    incident = alert(Signal("xid", "kernel_log", BDF, 79, values=VALUES, lasting=False), "recovered").incident
    out = status(written(tmp_path, incident=incident))[1]
    assert "card has fallen off the bus (Xid 79): Tesla V100 PCIe 32GB" in out


def test_the_commands_need_the_base_install_only() -> None:
    code = (
        "import sys\n"
        "for name in ('rich', 'pyinfra', 'jinja2', 'paramiko', 'packaging', 'tomli_w', 'platformdirs'): sys.modules[name] = None\n"
        "import laoka.cli.watchdog, laoka.agent.daemon, laoka.agent.__main__\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_message_for_a_test_is_marked() -> None:
    title, body = watchdog.test_message(config(simulated=True))
    assert title == "[simulated card] box-7: TEST of the alert channel"
    assert "Nothing is wrong" in body


# ---- the unit ----


def rendered(*, full: bool = False) -> str:
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    source = (ROOT / "templates/watchdog/qwen-watchdog.service.j2").read_text()
    values = {"python": sys.executable, "config_path": "/etc/laoka/watchdog.toml", "alert_urls_path": "/etc/laoka/alert-urls"}
    values |= {"full": full}  # type: ignore[dict-item]
    return environment.from_string(source).render(values)


def test_the_unit_lets_it_see_what_it_watches() -> None:
    lines = rendered().splitlines()
    for wanted in ("Type=notify", "WatchdogSec=30s", "Restart=always", "LoadCredential=alert-urls:/etc/laoka/alert-urls"):
        assert wanted in lines
    for hidden in ("ProtectKernelLogs=yes", "PrivateDevices=yes", "ProtectClock=yes"):
        assert hidden not in lines
    assert not any(line.startswith("DeviceAllow=") for line in lines)


def test_only_policy_full_may_touch_cards_and_modules() -> None:
    mild, full = rendered().splitlines(), rendered(full=True).splitlines()
    assert "ProtectKernelTunables=yes" in mild and "ProtectKernelModules=yes" in mild
    assert "ProtectKernelTunables=yes" not in full and "ProtectKernelModules=yes" not in full
    (capabilities,) = (line for line in mild if line.startswith("CapabilityBoundingSet="))
    assert capabilities == "CapabilityBoundingSet=CAP_SYSLOG CAP_DAC_READ_SEARCH CAP_MKNOD"
    (capabilities,) = (line for line in full if line.startswith("CapabilityBoundingSet="))
    assert {"CAP_SYS_MODULE", "CAP_SYS_ADMIN", "CAP_KILL"} <= set(capabilities.partition("=")[2].split())


@pytest.mark.parametrize("full", [False, True])
def test_systemd_understands_the_unit(tmp_path: Path, full: bool) -> None:
    tool = shutil.which("systemd-analyze")
    assert tool, "systemd-analyze is missing: apt-get install systemd"
    unit = tmp_path / "qwen-watchdog.service"
    unit.write_text(rendered(full=full))
    done = subprocess.run(
        [tool, "verify", "--recursive-errors=no", "--man=no", str(unit)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
