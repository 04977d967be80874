"""Operations on a model server: it is well when a real completion comes back, and only then."""

from __future__ import annotations

import shlex
from collections.abc import Generator

from pyinfra.api.facts import FactBase
from pyinfra.api.operation import operation
from pyinfra.context import host


def ask_command(python: str, url: str, model: str, judge_text: bool, deadline_s: int) -> str:
    """Shell text that asks for one completion with the host's own laoka; its status is 0 when the server is well."""
    words = [
        python, "-m", "laoka.serving.completion", "ask", "--url", url, "--model", model, "--max-tokens", "8",
        "--deadline-s", str(deadline_s),
    ]  # fmt: skip
    return " ".join(shlex.quote(word) for word in words) + ("" if judge_text else " --no-judge-text")


class CompletionComesBack(FactBase[bool]):
    """Whether a short completion comes back from the server."""

    def command(self, python: str, url: str, model: str, judge_text: bool) -> str:
        return f"{ask_command(python, url, model, judge_text, 30)} >/dev/null 2>&1 && echo yes || echo no"

    def process(self, output: list[str]) -> bool:
        return "yes" in output


@operation()
def expect_completion(python: str, url: str, model: str, unit: str, judge_text: bool) -> Generator[str, None, None]:
    """Have the server answer a completion; one that does not is restarted, and must answer then.

    + python: interpreter on the host that has laoka
    + url, model: where and what is asked
    + unit: what is restarted
    + judge_text: whether garbage in the answer counts as ill
    """
    if host.get_fact(CompletionComesBack, python=python, url=url, model=model, judge_text=judge_text):
        host.noop("a completion came back")
        return
    yield f"systemctl restart {shlex.quote(unit)}"
    yield ask_command(python, url, model, judge_text, 60)
