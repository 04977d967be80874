"""Every message that the code names is in the catalogue, and every one in the catalogue is named by the code."""

from __future__ import annotations

import re
from pathlib import Path

from laoka.catalog.messages import catalogue
from laoka.stack.message import message
from laoka.stack.plan import Load, memory_plan
from tests.unit.stack.asking import request
from tests.unit.stack.test_memory_plan import ARCH, DRAFTER, ENGINE

ROOT = Path(__file__).resolve().parents[3]
SOURCES = [*(ROOT / "laoka" / "stack").glob("*.py"), ROOT / "laoka" / "cli" / "plan.py", ROOT / "laoka" / "cli" / "lock.py"]


def test_messages_and_code_agree() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    named = set(re.findall(r"""["'](?:stack\.)?((?:evidence|way|why|warn|note|plan|lock|head)_\w+)["']""", text)) - {
        "way_out",
        "head_dim",
    }
    known = {key.removeprefix("stack.") for key in catalogue() if key.startswith("stack.")}
    lines = {name for name in known if name.startswith("line_")}
    assert named == known - lines, (named - known, known - lines - named)
    measured = request("4xv100-sxm2-32gb").checkpoint.weights
    plan = memory_plan(
        weights=measured,
        arch=ARCH,
        engine=ENGINE,
        load=Load(1, 1, "dflash2", 7),
        memory_mib=32510,
        tensor_parallel=4,
        drafter=DRAFTER,
    )
    assert lines == {f"line_{line.key}" for line in plan.lines} | {"line_weights_replicated"}


def test_a_message_in_a_message_speaks_the_same_language() -> None:
    inner = message("way_context", most=7)
    outer = message("lock_refused", host="h", constraint="c", evidence=inner, way_out=inner)
    assert outer.say("en") == "h: c: ask for 7 or fewer. Way out: ask for 7 or fewer"
    assert "请求不超过 7" in outer.say("zh")
