"""Commands of README and docs/ on hosts of the sandbox: the operator's with inventories/lab.py, and those on a deployed host."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from laoka.sandbox import hosts
from laoka.sandbox.lab import HostFolder
from tests.documented import Block, checkout, commands, run
from tests.hosts import environment

pytestmark = pytest.mark.sandbox


@pytest.mark.parametrize("block", commands("sandbox"), ids=lambda block: block.id)
def test_from_the_operators_machine(block: Block, served_pair: tuple[HostFolder, HostFolder], tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    shutil.copy2(folder / "inventories" / "sandbox.py", folder / "inventories" / "lab.py")
    done = run(block.text, folder, environment(served_pair[0].lab), 600)
    assert done.returncode == block.status, f"{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("block", commands("host"), ids=lambda block: block.id)
def test_on_a_deployed_host(block: Block, served: HostFolder) -> None:
    done = hosts.execute(served, f"bash -euo pipefail -lc {shlex.quote(block.text)}", deadline_s=300, check=False)
    assert done.status == block.status, f"{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
