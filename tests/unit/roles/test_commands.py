"""Commands and package patterns of the roles, as text."""

from __future__ import annotations

import subprocess
from pathlib import Path

from laoka.operations.refusal import refusal
from laoka.operations.steps import write_stamp
from laoka.serving.unit_config import config_hash_command
from roles.base.deploy import BaseSettings, apt_settings
from roles.engine.commands import with_env


def test_environment_is_quoted_and_ordered() -> None:
    assert with_env({"B": "x y", "A": "1"}, "run") == "A=1 B='x y' run"
    assert with_env({}, "run") == "run"


def sh(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=10)


def test_a_refusal_prints_its_lines_and_fails() -> None:
    done = sh(refusal(["it's off", "$HOME stays"]))
    assert (done.returncode, done.stderr) == (1, "it's off\n$HOME stays\n")


def test_apt_is_told_of_proxy_exceptions_and_the_only_sources(tmp_path: Path) -> None:
    """As apt itself reads it."""
    file = tmp_path / "50laoka"
    settings = BaseSettings(http_proxy="http://10.0.0.2:3128", no_proxy="127.0.0.1,mirror.lan", apt_sources_only=True)
    file.write_text(apt_settings(settings))
    # An empty folder, so that this machine's own settings have no say.
    empty = tmp_path / "none"
    empty.mkdir()
    done = sh(f"APT_CONFIG={file} apt-config -o Dir::Etc::parts={empty} dump")
    assert done.returncode == 0, done.stderr
    told = set(done.stdout.splitlines())
    assert {
        'Acquire::http::Proxy "http://10.0.0.2:3128";',
        'Acquire::https::Proxy "http://10.0.0.2:3128";',
        'Acquire::http::Proxy::mirror.lan "DIRECT";',
        'Dir::Etc::sourcelist "/dev/null";',
        'Dir::Etc::sourceparts "/etc/apt/laoka.sources.d";',
        'DPkg::Lock::Timeout "300";',
    } <= told, done.stdout
    assert "Proxy" not in apt_settings(BaseSettings()) and "SourceParts" not in apt_settings(BaseSettings())


def test_a_stamp_is_written_whole(tmp_path: object) -> None:
    path = f"{tmp_path}/a/stamp"
    assert sh(write_stamp(path, "one 'two'")).returncode == 0
    assert sh(f"cat {path}; ls {tmp_path}/a").stdout == "one 'two'\nstamp\n"


def test_the_configuration_hash_follows_content_links_and_absence(tmp_path: object) -> None:
    file, link, gone = (f"{tmp_path}/{name}" for name in ("file", "link", "gone"))
    command = config_hash_command([file, link, gone])
    seen = []
    for change in (f"echo 1 > {file}; mkdir {tmp_path}/x {tmp_path}/y; ln -s {tmp_path}/x {link}", f"echo 2 > {file}",
                   f"ln -sfn {tmp_path}/y {link}", f"echo 3 > {gone}", ":"):  # fmt: skip
        sh(change)
        seen.append(sh(command).stdout.strip())
    assert len(set(seen[:4])) == 4 and seen[3] == seen[4] and all(len(value) == 64 for value in seen)
