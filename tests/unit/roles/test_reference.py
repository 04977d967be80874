"""The list of inventory keys in docs/ is that of the code."""

from __future__ import annotations

from pathlib import Path

from laoka.fleet.keys import known_keys
from roles.reference import documented, keys, page
from roles.registry import ALL_SETTINGS

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "inventory.md").read_text(encoding="utf-8") == page(), "python -m roles.reference > docs/inventory.md"


def test_an_installed_laoka_knows_the_same_keys() -> None:
    assert "".join(f"{key}\n" for key in sorted(known_keys())) == keys(), (
        "python -m roles.reference keys > laoka/fleet/inventory_keys.txt"
    )


def test_every_key_says_what_it_is() -> None:
    for cls in ALL_SETTINGS:
        texts = documented(cls)
        assert set(texts) == set(cls.model_fields)
        assert all(about.endswith(".") for _, _, about in texts.values())
