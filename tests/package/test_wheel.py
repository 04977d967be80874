"""What is installed from a wheel and from an sdist: in a clean environment, outside of any checkout."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from laoka.cli.main import COMMANDS
from tests.documented import ROOT


def ran(*argv: str | Path, cwd: Path, deadline_s: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in argv], cwd=cwd, capture_output=True, text=True, timeout=deadline_s)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel made from an sdist of this tree, and that sdist: what the sdist lacks, the wheel can't have."""
    folder = tmp_path_factory.mktemp("dist")
    done = ran(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (sdist,) = folder.glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    done = ran(*pip, "-w", folder, sdist, cwd=folder)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel, sdist


@pytest.fixture(scope="module")
def clean(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment with the wheel and its operator's extra."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=True)
    pip = (folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", ROOT / "constraints.txt")
    done = ran(*pip, f"{built[0]}[operator]", cwd=folder, deadline_s=600)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def test_it_plans_from_anywhere(clean: Path, tmp_path: Path) -> None:
    done = ran(clean / "laoka", "plan", "--gpu", "v100-pcie-32gb", cwd=tmp_path)
    assert done.returncode == 0 and "580" in done.stdout and "1cat-vllm" in done.stdout, done.stderr


def test_every_command_is_there(clean: Path, tmp_path: Path) -> None:
    for name in COMMANDS:
        done = ran(clean / "laoka", name, "--help", cwd=tmp_path)
        assert done.returncode == 0 and "Usage: laoka" in done.stdout, done.stderr


def test_the_manual_is_installed(clean: Path) -> None:
    page = clean.parent / "share" / "man" / "man1" / "laoka-check.1"
    assert page.read_text(encoding="utf-8").startswith('.TH "LAOKA CHECK" "1"')


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed(clean: Path, tmp_path: Path, shell: str) -> None:
    done = ran(clean / "laoka", "completion", shell, cwd=tmp_path)
    assert done.returncode == 0 and "_LAOKA_COMPLETE" in done.stdout


def test_bash_completes_a_command(clean: Path, tmp_path: Path) -> None:
    script = 'source <(laoka completion bash); COMP_WORDS=(laoka pl); COMP_CWORD=1; _laoka_completion laoka; echo "${COMPREPLY[@]}"'
    done = ran("bash", "-c", f"PATH={clean}:$PATH; {script}", cwd=tmp_path)
    assert done.stdout.strip() == "plan", done.stderr
