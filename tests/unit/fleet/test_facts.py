"""The parts of a report as pyinfra facts: found by the names that pyinfra's command line is given, and plain for --json."""

from __future__ import annotations

import importlib
import json

import pytest

import laoka
from laoka.host.sections import render
from tests.unit.fleet import deployed_host


def fact(name: str, **changes: str | None) -> dict[str, object]:
    # As pyinfra's command line finds it (whose own import patches the sockets of the process: tests/ops asks it itself).
    found = getattr(importlib.import_module("laoka"), name)
    values: dict[str, object] = found().process(render(deployed_host.given(**changes)).splitlines())
    json.dumps(values)
    return values


def test_the_driver() -> None:
    told = fact("NvidiaDriver")
    assert (told["version"], told["held"]) == ("580.173.02", True)
    assert told["loaded"] == {"version": "580.173.02", "flavour": "proprietary"}


def test_what_was_not_read_says_so() -> None:
    assert fact("NvidiaDriver", packages=None)["packages"] == {"unread": "not in the input"}
    assert fact("LaokaDeployed", laoka=None) == {"unread": "not in the input"}


def test_cards_next_boot_and_what_is_deployed() -> None:
    assert list(fact("NvidiaCards")) == ["0000:02:00.0", "0000:03:00.0"]
    assert fact("NextBoot")["next"] == "6.8.0-124-generic"
    assert fact("LaokaDeployed")["agent"] == "0.1.0-aa"


def test_no_other_name_is_a_fact() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = laoka.Nothing  # type: ignore[attr-defined]
