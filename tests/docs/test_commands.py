"""Commands of README and docs/ that need no host: each block is pasted into a shell, in a checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.documented import Block, checkout, commands, run


@pytest.mark.parametrize("block", commands("operator"), ids=lambda block: block.id)
def test_it_works_as_written(block: Block, tmp_path: Path) -> None:
    done = run(block.text, checkout(tmp_path), os.environ, 120)
    assert done.returncode == block.status, f"{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
