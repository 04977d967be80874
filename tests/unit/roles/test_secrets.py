"""Secrets by file, environment and sops. sops is a stand-in that notes how it was asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from roles.gateway.deploy import GatewaySettings, checked
from roles.secrets import secret, secret_file
from roles.settings import InventoryError
from roles.watchdog import channels
from roles.watchdog.channels import AlertChannel
from roles.watchdog.deploy import WatchdogSettings, alert_urls

KEY = "0123456789abcdef0123456789abcdef"
SOPS = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/asked"
case "$*" in
*wrong*) printf 'Failed to get the data key required to decrypt the SOPS file.\\n\\nGroup 0: FAILED\\n\\nbut none were.' >&2
    exit 128 ;;
*--extract*) printf 'the-value' ;;
*) printf 'ann %s\\n' KEY ;;
esac
""".replace("KEY", KEY)


@pytest.fixture
def sops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an encrypted file and a program called sops, the first on the path."""
    tool = tmp_path / "bin" / "sops"
    tool.parent.mkdir()
    tool.write_text(SOPS)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    for name in ("s.yaml", "wrong.yaml"):
        (tmp_path / name).write_text("alerts: ENC[...]\n")
    return tmp_path


def test_a_file_and_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("abc\n")
    monkeypatch.setenv("LAB_KEY", "def")
    assert (secret("plain"), secret(f"@{tmp_path}/key"), secret("env:LAB_KEY")) == ("plain", "abc", "def")
    assert (secret_file(f"{tmp_path}/key"), secret_file("env:LAB_KEY")) == ("abc", "def")


def test_sops_is_asked_once_for_each_value(sops: Path) -> None:
    assert [secret(f"sops:{sops}/s.yaml#alerts.wecom") for _ in range(3)] == ["the-value"] * 3
    assert (sops / "bin" / "asked").read_text() == f'--decrypt --extract ["alerts"]["wecom"] {sops}/s.yaml\n'
    assert secret_file(f"sops:{sops}/s.yaml") == f"ann {KEY}"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("@/nowhere/key", "/nowhere/key: No such file or directory: a value that begins with @"),
        ("env:LAB_NONE", "env:LAB_NONE: the environment of this run has no LAB_NONE"),
        ("sops:/nowhere/s.yaml#a", "there is no such file"),
        ("sops:{}/wrong.yaml#a", "wrong.yaml#a: sops could not decrypt it: Failed to get the data key"),
    ],
)
def test_what_is_missing_is_told(sops: Path, value: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        secret(value.format(sops))


def test_without_sops_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "s.yaml").write_text("a: ENC[...]\n")
    with pytest.raises(ValueError, match="sops is not installed on this machine"):
        secret(f"sops:{tmp_path}/s.yaml#a")


def test_alerts_and_the_gateways_keys_take_all_three(sops: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_URLS", "ntfy://one\nntfy://two")
    entry = AlertChannel(service="wecom", key=f"sops:{sops}/s.yaml#alerts.wecom")  # type: ignore[call-arg]
    assert channels.lines((entry,), None) == "wecombot://the-value\n"
    assert alert_urls(WatchdogSettings(alert_urls_file="env:LAB_URLS"), "x") == "ntfy://one\nntfy://two\n"
    (key,) = checked("x", GatewaySettings(gateway_listen="0.0.0.0:1", gateway_keys_file=f"sops:{sops}/s.yaml"))
    assert key.key == KEY
    with pytest.raises(InventoryError, match="host x: alert_urls_file env:LAB_NONE: the environment of this run has no LAB_NONE"):
        alert_urls(WatchdogSettings(alert_urls_file="env:LAB_NONE"), "x")
    with pytest.raises(InventoryError, match="host x: gateway_keys_file: env:LAB_NONE"):
        checked("x", GatewaySettings(gateway_listen="0.0.0.0:1", gateway_keys_file="env:LAB_NONE"))
