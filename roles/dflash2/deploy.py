"""Speculative decoding: has the host prove what DFlash2 needs, brings the drafter, and keeps decision and reason on the host."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal

from pyinfra.api.deploy import deploy
from pyinfra.api.host import Host
from pyinfra.context import host

from laoka.operations.speculative import decide_speculation
from laoka.serving.model_store import STORE, folder_of
from laoka.serving.speculative import Plan
from roles.agent.deploy import PYTHON
from roles.base.deploy import BaseSettings
from roles.dflash2.plan import hubs_of, plan_of
from roles.engine.commands import with_env
from roles.engine.deploy import EngineSettings, choice_here
from roles.model.deploy import ModelSettings, sources_of, target_folder
from roles.model.peers import is_from_peer, written
from roles.settings import InventoryError, RoleSettings, data_of

DEADLINE_S = 24 * 3600


class SpeculativeSettings(RoleSettings):
    """Settings of speculative decoding."""

    speculative: Literal["auto", "dflash2", "mtp", "none", "measure"] = "auto"
    """auto: DFlash2 where the host proves it and it fits, else MTP, else none. measure: what speculative_measured found fastest
    on this host; as auto, and noted as wanted, until there is such a file."""
    speculative_measured: str | None = None
    """File on your machine that `laoka bench run URL --host HOST --baseline -o FILE.json` wrote for this host."""
    drafter_source: str | tuple[str, ...] | None = None
    """Where the drafter comes from, as model_source; None: the hubs and hosts among model_source, or else hf."""
    drafter_pins: dict[str, str] = {}
    """SHA-256 by path that the drafter's files must have, besides those of the catalogue and the lock."""


def drafter_sources(on: Host) -> tuple[str, ...]:
    """The sources of a host's drafter, as the inventory has them."""
    told = SpeculativeSettings.of(on).drafter_source
    if told is not None:
        return (told,) if isinstance(told, str) else tuple(told)
    return hubs_of(sources_of(ModelSettings.of(on)))


def plan_here() -> Plan:
    """The plan of this host. Errors: InventoryError."""
    settings, choice = SpeculativeSettings.of(host), choice_here(EngineSettings.of(host))
    stack = choice.stack
    sources: list[str] = []
    if stack and stack.get("drafter_repo"):
        place = f"{folder_of(STORE, stack['drafter_repo']).name}/{stack.get('drafter_revision')}"
        sources = written(host, drafter_sources(host), place)
    return plan_of(
        settings.speculative, choice.pin, stack, data_of(host), target=target_folder(host), sources=sources,
        pins=settings.drafter_pins, measured=measurement_of(settings),
    )  # fmt: skip


def measurement_of(settings: SpeculativeSettings) -> str | None:
    """The content of the file with what was measured; None where none is named. Errors: InventoryError."""
    if settings.speculative_measured is None:
        return None
    path = Path(settings.speculative_measured).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not text"
        raise InventoryError(
            f"host {host.name}: speculative_measured {path}: {why}: `laoka bench run --baseline -o FILE.json` writes it"
        ) from None


@deploy("DFlash2")
def dflash2() -> None:
    """Decide on the host, unless that was done for this very plan: the kernels, the target's lm_head, the drafter, the memory."""
    plan = plan_here()
    command = " ".join(shlex.quote(word) for word in (PYTHON, "-m", "laoka.serving.speculative_host", "--plan", plan.to_json()))
    command = with_env(BaseSettings.of(host).proxy_env(), command)
    second = plan.drafter is not None and is_from_peer(host, drafter_sources(host))
    if not second:
        decide_speculation(name="Speculative decoding: prove, decide, say why", key=plan.key, command=command, _timeout=DEADLINE_S)
    # Who gets the drafter from another host goes after that one.
    if second:
        decide_speculation(
            name="Speculative decoding, with another host's drafter: prove, decide, say why", key=plan.key, command=command,
            _timeout=DEADLINE_S,
        )  # fmt: skip
