"""The documentation's site: it builds without a broken link or anchor, in both languages, and loads nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documented import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_both_languages_are_there(site: Path) -> None:
    for page in ("index.html", "inventory/index.html", "reference/checks/index.html"):
        assert (site / page).exists() and (site / "zh-CN" / page).exists()
    assert 'lang="zh' in (site / "zh-CN" / "index.html").read_text(encoding="utf-8")


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"""<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=["']?(https?://[^"'\s>]+)""", text)
        assert [url for url in loaded if "canonical" not in url] == [], page


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Home\n\n[gone](gone.md) [no anchor](#nowhere)\n")
    (tmp_path / "mkdocs.yml").write_text(config[: config.index("nav:")] + "nav:\n  - Home: index.md\n")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0 and "gone.md" in done.stderr and "#nowhere" in done.stderr
