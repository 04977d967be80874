"""Every finding of an audit has its words in both languages, and they ask for no value that is not given."""

from __future__ import annotations

from pathlib import Path

import pytest

import laoka.fleet
from laoka.catalog.messages import LANGUAGES, catalogue
from laoka.fleet.across import IDS
from laoka.fleet.judge import AUDITED_CHECKS, RULES
from tests.unit.checks.test_wording import fields, written_cases

FOLDER = Path(laoka.fleet.__file__).parent
# Cases that a function without a rule of its own yields: (rule, case, values).
COMPUTED = [
    *((rule, case, {"wanted", "seen"}) for rule in ("audit.model", "audit.drafter") for case in ("other", "other-revision")),
    *((rule, "none", {"wanted"}) for rule in ("audit.model", "audit.drafter")),
    ("audit.odd-one", "differs", {"what", "odd", "hosts", "usual", "count", "subject"}),
    ("audit.firmware-dates", "differ", {"board", "dates", "subject"}),
    ("audit.card-elsewhere", "moved", {"home", "place", "seen", "subject"}),
    ("audit.card-elsewhere", "twice", {"uuid", "hosts", "subject"}),
    ("audit.supplies", "suspect", {"model", "count", "all", "subject"}),
    ("audit.end-of-life", "ahead", {"branch", "month", "count", "subject"}),
    ("audit.end-of-life", "passed", {"branch", "count", "subject"}),
]
CASES = sorted({(rule, case, tuple(sorted(names))) for rule, case, names in (*written_cases(FOLDER), *COMPUTED)})


def test_the_scan_finds_the_rules() -> None:
    assert {rule for rule, _, _ in CASES} == {*RULES, *IDS}


@pytest.mark.parametrize(("rule", "case", "names"), CASES, ids=lambda value: str(value))
def test_each_case_is_worded(rule: str, case: str, names: tuple[str, ...]) -> None:
    known = {*names, "label"}
    said = catalogue()
    keys = [next(key for key in (f"checks.{rule}.{case}", f"checks.{case}") if key in said), f"checks.{rule}"]
    if case != "ok":
        for part in (".why", ".next"):
            keys.append(next(key for key in (f"checks.{rule}.{case}{part}", f"checks.{rule}{part}") if key in said))
    for key in keys:
        for lang in LANGUAGES:
            assert not fields(said[key][lang]) - known, f"{key} [{lang}]"


def test_every_area_has_a_name() -> None:
    areas = {area for area, _, _ in RULES.values()} | {"fleet"}
    assert all(f"checks.area.{area}" in catalogue() for area in areas)


def test_an_audit_repeats_what_stops_a_deploy() -> None:
    from laoka.checks import CHECKS

    assert {known.id for known in CHECKS.values() if known.gate} <= set(AUDITED_CHECKS)
