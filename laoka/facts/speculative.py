"""Fact: what a host decided on speculative decoding, and whether that still stands."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyinfra.api.facts import FactBase

from laoka.serving.engine_pin import CURRENT, ENGINES
from laoka.serving.speculative import DECISION, parse_decision


@dataclass(frozen=True)
class DecidedHere:
    """A host's decision; `key` is empty where there is none. `moved`: engine or target are not those that it was made with."""

    key: str = ""
    reason: str = ""
    method: str | None = None
    config: Mapping[str, Any] | None = None
    again: bool = False
    moved: bool = False

    def stands(self, key: str) -> bool:
        """Whether it needs not be made again for a plan of this key."""
        return bool(key) and self.key == key and not self.again and not self.moved

    def to_json(self) -> dict[str, object]:
        """For pyinfra's --json output."""
        return dict(vars(self))


class Decided(FactBase[DecidedHere]):
    """What the host decided (laoka.serving.speculative_host)."""

    @staticmethod
    def default() -> DecidedHere:
        return DecidedHere()

    def command(self) -> str:
        link = shlex.quote(str(ENGINES / CURRENT))
        return f"echo engine=$(readlink -f {link}); cat {shlex.quote(str(DECISION))} 2>/dev/null || true"

    def process(self, output: list[str]) -> DecidedHere:
        decision = parse_decision("\n".join(output[1:]))
        if decision is None:
            return DecidedHere()
        moved = output[0].partition("=")[2].strip() != decision.engine
        return DecidedHere(
            decision.decided_for, decision.reason, decision.method, decision.config, decision.again or decision.refused, moved
        )
