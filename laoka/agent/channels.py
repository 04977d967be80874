"""Sending one message through apprise, quietly: what apprise would log can hold a channel's secrets."""

from __future__ import annotations

import logging

import apprise

logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)

CONNECT_S, READ_S = 5.0, 10.0
_TYPES = {"opened": apprise.NotifyType.FAILURE, "worse": apprise.NotifyType.FAILURE, "recovered": apprise.NotifyType.SUCCESS}


def is_address(url: str) -> bool:
    """Whether apprise understands the address."""
    return bool(apprise.Apprise.instantiate(url, suppress_exceptions=True))


def send(url: str, title: str, body: str, kind: str) -> bool:
    """Send one message to one address; False for an address that apprise does not understand and for one that fails."""
    service = apprise.Apprise.instantiate(url, suppress_exceptions=True)
    if not service:
        return False
    # apprise's own keys for its time-outs; what the address itself says (?cto=, ?rto=) goes before ours.
    if "cto=" not in url:
        service.socket_connect_timeout = CONNECT_S
    if "rto=" not in url:
        service.socket_read_timeout = READ_S
    try:
        kind_of = _TYPES.get(kind, apprise.NotifyType.INFO)
        return bool(service.notify(title=title, body=body, notify_type=kind_of, body_format=apprise.NotifyFormat.TEXT))
    except Exception:  # noqa: BLE001 - whatever a plugin raises, the channel failed; its text could hold secrets
        return False
