"""Operations for speculative decoding: have the host decide; render flags with what it decided."""

from __future__ import annotations

import json
from typing import Any

from pyinfra.api.operation import operation
from pyinfra.context import host
from pyinfra.operations import files

from laoka.facts.speculative import Decided
from laoka.operations.steps import Commands, locked

FLAG = "speculative-config"


@operation()
def decide_speculation(key: str, command: str) -> Commands:
    """Have the host decide on speculative decoding, unless it did for this very plan, engine and target.

    + key: the plan's key
    + command: what decides on the host (laoka.serving.speculative_host)
    """
    decided = host.get_fact(Decided)
    if decided.stands(key):
        host.noop(decided.reason)
        return
    yield locked(command)
    # Read after the command ran; in a dry run nothing did, and there is nothing to tell.
    told = host.get_fact(Decided)
    if told.key == key:
        host.log(told.reason)


@operation()
def flags_file(src: str, dest: str, flags: dict[str, Any], key: str, expected: dict[str, Any], values: dict[str, Any]) -> Commands:
    """The engine's flags, with --speculative-config as the host decided; what the inventory says itself goes before.

    + src: template
    + dest: file on the host
    + flags: all other flags
    + key: key of the plan that the decision has to be for
    + expected: what the plan would have, to tell what a dry run would change before there is a decision
    + values: what else the template is filled with
    """
    decided = host.get_fact(Decided)
    config = decided.config if decided.key == key else expected
    chosen = {FLAG: json.dumps(config, sort_keys=True)} if config else {}
    yield from files.template._inner(src=src, dest=dest, mode="644", flags={**chosen, **flags}, **values)
