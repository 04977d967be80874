"""Speculative decoding: decides whether DFlash2 is used on this host, and keeps the reason where people look for it."""

from __future__ import annotations

import json
from io import StringIO
from typing import Literal

from pyinfra.api.deploy import deploy
from pyinfra.context import host
from pyinfra.operations import files

from laoka.serving.speculative import decide
from roles.base.deploy import BaseSettings
from roles.engine.deploy import EngineSettings
from roles.settings import RoleSettings

DECISION = "/etc/laoka/speculative.json"


class SpeculativeSettings(RoleSettings):
    """Settings of speculative decoding."""

    speculative: Literal["auto", "dflash2", "mtp", "none"] = "auto"
    """What is wished for; auto takes what engine, cards and memory allow, none nothing. So far every host serves without."""


@deploy("DFlash2")
def dflash2() -> None:
    """Decide, say why, and leave the decision on the host."""
    gpus = len(BaseSettings.of(host).expected_gpus)
    decision = decide(SpeculativeSettings.of(host).speculative, EngineSettings.of(host).engine_name or "", gpus)
    content = json.dumps({"method": decision.method, "reason": decision.reason}, indent=2) + "\n"
    files.put(name=f"DFlash2 {decision.reason}", src=StringIO(content), dest=DECISION, mode="644")
