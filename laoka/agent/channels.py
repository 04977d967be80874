"""Sending one message through apprise, quietly: what apprise would log can hold a channel's secrets.

apprise loads all of its 200 services to make the first one, which costs half a second and 22 MB. The services that laoka names are
loaded singly; any other address works too, at that price.

Some services answer HTTP 200 to a wrong key and say no in the body only (WeCom, DingTalk, ServerChan); apprise takes that for a
yes. Their answers are read here.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import apprise
import requests

logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)

CONNECT_S, READ_S = 5.0, 10.0
_TYPES = {
    "opened": apprise.NotifyType.FAILURE,
    "worse": apprise.NotifyType.FAILURE,
    "step": apprise.NotifyType.WARNING,
    "recovered": apprise.NotifyType.SUCCESS,
}

SERVICES: Mapping[str, str] = {
    "bark": "bark.NotifyBark",
    "barks": "bark.NotifyBark",
    "dingtalk": "dingtalk.NotifyDingTalk",
    "discord": "discord.NotifyDiscord",
    "feishu": "feishu.NotifyFeishu",
    "json": "custom_json.NotifyJSON",
    "jsons": "custom_json.NotifyJSON",
    "lark": "lark.NotifyLark",
    "mailto": "email.NotifyEmail",
    "mailtos": "email.NotifyEmail",
    "ntfy": "ntfy.NotifyNtfy",
    "ntfys": "ntfy.NotifyNtfy",
    "pushplus": "pushplus.NotifyPushplus",
    "schan": "serverchan.NotifyServerChan",
    "slack": "slack.NotifySlack",
    "tgram": "telegram.NotifyTelegram",
    "wecombot": "wecombot.NotifyWeComBot",
}
"""apprise's class for each scheme that laoka names, in the package apprise.plugins."""


REFUSAL_KEYS: Mapping[str, str] = {"wecombot": "errcode", "dingtalk": "errcode", "schan": "code"}
"""Where a service says no though it answers HTTP 200: a key of its JSON answer that is 0 when it took the message."""
BODY_MAX_BYTES: Mapping[str, int] = {"wecombot": 2000}
"""WeCom refuses a text of more than 2048 bytes of UTF-8; apprise counts characters."""


class _RefusedError(requests.RequestException):
    """A service that answered HTTP 200 and said no."""


class _Requests:
    """What one of apprise's services has in place of the package requests: the same, but a refusal in a body is an error."""

    def __init__(self, key: str) -> None:
        self._key = key

    def __getattr__(self, name: str) -> Any:
        return getattr(requests, name)

    def post(self, *arguments: Any, **named: Any) -> requests.Response:
        answer = requests.post(*arguments, **named)  # noqa: S113 - the service gives its time-out
        try:
            said = answer.json()
        except ValueError:
            said = None
        if answer.ok and not (isinstance(said, dict) and said.get(self._key) == 0):
            raise _RefusedError("refused")
        return answer


def _service(url: str) -> Any:
    """apprise's service for an address; None for one that it does not understand."""
    scheme = url.partition("://")[0].lower()
    if scheme not in SERVICES:
        return apprise.Apprise.instantiate(url, suppress_exceptions=True)
    file, _, name = SERVICES[scheme].partition(".")
    module: Any = importlib.import_module(f"apprise.plugins.{file}")
    if scheme in REFUSAL_KEYS and not isinstance(module.requests, _Requests):
        module.requests = _Requests(REFUSAL_KEYS[scheme])
    service = getattr(module, name)
    try:
        parts = service.parse_url(url)
        return service(**parts) if parts else None
    except Exception:  # noqa: BLE001 - whatever a service raises about an address, it is none; the text could hold its secrets
        return None


def load(urls: Sequence[str]) -> None:
    """Load what sending to these addresses needs, so that the first alert does not wait for it."""
    for url in urls:
        _service(url)


def is_address(url: str) -> bool:
    """Whether apprise understands the address."""
    return _service(url) is not None


def send(url: str, title: str, body: str, kind: str) -> bool:
    """Send one message to one address; False for an address that apprise does not understand and for one that fails."""
    service = _service(url)
    if service is None:
        return False
    # apprise's own keys for its time-outs; what the address itself says (?cto=, ?rto=) goes before ours.
    if "cto=" not in url:
        service.socket_connect_timeout = CONNECT_S
    if "rto=" not in url:
        service.socket_read_timeout = READ_S
    service.overflow_mode = apprise.OverflowMode.TRUNCATE
    if limit := BODY_MAX_BYTES.get(url.partition("://")[0].lower()):
        body = body.encode()[: max(0, limit - len(title.encode()))].decode(errors="ignore")
    try:
        kind_of = _TYPES.get(kind, apprise.NotifyType.INFO)
        return bool(service.notify(title=title, body=body, notify_type=kind_of, body_format=apprise.NotifyFormat.TEXT))
    except Exception:  # noqa: BLE001 - whatever a plugin raises, the channel failed; its text could hold secrets
        return False


def beat(url: str) -> bool:
    """Ask a heartbeat address once; its answer counts only by its status. Nothing of the address is ever printed."""
    try:
        with requests.get(url, timeout=(CONNECT_S, READ_S), stream=True) as answer:
            return answer.ok
    except (requests.RequestException, ValueError):
        return False
