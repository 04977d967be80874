"""The pages about incidents are those of the code, in both languages, and no class and no Xid of a V100 is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from laoka.agent.signals import CLASS_OF_KIND, SEVERITY_OF_CLASS
from laoka.catalog import xids
from laoka.catalog.messages import LANGUAGES, Language
from roles.incidents import page

DOCS = Path(__file__).resolve().parents[3] / "docs"
FILES = {"en": "incidents.md", "zh": "incidents.zh-CN.md"}


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_page_is_up_to_date(lang: Language) -> None:
    file = DOCS / FILES[lang]
    assert file.read_text(encoding="utf-8") == page(lang), f"python -m roles.incidents {lang} > docs/{file.name}"


@pytest.mark.parametrize("lang", LANGUAGES)
def test_no_class_no_signal_and_no_xid_is_missing(lang: Language) -> None:
    text = page(lang)
    assert [name for name in SEVERITY_OF_CLASS if f"(`{name}`)\n" not in text] == []
    assert [kind for kind in CLASS_OF_KIND if f"`{kind}`" not in text] == []
    assert [row.number for row in xids.xids() if row.volta and f"\n| {row.number} | " not in text] == []


def test_what_needs_care_says_so() -> None:
    text = page("en")
    double_bit = next(line for line in text.splitlines() if line.startswith("| 48 |"))
    assert "reset the card -> reload the driver" in double_bit and "reboot the host (reboot)" in double_bit
    heat = text.partition("(`heat`)")[2].partition("###")[0]
    assert "tells you, and does nothing by itself" in heat
