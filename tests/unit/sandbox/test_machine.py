"""What a throw-away host inherits: apt sources in both forms, pip's settings."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from laoka.sandbox.machine import (
    AptSource,
    debian_sources,
    parse_deb822,
    parse_one_line,
    parse_pip_config,
    proxies,
)

DEB822 = """\
# a comment between fields
Types: deb deb-src
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main

Types: deb-src
URIs: http://source.example/debian
Suites: bookworm
Components: main
"""


def test_deb822_reads_enabled_binary_paragraphs_only() -> None:
    assert parse_deb822(DEB822) == (
        AptSource("http://mirror.example/debian", ("bookworm", "bookworm-updates"), ("main", "contrib")),
    )


def test_deb822_folded_field() -> None:
    text = "Types: deb\nURIs: http://a.example/d\nSuites: bookworm\n bookworm-updates\nComponents: main\n"
    assert parse_deb822(text)[0].suites == ("bookworm", "bookworm-updates")


def test_one_line_form_with_options_and_comments() -> None:
    text = (
        "# deb http://no.example x main\n"
        "deb [arch=amd64 signed-by=/k.gpg] http://a.example/debian bookworm main non-free # note\n"
        "deb-src http://a.example/debian bookworm main\n"
        "deb http://b.example/ ./\n"
    )
    assert parse_one_line(text) == (
        AptSource("http://a.example/debian", ("bookworm",), ("main", "non-free")),
        AptSource("http://b.example/", ("./",), ()),
    )


def test_debian_sources_takes_the_suite_its_updates_and_main_only(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text("deb http://old.example/ubuntu noble main\n")
    (tmp_path / "sources.list.d" / "debian.sources").write_text(DEB822)
    (tmp_path / "sources.list.d" / "other.list").write_text("deb http://vendor.example/ bookworm vendor\n")
    found = debian_sources("bookworm", tmp_path)
    assert found == (AptSource("http://mirror.example/debian", ("bookworm", "bookworm-updates"), ("main",)),)
    assert found[0].lines() == (
        "deb http://mirror.example/debian bookworm main",
        "deb http://mirror.example/debian bookworm-updates main",
    )


def test_debian_sources_is_empty_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text("deb http://old.example/ubuntu noble main universe\n")
    assert debian_sources("bookworm", tmp_path) == ()


def test_pip_settings_merge_and_share_local_paths(tmp_path: Path) -> None:
    wheels, index = tmp_path / "wheels", tmp_path / "index" / "simple"
    wheels.mkdir()
    index.mkdir(parents=True)
    settings = parse_pip_config(
        f":env:.find-links='{wheels}'\n"
        "global.cache-dir='/root/.cache/pip'\n"
        "global.index-url='https://mirror.example/simple'\n"
        f"global.extra-index-url='file://{index}\\nhttps://second.example/simple'\n"
        ":env:.disable-pip-version-check='1'\n"
        "freeze.timeout='10'\n"
        "user.timeout='33'\n"
    )
    assert settings.conf == (
        f"[global]\nextra-index-url = file://{index} https://second.example/simple\nfind-links = {wheels}\n"
        "index-url = https://mirror.example/simple\ntimeout = 33\n"
    )
    assert set(settings.paths) == {wheels, index.parent}


@given(st.text())
def test_no_text_breaks_a_parser(text: str) -> None:
    parse_deb822(text)
    parse_one_line(text)
    assert parse_pip_config(text).conf.startswith("[global]\n")


def test_proxies_take_either_case() -> None:
    assert proxies({"HTTP_PROXY": "http://p:3128", "no_proxy": "localhost", "PATH": "/"}) == {
        "http_proxy": "http://p:3128",
        "no_proxy": "localhost",
    }
