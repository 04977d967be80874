"""The front door: HAProxy lets only the API's paths through and asks the engine for a token to know that it lives."""

from __future__ import annotations

import json
from pathlib import Path

from pyinfra.api.deploy import deploy
from pyinfra.context import host
from pyinfra.operations import files

from laoka.operations.steps import apt_install, http_test, run_unit
from roles.serve.deploy import ServeSettings
from roles.settings import RoleSettings

TEMPLATE = Path(__file__).resolve().parents[2] / "templates" / "gateway" / "haproxy.cfg.j2"
CONFIG = "/etc/haproxy/haproxy.cfg"


class GatewaySettings(RoleSettings):
    """Settings of the gateway."""

    gateway_listen: str = "127.0.0.1:8080"
    """Address and port that clients use. It asks for no key yet: open it to a trusted network only."""
    gateway_max_requests: int = 8
    """Requests in the engine at once; more wait in line."""


@deploy("Gateway")
def gateway() -> None:
    """Install HAProxy, render its configuration, run it, and see the model's name through it."""
    settings = GatewaySettings.of(host)
    serving = ServeSettings.of(host)
    apt_install(name="HAProxy", packages=["haproxy"])
    body = json.dumps({"model": serving.served_model_name, "prompt": "1", "max_tokens": 1})
    files.template(
        name="Configuration", src=str(TEMPLATE), dest=CONFIG, mode="644", listen=settings.gateway_listen,
        port=serving.serve_port, max_requests=settings.gateway_max_requests, check_body=body,
    )  # fmt: skip
    port = settings.gateway_listen.rsplit(":", 1)[1]
    run_unit(
        name="haproxy runs, and the model answers through it",
        unit="haproxy.service",
        config=[CONFIG],
        test=http_test(f"http://127.0.0.1:{port}/v1/models", serving.served_model_name),
        test_deadline_s=60,
        _timeout=120,
    )
