"""Alert channels as an inventory says them, turned into apprise addresses. Pure, but for secrets that stand in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import quote, urlsplit

from pydantic import BaseModel, ConfigDict, model_validator

from roles.secrets import secret

Service = Literal[
    "wecom", "dingtalk", "feishu", "lark", "bark", "serverchan", "pushplus", "telegram", "ntfy", "email", "slack", "discord",
    "webhook",
]  # fmt: skip
Severity = Literal["notice", "warning", "critical"]

# The fields of each service: those that it needs, then those with a default.
FIELDS: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    "wecom": (("key",), {}),
    "dingtalk": (("token",), {"secret": ""}),
    "feishu": (("token",), {}),
    "lark": (("token",), {}),
    "bark": (("key",), {"server": "https://api.day.app"}),
    "serverchan": (("key",), {}),
    "pushplus": (("token",), {}),
    "telegram": (("bot_token", "chat_id"), {}),
    "ntfy": (("topic",), {"server": "https://ntfy.sh", "token": ""}),
    "email": (("server", "user", "password", "to"), {"from": ""}),
    "slack": (("token",), {}),
    "discord": (("webhook_id", "webhook_token"), {}),
    "webhook": (("url",), {}),
}


class AlertChannel(BaseModel):
    """One channel: `service`, the fields of that service, and `severities` where it does not take all.

    A value may be @FILE, env:NAME or sops:FILE#KEY (roles.secrets), so that no secret stands in the inventory.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    service: Service
    severities: tuple[Severity, ...] = ()

    @model_validator(mode="after")
    def _has_its_fields(self) -> AlertChannel:
        needed, optional = FIELDS[self.service]
        given = set(self.model_extra or {})
        if missing := [name for name in needed if name not in given]:
            raise ValueError(f"{self.service} needs {', '.join(missing)}")
        if unknown := sorted(given - set(needed) - set(optional)):
            raise ValueError(
                f"{self.service} has no {', '.join(unknown)}; there are: {', '.join((*needed, *optional, 'severities'))}"
            )
        return self

    @property
    def values(self) -> dict[str, str]:
        """Its fields, defaults filled in, files read. Errors: ValueError with what to do."""
        given: dict[str, Any] = dict(self.model_extra or {})
        return {name: secret(str(value)) for name, value in {**FIELDS[self.service][1], **given}.items()}


def url(channel: AlertChannel) -> str:
    """The apprise address of a channel. Errors: ValueError."""
    values = channel.values
    part = {name: quote(value, safe="") for name, value in values.items()}
    if channel.service in ("bark", "ntfy", "webhook"):
        return _at_a_server(channel.service, values, part)
    if channel.service == "email":
        login = f"{part['user']}:{part['password']}@" if values["user"] else ""
        sender = part["from"] or part["user"]
        return f"mailtos://{login}{values['server']}?to={part['to']}&from={sender}"
    secret = f"{part['secret']}@" if part.get("secret") else ""
    slack = values.get("token", "").removeprefix("https://hooks.slack.com/services/")
    return {
        "wecom": lambda: f"wecombot://{part['key']}",
        "dingtalk": lambda: f"dingtalk://{secret}{part['token']}/",
        "feishu": lambda: f"feishu://{part['token']}",
        "lark": lambda: f"lark://{part['token']}",
        "serverchan": lambda: f"schan://{part['key']}",
        "pushplus": lambda: f"pushplus://{part['token']}",
        "telegram": lambda: f"tgram://{values['bot_token']}/{part['chat_id']}",
        "slack": lambda: f"slack://{slack}",
        "discord": lambda: f"discord://{part['webhook_id']}/{part['webhook_token']}",
    }[channel.service]()


def _at_a_server(service: str, values: Mapping[str, str], part: Mapping[str, str]) -> str:
    given = values["url"] if service == "webhook" else values["server"]
    server = urlsplit(given)
    if server.scheme not in ("http", "https") or not server.netloc:
        raise ValueError(f"{service}: {'url' if service == 'webhook' else 'server'} is not like https://host")
    tls = "s" if server.scheme == "https" else ""
    if service == "webhook":
        return f"json{tls}://{server.netloc}{server.path}" + (f"?{server.query}" if server.query else "")
    if service == "bark":
        return f"bark{tls}://{server.netloc}/{part['key']}"
    token = f"{part['token']}@" if part["token"] else ""
    return f"ntfy{tls}://{token}{server.netloc}/{part['topic']}" + ("?auth=token" if token else "")


def lines(channels: Sequence[AlertChannel], heartbeat_url: str | None) -> str:
    """The lines of the hosts' file of addresses. Errors: ValueError."""
    found = [f"{','.join(channel.severities)} = {url(channel)}" if channel.severities else url(channel) for channel in channels]
    found += [f"heartbeat = {secret(heartbeat_url)}"] if heartbeat_url else []
    return "".join(f"{line}\n" for line in found)
