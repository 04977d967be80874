"""Every channel that docs/alerts.md names: its address is understood, and a real HTTP request (or mail) with title and body goes out.

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

from laoka.agent import channels
from tests.agent_host import HttpService

ROOT = Path(__file__).resolve().parents[3]
TITLE, BODY = "box-7: 掉卡: Tesla V100", "Next: nvidia-smi\n\n下一步"

# Made-up keys in the services' own forms; where the request has to go; what the service answers when it took a message.
CASES: dict[str, tuple[str, str, dict[str, Any] | str]] = {
    "wecombot": ("wecombot://botkey-0123456789", "https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=botkey-0123456789", {"errcode": 0}),
    "dingtalk": ("dingtalk://SEC0123456789@abcdef0123456789/", "https://oapi.dingtalk.com/robot/send", {"errcode": 0}),
    "feishu": ("feishu://0123abcd-0123-0123-0123-0123456789ab", "https://open.feishu.cn/open-apis/bot/v2/hook/0123abcd", {"code": 0}),
    "lark": ("lark://0123abcd-0123-0123-0123-0123456789ab", "https://open.larksuite.com/open-apis/bot/v2/hook/0123abcd", {"code": 0}),
    "bark": ("barks://api.day.app/DEVICEKEY0123", "https://api.day.app/push", {"code": 200}),
    "schan": ("schan://SCT0123456789abcdef", "https://sctapi.ftqq.com/SCT0123456789abcdef.send", {"code": 0}),
    "pushplus": ("pushplus://0123456789abcdef0123456789abcdef", "https://www.pushplus.plus/send", {"code": 200}),
    "tgram": ("tgram://123456789:abcdefg_hijklmnop/12315544", "https://api.telegram.org/bot123456789:abcdefg_hijklmnop/", {"ok": True}),
    "ntfy": ("ntfys://ntfy.example.net/gpu-hosts", "https://ntfy.example.net", {}),
    "slack": ("slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ", "https://hooks.slack.com/services/T1JJ3T3L2/", "ok"),
    "discord": ("discord://012345678901234567/abcdefghijklmnop", "https://discord.com/api/webhooks/012345678901234567/", {}),
    "webhook": ("jsons://hooks.example.net/laoka", "https://hooks.example.net/laoka", {}),
}  # fmt: skip


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
    url, wanted, answer = CASES[name]
    service.answer = answer
    assert channels.is_address(url)
    assert channels.send(url, TITLE, BODY, "opened")
    assert service.wanted[-1].startswith(wanted)
    shown = decoded(service.got[-1].decode())
    assert "掉卡" in shown and "nvidia-smi" in shown, shown


def decoded(text: str) -> str:
    """A request's body as people read it: JSON or a form."""
    return json.dumps(json.loads(text), ensure_ascii=False) if text.startswith("{") else unquote_plus(text)


@pytest.mark.parametrize("name", CASES)
def test_a_service_that_fails_is_not_delivered(service: HttpService, name: str) -> None:
    service.status = 500
    assert not channels.send(CASES[name][0], TITLE, BODY, "opened")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("wecombot", {"errcode": 93000, "errmsg": "invalid webhook url"}),
        ("dingtalk", {"errcode": 310000, "errmsg": "sign not match"}),
        ("schan", {"code": 40001, "message": "bad sendkey"}),
        ("feishu", {"code": 19001, "msg": "param invalid"}),
        ("lark", {"code": 19001, "msg": "param invalid"}),
        ("pushplus", {"code": 903, "msg": "无效的用户token"}),
    ],
)
def test_a_refusal_with_status_200_is_not_delivered(service: HttpService, name: str, answer: dict[str, Any]) -> None:
    service.answer = answer
    assert not channels.send(CASES[name][0], TITLE, BODY, "opened")


def test_wecom_gets_what_fits_into_its_2048_bytes(service: HttpService) -> None:
    service.answer = {"errcode": 0}
    assert channels.send(CASES["wecombot"][0], TITLE, "掉卡" * 2000, "opened")
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


def test_the_page_about_alerts_names_the_same_services() -> None:
    text = (ROOT / "docs/alerts.md").read_text(encoding="utf-8")
    table = text[text.index("| service |") : text.index("apprise's own documentation")]
    schemes = set(re.findall(r"`([a-z]+)://", table))
    assert schemes == {url.partition("://")[0] for url, _, _ in CASES.values()} | {"mailtos"}
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
