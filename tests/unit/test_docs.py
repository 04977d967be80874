"""The documentation: generated pages are those of the code, both languages are there, every command says where it is run."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from pathlib import Path

import pytest

from docs.generate import cell, generated, placeholders
from laoka.catalog.boards import boards
from laoka.catalog.failures import failures
from laoka.catalog.gpus import gpus
from laoka.catalog.messages import catalogue
from laoka.checks import CHECKS
from laoka.checks.policy import parse_policy
from laoka.serving.completion import SETTLED
from laoka.serving.failure import KINDS
from laoka.stack.models import checkpoint_of
from laoka.stack.request import DEFAULT_MODEL, Request, parse_gpu
from laoka.stack.resolve import Stack, resolve
from laoka.stack.tables import stack_items
from tests.documented import MARKS, PAGES, ROOT, all_blocks, blocks_of, run

DOCS = ROOT / "docs"
LANGUAGES_OF_FENCES = {"sh", "mermaid", "text", "python", "toml", "ini", "json", "yaml", "xml", "nginx", "http"}


def test_the_generated_pages_are_up_to_date() -> None:
    for path, text in generated().items():
        there = path.read_text(encoding="utf-8") if path.exists() else ""
        changed = "\n".join(difflib.unified_diff(there.splitlines(), text.splitlines(), "there", "generated", lineterm="", n=0))
        assert not changed, f"python -m docs.generate: {path.name}\n{changed[:2000]}"


@pytest.mark.parametrize("suffix", [".md", ".zh-CN.md"])
def test_the_policy_in_the_text_is_one(suffix: str) -> None:
    text = (DOCS / f"adding-hosts{suffix}").read_text(encoding="utf-8")
    rows = parse_policy(re.findall(r"```toml\n(.*?)```", text, re.DOTALL)[0], "docs", CHECKS)
    assert [row.id for row in rows] == ["thermal.idle"]


def test_the_generated_pages_have_every_row() -> None:
    for suffix in (".md", ".zh-CN.md"):
        for page, names in (
            ("checks", list(CHECKS)),
            ("cards", [gpu.id for gpu in gpus()]),
            ("failures", [row.id for row in failures()]),
            ("boards", [board.match for board in boards()]),
        ):
            text = (DOCS / "reference" / f"{page}{suffix}").read_text(encoding="utf-8")
            assert [name for name in names if name not in text] == []


def test_every_key_of_a_locked_stack_is_described() -> None:
    stack = resolve(Request(parse_gpu("2xv100-sxm2-32gb"), checkpoint_of(DEFAULT_MODEL)))
    assert isinstance(stack, Stack)
    assert {key.removeprefix("lock.") for key in catalogue() if key.startswith("lock.")} == set(stack_items(stack))


def test_every_page_has_its_twin() -> None:
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    twins = {page.removesuffix(".zh-CN.md") + ".md" for page in pages if page.endswith(".zh-CN.md")}
    assert {page for page in pages if not page.endswith(".zh-CN.md")} == twins


def test_twins_show_the_same_commands_in_the_same_order() -> None:
    for page in DOCS.rglob("*.zh-CN.md"):
        twin = page.with_name(page.name.removesuffix(".zh-CN.md") + ".md")
        both = [[code(block.text) for block in blocks_of(read(path), path.name) if block.language == "sh"] for path in (page, twin)]
        assert both[0] == both[1], page.name


def test_a_page_links_to_pages_of_its_own_language() -> None:
    faults = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\((?!\w+:)([^)#\s]+\.md)(?:#[^)]*)?\)", text):
            target = page.parent / link
            chinese = target.name.endswith(".zh-CN.md")
            twin = target.with_name(target.name.removesuffix(".md").removesuffix(".zh-CN") + (".md" if chinese else ".zh-CN.md"))
            of_another = chinese != page.name.endswith(".zh-CN.md") and twin.exists()
            if of_another and twin != page:  # to its own twin: "read this in English"
                faults.append(f"{page.relative_to(ROOT)}: {link}, and there is {twin.name}")
            if not target.exists():
                faults.append(f"{page.relative_to(ROOT)}: {link} is not there")
    assert faults == []


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def code(text: str) -> list[str]:
    """The commands of a block without their comments, which are in the page's language."""
    return [line.split(" # ")[0].strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


def test_every_block_says_what_it_is_and_every_command_where_it_is_run() -> None:
    found = all_blocks()
    assert len(found) > 20
    assert [block.id for block in found if block.language not in LANGUAGES_OF_FENCES] == []
    assert [block.id for block in found if block.language == "sh" and block.mark not in MARKS] == []
    assert [block.id for block in found if block.language != "sh" and block.mark in MARKS] == []
    marks = Counter(block.mark for block in found if block.language == "sh")
    assert all(marks[mark] for mark in ("operator", "sandbox", "host", "bootstrap"))


def test_blocks_are_found_with_their_marks() -> None:
    text = "# T\n\n<!-- host -->\n```sh\nls\n```\n\n- item\n\n  <!-- operator 1 -->\n  ```sh\n  pwd\n  ```\n\n```\nbare\n```\n"
    assert [(b.line, b.language, b.mark, b.text.strip(), b.status) for b in blocks_of(text, "t.md")] == [
        (3, "sh", "host", "ls", 0),
        (10, "sh", "operator", "pwd", 1),
        (15, "", None, "bare", 0),
    ]


def test_a_block_that_fails_is_seen(tmp_path: Path) -> None:
    assert run("false\ntrue\n", tmp_path, {}, 10).returncode == 1
    assert run("laoka --version\n", tmp_path, {}, 60).returncode == 0


@pytest.mark.parametrize(("text", "shown"), [("a|b", "a\\|b"), ("a\nb", "a b"), ("<x>", "&lt;x&gt;")])
def test_a_cell_stays_one(text: str, shown: str) -> None:
    assert cell(text) == shown


def test_placeholders_are_shown_as_such() -> None:
    assert placeholders("{subject}: rung {rung}") == "‹subject›: rung ‹rung›"


def test_no_fence_opens_inside_another() -> None:
    for page in PAGES:
        opened = ""
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            if not line.lstrip().startswith("```"):
                continue
            info = line.strip().lstrip("`")
            assert not (opened and info), f"{page.name}:{number}: ```{info} inside ```{opened}"
            opened = "" if opened else info or "text"
        assert not opened, f"{page.name}: its last fence is never closed"


@pytest.mark.parametrize(
    ("page", "order"),
    [
        ("troubleshooting.md", ["Symptom", "Input", "Environment", "Parameters", "Tool boundary"]),
        ("troubleshooting.zh-CN.md", ["症状", "输入", "环境", "参数", "工具边界"]),
    ],
)
def test_troubleshooting_has_its_order_and_every_name_that_people_see(page: str, order: list[str]) -> None:
    text = read(DOCS / page)
    assert re.findall(r"^## (\d)\. ([\w ]+)[:：]", text, re.MULTILINE) == [(str(n), name) for n, name in enumerate(order, 1)]
    codes = {code for path in (ROOT / "laoka/serving").glob("*.py") for code in re.findall(r'Refusal\(\d+, "(\w+)"', read(path))}
    assert len(codes) > 15
    assert sorted(name for name in {*KINDS, *SETTLED, *codes} if f"`{name}`" not in text) == []
