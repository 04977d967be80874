"""Operations on the cards' power caps."""

from __future__ import annotations

import shlex
from collections.abc import Generator

from pyinfra.api.operation import operation
from pyinfra.context import host

from laoka.facts.power import PowerLimits


@operation()
def power_limits(limit_w: int, cards: int, unit: str) -> Generator[str, None, None]:
    """Have every card enforce a power cap; what lost it (a driver reload, a rescan) gets it again by the unit.

    + limit_w: the cap in watts
    + cards: how many cards must say so
    + unit: the unit that applies it
    """
    seen = host.get_fact(PowerLimits)
    if len(seen) >= cards and all(value == limit_w for value in seen):
        host.noop(f"{len(seen)} cards at {limit_w} W")
        return
    yield f"systemctl restart {shlex.quote(unit)}"
    yield (
        "seen=$(timeout 20 nvidia-smi --query-gpu=power.limit --format=csv,noheader,nounits | sort -u); "
        f'[ "${{seen%%.*}}" = {limit_w} ] || {{ echo "the cards say $seen W, not {limit_w} W" >&2; exit 1; }}'
    )
