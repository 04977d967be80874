"""Groups by kind of card, for an inventory: `globals().update(by_card(gpu_hosts))` at its end. Pure.

Then `--limit v100_pcie_32gb` takes every host with such a card, and group_data/v100_pcie_32gb.py beside the inventory is for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from laoka.catalog import gpus


def by_card(*groups: Any) -> dict[str, list[str]]:
    """Names of hosts by kind of card, as groups that pyinfra takes.

    Arguments: `groups` as an inventory has them: a list of hosts, or a tuple of a list and data. A kind is the catalogue's id of a
    card with _ for -; a PCI id that is not there is card_ID. A host with two kinds is in both groups; one without `expected_gpus`
    in none. What is of another form is left to the deploys, which refuse it by file, line and host.
    """
    found: dict[str, list[str]] = {}
    for group in groups:
        hosts, common = group if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], list) else (group, {})
        for entry in hosts:
            name, data = entry if isinstance(entry, tuple) else (entry, {})
            for kind in kinds({**common, **data}.get("expected_gpus") or ()):
                found.setdefault(kind, []).append(name)
    return found


def kinds(expected: Iterable[Any]) -> tuple[str, ...]:
    """The kinds of cards in `expected_gpus`, each once, in order."""
    ids = [str(card["device_id"]) for card in expected if isinstance(card, dict) and card.get("device_id")]
    names = [known.id if (known := gpus.by_device_id(one)) else f"card-{one.replace(':', '-')}" for one in ids]
    return tuple(dict.fromkeys(name.replace("-", "_") for name in names))
