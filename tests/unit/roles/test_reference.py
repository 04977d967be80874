"""The list of inventory keys in docs/ is that of the code."""

from __future__ import annotations

import pytest

from laoka.catalog.messages import LANGUAGES, Language
from laoka.catalog.translations import translations
from laoka.fleet.keys import known_keys
from roles.reference import documented, heading, keys, page
from roles.registry import ALL_SETTINGS


def test_every_key_and_role_is_told_in_chinese_and_nothing_else() -> None:
    told = {about for cls in ALL_SETTINGS for _, _, about in documented(cls).values()} | {heading(cls) for cls in ALL_SETTINGS}
    assert set(translations("keys")) == told, "add or mend the text in laoka/catalog/translations/keys.toml"


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_page_has_every_key(lang: Language) -> None:
    text = page(lang)
    for cls in ALL_SETTINGS:
        for key in cls.model_fields:
            assert text.count(f"\n| `{key}` | ") == 1, key


def test_an_installed_laoka_knows_the_same_keys() -> None:
    assert "".join(f"{key}\n" for key in sorted(known_keys())) == keys(), (
        "python -m roles.reference > laoka/fleet/inventory_keys.txt"
    )


def test_every_key_says_what_it_is() -> None:
    for cls in ALL_SETTINGS:
        texts = documented(cls)
        assert set(texts) == set(cls.model_fields)
        assert all(about.endswith(".") for _, _, about in texts.values())
