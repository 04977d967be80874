"""Every channel that docs/alerts.md names, from the inventory to the HTTP request (or mail) that goes out with title and body.

The services themselves are on the internet; here their requests are turned to an endpoint of the test, whatever host they name.
"""

from __future__ import annotations

import json
import re
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus, urlsplit

import pytest
import requests
from pydantic import ValidationError

from laoka.agent import channels
from laoka.agent.outbox import parse_addresses
from roles.watchdog import channels as built
from roles.watchdog.channels import AlertChannel
from tests.agent_host import HttpService

ROOT = Path(__file__).resolve().parents[3]
TITLE, BODY = "box-7: 掉卡: Tesla V100", "Next: nvidia-smi\n\n下一步"

# Channels as an inventory says them, with made-up keys in the services' own forms; the address that comes of it; where the request
# has to go; what the service answers when it took a message.
UUID = "0123abcd-0123-0123-0123-0123456789ab"
HEX = "0123456789abcdef0123456789abcdef"
Case = tuple[dict[str, str], str, str, dict[str, Any] | str]
CASES: dict[str, Case] = {
    "wecom": ({"key": UUID}, f"wecombot://{UUID}", f"qyapi.weixin.qq.com/cgi-bin/webhook/send?key={UUID}", {"errcode": 0}),
    "dingtalk": ({"token": HEX, "secret": "SEC1"}, f"dingtalk://SEC1@{HEX}/", "oapi.dingtalk.com/robot/send", {"errcode": 0}),
    "feishu": ({"token": UUID}, f"feishu://{UUID}", f"open.feishu.cn/open-apis/bot/v2/hook/{UUID}", {"code": 0}),
    "lark": ({"token": UUID}, f"lark://{UUID}", f"open.larksuite.com/open-apis/bot/v2/hook/{UUID}", {"code": 0}),
    "bark": ({"key": "DEVICEKEY0123"}, "barks://api.day.app/DEVICEKEY0123", "api.day.app/push", {"code": 200}),
    "serverchan": ({"key": "SCT0123456789"}, "schan://SCT0123456789", "sctapi.ftqq.com/SCT0123456789.send", {"code": 0}),
    "pushplus": ({"token": HEX}, f"pushplus://{HEX}", "www.pushplus.plus/send", {"code": 200}),
    "telegram": (
        {"bot_token": "123456789:abcdefg_hijklmnop", "chat_id": "-10012345"},
        "tgram://123456789:abcdefg_hijklmnop/-10012345",
        "api.telegram.org/bot123456789:abcdefg_hijklmnop/",
        {"ok": True},
    ),
    "ntfy": ({"server": "https://ntfy.example.net", "topic": "gpus"}, "ntfys://ntfy.example.net/gpus", "ntfy.example.net", {}),
    "slack": (
        {"token": "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ"},
        "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ",
        "hooks.slack.com/services/T1JJ3T3L2/",
        "ok",
    ),
    "discord": (
        {"webhook_id": "012345678901234567", "webhook_token": "abcdefghijklmnop"},
        "discord://012345678901234567/abcdefghijklmnop",
        "discord.com/api/webhooks/012345678901234567/",
        {},
    ),
    "webhook": ({"url": "https://hooks.example.net/laoka"}, "jsons://hooks.example.net/laoka", "hooks.example.net/laoka", {}),
}


def address(name: str) -> str:
    """The address that comes of the inventory's entry."""
    return built.url(AlertChannel(service=name, **CASES[name][0]))  # type: ignore[arg-type]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpService]:
    """A service that takes every request of this process, whatever host it was for."""
    found = HttpService()
    real = requests.Session.send

    def turned(self: requests.Session, request: requests.PreparedRequest, **named: Any) -> requests.Response:
        found.wanted.append(str(request.url))
        parts = urlsplit(str(request.url))
        request.url = parts._replace(scheme="http", netloc=f"127.0.0.1:{found.port}").geturl()
        return real(self, request, **named)

    monkeypatch.setattr(requests.Session, "send", turned)
    yield found
    found.close()


@pytest.mark.parametrize("name", CASES)
def test_a_channel_posts_title_and_body_to_its_service(service: HttpService, name: str) -> None:
    _, wanted_url, wanted, answer = CASES[name]
    service.answer = answer
    url = address(name)
    assert url == wanted_url
    assert channels.is_address(url)
    assert channels.send(url, TITLE, BODY, "opened")
    assert service.wanted[-1].startswith(f"https://{wanted}")
    shown = decoded(service.got[-1].decode())
    assert "掉卡" in shown and "nvidia-smi" in shown, shown


def decoded(text: str) -> str:
    """A request's body as people read it: JSON or a form."""
    return json.dumps(json.loads(text), ensure_ascii=False) if text.startswith("{") else unquote_plus(text)


@pytest.mark.parametrize("name", CASES)
def test_a_service_that_fails_is_not_delivered(service: HttpService, name: str) -> None:
    service.status = 500
    assert not channels.send(address(name), TITLE, BODY, "opened")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("wecom", {"errcode": 93000, "errmsg": "invalid webhook url"}),
        ("dingtalk", {"errcode": 310000, "errmsg": "sign not match"}),
        ("serverchan", {"code": 40001, "message": "bad sendkey"}),
        ("feishu", {"code": 19001, "msg": "param invalid"}),
        ("lark", {"code": 19001, "msg": "param invalid"}),
        ("pushplus", {"code": 903, "msg": "无效的用户token"}),
    ],
)
def test_a_refusal_with_status_200_is_not_delivered(service: HttpService, name: str, answer: dict[str, Any]) -> None:
    service.answer = answer
    assert not channels.send(address(name), TITLE, BODY, "opened")


def test_wecom_gets_what_fits_into_its_2048_bytes(service: HttpService) -> None:
    service.answer = {"errcode": 0}
    assert channels.send(address("wecom"), TITLE, "掉卡" * 2000, "opened")
    content = json.loads(service.got[-1])["text"]["content"]
    assert 1900 < len(content.encode()) <= 2048


class Mail(socketserver.StreamRequestHandler):
    """Just enough of SMTP to take one message."""

    def handle(self) -> None:
        self.wfile.write(b"220 test\r\n")
        for line in self.rfile:
            word = line[:4].upper().strip()
            if word == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                text = b""
                while not text.endswith(b"\r\n.\r\n"):
                    text += self.rfile.readline()
                self.server.got.append(text)  # type: ignore[attr-defined]
            self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")
            if word == b"QUIT":
                return


def test_mail_arrives() -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Mail) as server:
        server.got = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        url = f"mailto://127.0.0.1:{server.server_address[1]}?from=dog@example.net&to=you@example.net"
        assert channels.send(url, "box-7: card gone", "Next: nvidia-smi", "opened")
        server.shutdown()
        (message,) = server.got  # type: ignore[attr-defined]
    assert b"you@example.net" in message and b"box-7: card gone" in message


def test_an_address_of_mail_is_built_from_the_inventory() -> None:
    fields = {"server": "smtp.example.net:465", "user": "dog@example.net", "password": "p@ss/word", "to": "you@example.net"}
    url = built.url(AlertChannel(service="email", **fields))  # type: ignore[arg-type]
    assert url == "mailtos://dog%40example.net:p%40ss%2Fword@smtp.example.net:465?to=you%40example.net&from=dog%40example.net"
    assert channels.is_address(url)


def test_the_file_of_a_host_with_secrets_from_files_and_routes(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("KEY-0123456789\n")
    entries = (
        AlertChannel(service="wecom", severities=("critical",), key=f"@{tmp_path}/key"),  # type: ignore[call-arg]
        AlertChannel(service="ntfy", topic="gpus", token="tk_1", server="http://10.0.0.2:81"),  # type: ignore[call-arg]
    )
    text = built.lines(entries, "https://hc.example.net/ping/1?a=b")
    assert text == (
        "critical = wecombot://KEY-0123456789\nntfy://tk_1@10.0.0.2:81/gpus?auth=token\n"
        "heartbeat = https://hc.example.net/ping/1?a=b\n"
    )
    found = parse_addresses(text)
    assert found.heartbeat == "https://hc.example.net/ping/1?a=b"
    assert [found.takes(url, "warning") for url in found.urls] == [False, True]
    assert all(channels.is_address(url) for url in found.urls)
    with pytest.raises(ValueError, match="none: No such file"):
        built.lines((AlertChannel(service="wecom", key=f"@{tmp_path}/none"),), None)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"service": "wecom"}, "wecom needs key"),
        ({"service": "wecom", "key": "x", "tokn": "y"}, "wecom has no tokn; there are: key, severities"),
        ({"service": "telegramm"}, "Input should be 'wecom'"),
    ],
)
def test_a_wrong_entry_says_what_is_wrong(entry: dict[str, str], words: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(words)):
        AlertChannel.model_validate(entry)


def test_the_page_about_alerts_names_the_same_services() -> None:
    text = (ROOT / "docs/alerts.md").read_text(encoding="utf-8")
    table = text[text.index("| `service` |") : text.index("apprise's own documentation")]
    schemes = set(re.findall(r"`([a-z]+)://", table))
    assert schemes == {url.partition("://")[0] for _, url, _, _ in CASES.values()} | {"mailtos"}
    assert schemes <= set(channels.SERVICES)


def test_only_the_services_in_use_are_loaded() -> None:
    code = (
        "import sys\nfrom laoka.agent import channels\n"
        "channels.load(['jsons://h/x', 'wecombot://botkey-0123456789'])\n"
        "print(sorted(name for name in sys.modules if name.startswith('apprise.plugins.')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "custom_json" in done.stdout and "wecombot" in done.stdout and "telegram" not in done.stdout


def test_what_is_no_address_is_none_and_nothing_of_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    for url in ("no-such-scheme://s3cr3t", "wecombot://", "tgram://s3cr3t", "s3cr3t"):
        assert not channels.is_address(url)
        assert not channels.send(url, TITLE, BODY, "opened")
    assert "s3cr3t" not in caplog.text


def test_a_heartbeat_counts_only_by_its_status(service: HttpService) -> None:
    assert channels.beat("https://hc.example.net/ping/x")
    service.status = 500
    assert not channels.beat("https://hc.example.net/ping/x")
    assert not channels.beat("not a url")
