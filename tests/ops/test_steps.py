"""laoka's operations on a real host: the second run changes nothing, and what was undone behind their back is put right."""

from __future__ import annotations

from pathlib import Path

import pytest

from laoka.sandbox import hosts
from laoka.sandbox.lab import HostFolder
from tests.hosts import Deployed, pyinfra

pytestmark = pytest.mark.ops
HERE = Path(__file__).parent
DROP_IN = "/etc/systemd/system/small.service.d"
ALL = ["source", "update", "install", "hold", "stamped", "target", "switch", "unit file", "limits", "run", "checked"]


def run(host: HostFolder, *arguments: str) -> Deployed:
    done = pyinfra(host.lab, *arguments, "inventories/sandbox.py", str(HERE / "deploy_steps.py"), deadline_s=300)
    assert done.status == 0, done.stderr
    return done


@pytest.fixture(scope="module", autouse=True)
def applied(ops_host: HostFolder) -> tuple[Deployed, Deployed]:
    return run(ops_host, "--dry"), run(ops_host, "-y")


def test_the_dry_run_predicts_the_first_one(ops_host: HostFolder, applied: tuple[Deployed, Deployed]) -> None:
    dry, first = applied
    assert dry.planned(ops_host.name) == first.changed(ops_host.name) == ALL


def test_the_second_run_changes_nothing(ops_host: HostFolder) -> None:
    assert run(ops_host, "-y").changed(ops_host.name) == []
    assert hosts.execute(ops_host, "cat /srv/ran", check=True).stdout == "ran\n"


@pytest.mark.parametrize(
    ("undo", "put_right"),
    [
        ("apt-mark unhold hello", ["hold"]),
        ("apt-mark unhold hello; apt-get -y purge hello", ["install", "hold"]),
        ("rm /srv/stamp", ["stamped"]),
        ("echo v0 > /srv/stamp", ["stamped"]),
        ("ln -sfn elsewhere /srv/current", ["switch"]),
        ("systemctl stop small", ["run"]),
        ("systemctl disable small", ["run"]),
        ("systemctl kill -s STOP small", ["run"]),  # runs, says systemd, but does no work
        ("rm /var/lib/apt/lists/laoka-updated", ["update"]),
        ("rm /var/lib/laoka/stamps/small.service.config", ["run"]),  # a run was killed before the restart
        ("rm /srv/limits.taken", ["checked"]),
        # A run was killed between a drop-in and the reload.
        (f"mkdir -p {DROP_IN} && printf '[Service]\\nNice=1\\n' > {DROP_IN}/nice.conf", ["reread"]),
    ],
)
def test_what_was_undone_is_put_right_and_nothing_else(ops_host: HostFolder, undo: str, put_right: list[str]) -> None:
    hosts.execute(ops_host, undo, check=True)
    assert run(ops_host, "-y").changed(ops_host.name) == put_right
    assert hosts.execute(ops_host, "apt-mark showhold; curl -sf 127.0.0.1:8123/stamp", check=True).stdout == "hello\nv1\n"


def test_what_a_reload_takes_over_restarts_nothing(ops_host: HostFolder) -> None:
    started = "systemctl show -P ActiveEnterTimestampMonotonic small; cat /srv/reloads 2>/dev/null | wc -l"
    before = hosts.execute(ops_host, started, check=True).stdout.split()
    hosts.execute(ops_host, "echo other > /var/lib/laoka/stamps/small.service.reload", check=True)  # it read another content
    assert run(ops_host, "-y").changed(ops_host.name) == ["run"]
    after = hosts.execute(ops_host, started, check=True).stdout.split()
    assert after == [before[0], str(int(before[1]) + 1)]


def test_a_file_with_a_fault_is_not_taken_over(ops_host: HostFolder, tmp_path: Path) -> None:
    deploy = tmp_path / "deploy.py"
    deploy.write_text(
        '"""A file that its check refuses."""\n'
        "from laoka.operations.steps import checked_file\n"
        "checked_file(name='bad', source='/etc/hostname', path='/srv/limits.taken', check='grep -q limit /etc/hostname')\n"
    )
    assert pyinfra(ops_host.lab, "-y", "inventories/sandbox.py", str(deploy), deadline_s=60).status == 1
    assert "limit" in hosts.execute(ops_host, "cat /srv/limits.taken").stdout


def test_commands_of_a_killed_run_are_waited_for(ops_host: HostFolder) -> None:
    hosts.execute(
        ops_host,
        "rm /srv/stamp; (flock /var/lib/laoka/stamps/lock sh -c 'echo begun >> /srv/ran; sleep 3; echo ended >> /srv/ran') "
        ">/dev/null 2>&1 & sleep 0.5",
        check=True,
    )
    assert run(ops_host, "-y").changed(ops_host.name) == ["stamped"]
    assert hosts.execute(ops_host, "tail -n 3 /srv/ran").stdout == "begun\nended\nran\n"


def test_a_unit_that_dies_on_its_way_up_fails_the_host(ops_host: HostFolder, tmp_path: Path) -> None:
    deploy = tmp_path / "deploy.py"
    deploy.write_text(
        '"""A unit that can not start."""\n'
        "from io import StringIO\n"
        "from pyinfra.operations import files\n"
        "from laoka.operations.steps import run_unit\n"
        "files.put(name='bad file', src=StringIO('[Service]\\nType=exec\\nExecStart=/bin/none\\n'), "
        "dest='/etc/systemd/system/bad.service')\n"
        "run_unit(name='bad', unit='bad.service', config=['/etc/systemd/system/bad.service'])\n"
    )
    done = pyinfra(ops_host.lab, "-y", "inventories/sandbox.py", str(deploy), deadline_s=60)
    assert done.status == 1
    assert not hosts.execute(ops_host, "cat /var/lib/laoka/stamps/bad.service.config").ok


def test_a_wrong_key_stops_the_run_in_one_line_before_anything_changed(ops_host: HostFolder) -> None:
    done = pyinfra(ops_host.lab, "-y", "--data", "power_limt_w=100", "inventories/sandbox.py", "deploys/full.py", deadline_s=60)
    assert done.status == 1
    assert "unknown key power_limt_w: did you mean power_limit_w?" in done.stderr
    assert "Traceback" not in done.stderr and "Starting operation" not in done.stderr
