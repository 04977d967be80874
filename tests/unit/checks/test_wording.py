"""Every case that a check can yield has its words in both languages, and the words ask for no value that is not given."""

from __future__ import annotations

import ast
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

import laoka.checks
from laoka.catalog.messages import LANGUAGES, catalogue
from laoka.checks import AREAS, CHECKS
from laoka.checks.cards import RM_STATUS

FOLDER = Path(laoka.checks.__file__).parent
MAKERS = {"ok", "info", "warn", "fail", "outcome", "make", "_judged"}
# Cases whose name is not written in the call: (check, case, values).
COMPUTED = [
    *(("cards.initialised", case, {"status", "subject"}) for case in (*RM_STATUS.values(), "other")),
    *(("firmware.above-4g", case, {"rung", "menu", "subject"}) for case in ("off", "too-small", "no-room", "bridge-32bit")),
    *(("firmware.above-4g", case, {"rung", "menu", "subject"}) for case in ("no-address", "small")),
    *(("firmware.above-4g", f"no-card-{case}", {"rung", "menu"}) for case in ("too-small", "no-room")),
    *(("firmware.above-4g", f"no-card-{case}", {"rung", "menu"}) for case in ("on", "likely-on", "unknown")),
    *((f"thermal.{what}", case, {"now", "limit", "subject"}) for what in ("memory", "core") for case in ("at-limit", "close")),
    *(("platform.kind", case, {"technology"}) for case in ("wsl", "windows")),
    *(("pcie.uncorrected-errors", case, {"subject"}) for case in ("fatal", "nonfatal")),
    *(("pcie.corrected-errors", case, {"subject"}) for case in ("flood", "some")),
    *(("driver.bound", case, {"subject"}) for case in ("vfio-pci", "nouveau")),
]


def written_cases(folder: Path = FOLDER) -> Iterator[tuple[str, str, set[str]]]:
    """(check, case, names of values) of every call in a check function whose case is a literal."""
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            ids = [
                decorator.args[0].value
                for decorator in node.decorator_list
                if isinstance(decorator, ast.Call) and isinstance(decorator.args[0], ast.Constant)
            ]
            for call in ast.walk(node) if ids else ():
                if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in MAKERS - {"_judged"}):
                    continue
                names = {keyword.arg for keyword in call.keywords if keyword.arg}
                if any(keyword.arg is None for keyword in call.keywords):
                    names |= {"code", "subject_name"}  # xid.bursts passes these in one mapping
                if call.func.id == "ok":
                    yield str(ids[0]), "ok", names
                    continue
                literals = [arg.value for arg in call.args[:2] if isinstance(arg, ast.Constant)]
                if literals and isinstance(call.args[0], ast.Constant):
                    yield str(ids[0]), str(literals[-1] if call.func.id == "outcome" else literals[0]), names


CASES = sorted({(check, case, tuple(sorted(names))) for check, case, names in (*written_cases(), *COMPUTED)})


def fields(words: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(words) if name}


def test_the_scan_finds_the_checks() -> None:
    assert {check for check, _, _ in CASES} | {"platform.probe-complete"} == set(CHECKS)
    assert len(CHECKS) >= 60


@pytest.mark.parametrize(("check", "case", "names"), CASES, ids=lambda value: str(value))
def test_each_case_is_worded(check: str, case: str, names: tuple[str, ...]) -> None:
    known = {*names, "label"}
    said = catalogue()
    title = next(key for key in (f"checks.{check}.{case}", f"checks.{case}") if key in said)
    keys = [title]
    if case != "ok":
        for part in (".why", ".next"):
            found = [key for key in (f"checks.{check}.{case}{part}", f"checks.{check}{part}") if key in said]
            assert found or (part == ".next" and case.startswith("no-card-")), f"{check}.{case}{part} has no words"
            keys += found[:1]
    for key in keys:
        for lang in LANGUAGES:
            missing = fields(said[key][lang]) - known
            assert not missing, f"{key} [{lang}] asks for {missing}"


@pytest.mark.parametrize("check", sorted(CHECKS))
def test_each_check_has_a_name_a_docstring_and_a_source(check: str) -> None:
    assert f"checks.{check}" in catalogue()
    assert (CHECKS[check].function.__doc__ or "").strip()
    assert CHECKS[check].source


def test_each_area_has_a_name() -> None:
    assert all(f"checks.area.{area}" in catalogue() for area in AREAS)
    assert {check.area for check in CHECKS.values()} == set(AREAS)
