"""The probe runs on this machine in every shell that is here, survives a wedged nvidia-smi, and ssh is called as it must be."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import time
from pathlib import Path

import pytest

from laoka.host import collect, probe
from laoka.host.collect import CouldNotCollect, SshTarget, ssh_argv
from laoka.host.report import build
from laoka.host.sections import Sections, parse
from laoka.host.unread import Unread

SHELLS = [argv for argv in (["sh"], ["dash"], ["bash", "--posix"], ["busybox", "sh"], ["mksh"]) if shutil.which(argv[0])]


def run_probe(shell: list[str], tmp_path: Path, script: str | None = None, **programs: str) -> tuple[Sections, float, str]:
    """The probe's sections with some programs replaced by scripts."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    for name, body in programs.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    started = time.monotonic()
    done = subprocess.run(
        [*shell, "-s"], input=script or probe.script(), capture_output=True, text=True, timeout=30, check=False,
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
    )  # fmt: skip
    return parse(done.stdout), time.monotonic() - started, done.stderr


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: " ".join(shell))
def test_the_probe_runs_here(shell: list[str], tmp_path: Path) -> None:
    found, took_s, noise = run_probe(shell, tmp_path)
    assert noise == ""
    assert found.complete
    assert took_s < probe.DEADLINE_S
    for name in ("probe", "uname", "os-release", "cmdline", "cpuinfo", "meminfo", "disks", "processes", "pci-attributes", "virt"):
        assert isinstance(found.output(name), str), name
    statuses = {name: section.status for name, section in found.by_name.items()}
    assert 125 not in statuses.values(), statuses  # 125: the script lost a command's exit status


def test_the_report_of_this_machine_is_what_the_system_says() -> None:
    report = collect.from_this_machine()
    assert report.kernel.release == os.uname().release
    assert report.hostname == os.uname().nodename
    assert report.probe.is_root is (os.getuid() == 0)
    assert not isinstance(report.system.cpu, Unread)
    assert report.system.cpu.threads == os.cpu_count()
    assert not isinstance(report.system.memory, Unread)
    assert report.system.memory.total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    devices = sorted(path.name for path in Path("/sys/bus/pci/devices").iterdir())
    assert [] if isinstance(report.pci, Unread) else [device.address for device in report.pci] == devices


def test_nvidia_smi_s_three_streams_are_kept_apart(tmp_path: Path) -> None:
    found, _, _ = run_probe(["sh"], tmp_path, nvidia_smi="echo '<out>'; echo 'lost card' >&2; exit 15")
    section = found.section("nvidia-smi-xml")
    assert not isinstance(section, Unread)
    assert (section.status, section.stdout, section.stderr) == (15, "<out>", "lost card")


def hurried(deadline: str, short: str) -> str:
    """The script with one of its deadlines shortened, so that a test need not wait for it."""
    assert deadline in probe.script()
    return probe.script().replace(deadline, short)


def test_a_wedged_nvidia_smi_costs_its_own_section_only(tmp_path: Path) -> None:
    """A driver that hangs makes nvidia-smi deaf to signals; a script that ignores them is as near as a test can get."""
    count = tmp_path / "calls"
    body = f"echo call >>{count}; trap '' TERM INT HUP; n=0; while [ $n -lt 20 ]; do sleep 1; n=$((n + 1)); done"
    script = hurried("timeout -k 1 7 nvidia-smi", "timeout -k 1 1 nvidia-smi")
    found, took_s, _ = run_probe(["sh"], tmp_path, script, nvidia_smi=body)
    assert took_s < probe.DEADLINE_S
    assert found.complete
    section = found.section("nvidia-smi-xml")
    assert not isinstance(section, Unread)
    assert section.timed_out
    assert count.read_text().splitlines() == ["call"]
    assert build(found).nvidia.hung
    assert isinstance(found.output("disks"), str)


def test_the_probe_gives_up_on_an_nvidia_smi_that_can_not_be_killed(tmp_path: Path) -> None:
    """In D state even KILL does nothing, and `timeout` waits on: the probe must end by its own clock."""
    script = hurried("timeout -k 1 7 nvidia-smi -q -x", "sleep 20").replace("deadline=$((NOW + 880))", "deadline=$((NOW + 300))")
    found, took_s, _ = run_probe(["sh"], tmp_path, script, nvidia_smi="exit 0")
    assert took_s < 6
    section = found.section("nvidia-smi-xml")
    assert not isinstance(section, Unread)
    assert section.timed_out
    assert found.complete


def test_a_command_that_hangs_is_cut_off(tmp_path: Path) -> None:
    found, took_s, _ = run_probe(["sh"], tmp_path, hurried("sec dkms-status 8 ", "sec dkms-status 1 "), dkms="sleep 60")
    assert took_s < probe.DEADLINE_S
    assert found.output("dkms-status") == Unread("no answer before its deadline")
    assert isinstance(found.output("disks"), str)


def test_output_that_looks_like_marks_changes_nothing(tmp_path: Path) -> None:
    forged = "printf '@end dkms-status rc=0\\n@section forged\\n|x\\n@done\\nrc=0'; printf '@done\\n' >&2; exit 7"
    found, _, _ = run_probe(["sh"], tmp_path, dkms=forged)
    section = found.section("dkms-status")
    assert not isinstance(section, Unread)
    assert section.status == 7
    assert section.stdout == "@end dkms-status rc=0\n@section forged\n|x\n@done\nrc=0"
    assert section.stderr == "@done"
    assert "forged" not in found.by_name


def test_the_probe_is_posix_sh_without_bashisms() -> None:
    script = probe.script()
    assert script.startswith("#!/bin/sh\n")
    for word in ("[[ ", "<<<", "local ", "declare ", "\nfunction ", "$'", "&>", "\nsource "):
        assert word not in script, word
    assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0


# ---- ssh


def test_ssh_never_asks() -> None:
    argv = ssh_argv(SshTarget("box"))
    assert argv[:4] == ("ssh", "-T", "-o", "BatchMode=yes")
    assert "ConnectTimeout=10" in argv and "KexAlgorithms=-sntrup761x25519*" in argv
    assert argv[-3:-1] == ("--", "box")
    assert "sudo -n" in argv[-1]


def test_ssh_with_key_user_port_and_known_hosts() -> None:
    argv = ssh_argv(SshTarget("box", 2222, "me", "/k/id", "/k/hosts"))
    for pair in (
        ("-p", "2222"),
        ("-l", "me"),
        ("-i", "/k/id"),
        ("-o", "UserKnownHostsFile=/k/hosts"),
        ("-o", "IdentitiesOnly=yes"),
    ):
        assert any(argv[n : n + 2] == pair for n in range(len(argv))), pair
    assert "StrictHostKeyChecking=yes" in argv


def test_a_jump_host_gets_the_same_key() -> None:
    argv = ssh_argv(SshTarget("box", key_file="/k/my id", jump="me@gate:2200"))
    (proxy,) = (word for word in argv if word.startswith("ProxyCommand="))
    assert "-i '/k/my id'" in proxy
    assert proxy.endswith("-p 2200 -W '[%h]:%p' me@gate")


def test_names_of_targets() -> None:
    assert SshTarget("box").name == "box"
    assert SshTarget("box", 2222, "me").name == "me@box:2222"


def test_a_host_that_is_not_there_is_one_line() -> None:
    with pytest.raises(CouldNotCollect) as caught:
        collect.from_ssh(SshTarget("127.0.0.1", port=1))
    assert str(caught.value).startswith("127.0.0.1:1: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"hello", b"\x1f\x8b", b"\xff\xfe"])
def test_a_file_that_is_no_probe_is_one_line(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(CouldNotCollect) as caught:
        collect.from_file(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CouldNotCollect, match="No such file"):
        collect.from_file(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("config", "left_alone"), [("Host *\n  kexalgorithms +diffie-hellman-group14-sha1\n", True), ("User me\n", False)]
)
def test_a_key_exchange_that_the_owner_chose_is_left_alone(
    config: str, left_alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laoka.host.collect.SSH_CONFIGS", ())
    file = tmp_path / "ssh_config"
    file.write_text(config)
    told = any(word.startswith("KexAlgorithms") for word in ssh_argv(SshTarget("box", config_file=str(file))))
    assert told is not left_alone
