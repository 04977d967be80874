"""qwen-serve: the unit that serves the model on loopback, and is up only when a real completion came back."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints, field_validator
from pyinfra.api.deploy import deploy
from pyinfra.api.host import Host
from pyinfra.context import host
from pyinfra.operations import files, server

from laoka.facts.system import SystemdVersion
from laoka.operations.rollout import roll_unit, start_unit, stop_main
from laoka.operations.speculative import flags_file
from laoka.operations.steps import completion_test, retire_units, run_unit
from laoka.serving import starts
from laoka.serving.record import path_of
from laoka.serving.rollout import KEPT
from roles.agent.deploy import PYTHON
from roles.base.deploy import BaseSettings
from roles.dflash2.deploy import plan_here
from roles.dflash2.plan import FLAG
from roles.engine.commands import ENGINES
from roles.model.deploy import CURRENT
from roles.plan import locked_stack
from roles.secrets import secret_file
from roles.serve.unit import (
    DEFAULT_ENV,
    INSTANCE_NAME,
    NOT_INSTANCES,
    NVIDIA_GROUPS,
    checked_env,
    checked_flags,
    flags_of,
    longest_silence_s,
    restart_keys,
    start_limit_keys,
    systemd_version,
    visible_devices,
)
from roles.settings import InventoryError, RoleSettings

TEMPLATES = Path(__file__).resolve().parents[2] / "templates" / "serve"
USER = "qwen"
UNIT = "qwen-serve.service"
CONFIG = "/etc/qwen-serve"
STAGED = "/var/lib/laoka/staged"
LEAST_FROZEN_S = 180
"""Above VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, so that an engine which notices its stuck worker by itself says so in its own words."""


class EngineSettings(RoleSettings):
    """What is checked alike for a host's only engine and for each of several."""

    @field_validator("serve_flags", "flags", check_fields=False)
    @classmethod
    def _are_flags(cls, flags: dict[str, str | int | float | bool]) -> dict[str, str | int | float | bool]:
        checked_flags(flags)
        return flags

    @field_validator("serve_env", "env", check_fields=False)
    @classmethod
    def _is_an_environment(cls, env: dict[str, str]) -> dict[str, str]:
        checked_env(env)
        return env


class ServeInstance(EngineSettings):
    """One of several servers of a host, each with cards of its own: unit qwen-serve@NAME."""

    port: int = Field(gt=0, lt=65536)
    """Port of this engine on 127.0.0.1."""
    gpus: tuple[str, ...] = ()
    """PCI addresses of its cards, out of expected_gpus; empty: all of them."""
    flags: dict[str, str | int | float | bool] = {}
    """Flags that differ from serve_flags."""
    env: dict[str, str] = {}
    """Environment that differs from serve_env."""


InstanceName = Annotated[str, StringConstraints(pattern=INSTANCE_NAME)]


class ServeSettings(EngineSettings):
    """Settings of the model server."""

    served_model_name: str = Field("qwen", pattern=r"^[\w./:-]+$")
    """The name that clients ask for."""
    serve_port: int = Field(8000, gt=0, lt=65536)
    """Port of the engine on 127.0.0.1; people use the gateway's."""
    serve_flags: dict[str, str | int | float | bool] = {}
    """Flags of `vllm serve`, without the dashes: {"max-model-len": 32768}; they go over those of the lock file."""
    serve_env: dict[str, str] = {}
    """Environment of the engine; it goes over that of the lock file."""
    serve_instances: dict[InstanceName, ServeInstance] = {}
    """Several servers on one host, by name: {"a": {"port": 8001, "gpus": ["0000:03:00.0"]}, ...}; empty: one, qwen-serve."""
    serve_api_key_file: str | None = None
    """File on your machine (or env:NAME, sops:FILE#KEY) with a key that the engine asks for on loopback; None: none."""
    serve_start_deadline_s: int | None = Field(None, gt=0)
    """How long a start may take until the first completion; None: three times the longest measured on the host, at least 1200."""
    serve_shutdown_s: int = Field(30, ge=0)
    """How long requests in flight have to finish when the unit is stopped."""
    serve_drain_s: int = Field(120, ge=0)
    """How long a deploy waits for requests in hand before it restarts the engine; no new ones come in that time."""
    serve_frozen_after_s: int | None = Field(None, ge=0)
    """Seconds without a sign of life until the engine is restarted; 0: never; None: 180, or more for long steps of prefill."""
    serve_max_tokens: int | None = Field(None, gt=0)
    """The most tokens that one answer may have; a request for more is refused. None: what the context has room for."""
    serve_memory_max: str = Field("90%", pattern=r"^(\d+%|\d+[KMGT]?|infinity)$")
    """How much of the host's memory the engine may take; above it the engine is ended and started again, the host lives on."""
    serve_judge_text: bool = True
    """Whether an answer that looks like garbage counts as ill; off only for a model of random weights."""

    @field_validator("serve_instances")
    @classmethod
    def _ports_differ(cls, instances: dict[str, ServeInstance]) -> dict[str, ServeInstance]:
        ports = [item.port for item in instances.values()]
        if len(set(ports)) != len(ports):
            raise ValueError("two instances have the same port")
        taken = [name for name in instances if name in NOT_INSTANCES]
        if taken:
            raise ValueError(f"{taken[0]} can't be an instance's name: a file of laoka's own has it")
        return instances


@dataclass(frozen=True)
class Served:
    """One server of a host, as the roles need it: its unit, its files, where it answers and what it is started with."""

    unit: str
    instance: str
    config: str
    folder: str
    port: int
    flags: Mapping[str, Any]
    env: Mapping[str, str]
    frozen_after_s: int
    key: str
    """Where the engine's own API key lies on the host; empty: it asks for none."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def unit_path(self) -> str:
        return f"/etc/systemd/system/{self.unit}"


def served(on: Host) -> tuple[Served, ...]:
    """The servers that a host has by its inventory and lock. Errors: InventoryError."""
    settings = ServeSettings.of(on)
    locked = locked_stack(on)
    flags = flags_of(
        # Whether there is speculation is the host's own decision (roles/dflash2), which `flags_file` adds.
        {key: value for key, value in locked.get("serve_flags", {}).items() if key != FLAG},
        settings.serve_flags,
        shutdown_s=settings.serve_shutdown_s,
        max_tokens=settings.serve_max_tokens,
    )
    env = {**DEFAULT_ENV, **locked.get("serve_env", {}), **settings.serve_env}
    if not settings.serve_instances:
        return (_served(settings, "", settings.serve_port, flags, env),)
    gpus = BaseSettings.of(on).expected_gpus
    found = []
    for name, item in sorted(settings.serve_instances.items()):
        try:
            visible = visible_devices([gpu.bdf for gpu in gpus], {gpu.bdf: gpu.uuid for gpu in gpus}, item.gpus)
        except ValueError as error:
            raise InventoryError(f"host {on.name}: serve_instances.{name}.gpus: {error}") from None
        cards = {"CUDA_VISIBLE_DEVICES": visible} if item.gpus else {}
        found.append(_served(settings, name, item.port, {**flags, **item.flags}, {**env, **cards, **item.env}))
    return tuple(found)


def _served(settings: ServeSettings, name: str, port: int, flags: Mapping[str, Any], env: Mapping[str, str]) -> Served:
    frozen = settings.serve_frozen_after_s
    return Served(
        unit=f"qwen-serve@{name}.service" if name else UNIT,
        instance=name,
        config=f"{CONFIG}/{name}" if name else CONFIG,
        folder=f"qwen-serve/{name}" if name else "qwen-serve",
        port=port,
        flags=flags,
        env=env,
        frozen_after_s=max(LEAST_FROZEN_S, longest_silence_s(flags)) if frozen is None else frozen,
        key=f"{CONFIG}/api-key" if settings.serve_api_key_file else "",
    )


@deploy("Serve")
def serve() -> None:
    """Render the unit, run it with what is on disk now, and have it answer."""
    settings = ServeSettings.of(host)
    version = systemd_version(host.get_fact(SystemdVersion))
    servers = served(host)
    server.user(  # noqa: S604 - `shell` is the user's login shell
        name="User for the engine",
        user=USER,
        system=True,
        home="/var/lib/qwen-serve",
        shell="/usr/sbin/nologin",
        create_home=False,
    )
    files.template(
        name="Who tells that it is down for good", src=str(TEMPLATES / "qwen-serve-failed@.service.j2"),
        dest="/etc/systemd/system/qwen-serve-failed@.service", mode="644", python=PYTHON,
    )  # fmt: skip
    retire_units(
        name="Servers that the inventory no longer has are gone",
        pattern="qwen-serve@*.service",
        keep=[one.unit for one in servers],
    )
    if settings.serve_instances:
        # The engine that was the host's only one has the cards and the memory that its successors need.
        stop_main(name="The single server makes room for the instances", unit=UNIT)
    for one in servers:
        _files(settings, one, version)
        name, config = one.unit.removesuffix(".service"), [*_own_files(one), f"{ENGINES}/current", CURRENT]
        staged = [[_staged(one, path), path] for path in _own_files(one)]
        test = completion_test(PYTHON, one.url, settings.served_model_name, judge_text=settings.serve_judge_text, key=one.key)
        deadline_s = (settings.serve_start_deadline_s or starts.MOST_S) + 120
        words = [
            PYTHON, "-m", "laoka.serving.rollout", "--unit", one.unit, "--config", *config, "--url", one.url,
            "--model", settings.served_model_name, "--drain-deadline-s", str(settings.serve_drain_s),
            "--restart-deadline-s", str(deadline_s), *(["--api-key-file", one.key] if one.key else []),
            *(word for pair in staged for word in ("--stage", *pair)), *([] if settings.serve_judge_text else ["--no-judge-text"]),
        ]  # fmt: skip
        command = " ".join(shlex.quote(word) for word in words)
        most_s = settings.serve_drain_s + 3 * deadline_s
        start_unit(name=f"{name} is started, and a completion comes back", unit=one.unit, config=config, command=command,
                   _timeout=most_s)  # fmt: skip
        roll_unit(name=f"{name} is changed, one host at a time: drain, restart, completion, undrain", unit=one.unit, config=config,
                  staged=staged, test=test, command=command, _serial=True, _timeout=most_s)  # fmt: skip
    if settings.serve_instances:
        files.template(
            name="qwen-serve stands for all of them", src=str(TEMPLATES / "qwen-serve-all.service.j2"),
            dest=f"/etc/systemd/system/{UNIT}", mode="644", units=[one.unit for one in servers],
        )  # fmt: skip
        run_unit(
            name="qwen-serve is up when all of them are",
            unit=UNIT,
            config=[f"/etc/systemd/system/{UNIT}"],
            restart=False,
            _timeout=120,
        )


def left_overs(servers: Sequence[Served]) -> tuple[list[str], list[str]]:
    """What a host may have of settings that its inventory had once: patterns of the shell, and which of their paths stay."""
    units = [one.unit for one in servers]
    of_all = [f"{CONFIG}/api-key", f"{CONFIG}/vllm.yaml", f"{CONFIG}/env", f"{CONFIG}/*/", "/run/qwen-serve/state.json"]
    keep = [path for one in servers for path in (one.config, *_own_files(one), *(_staged(one, path) for path in _own_files(one)))]
    keep += [str(path_of(unit)) for unit in units] + [f"{place}/{unit}" for place in (STAGED, KEPT) for unit in units]
    return [*of_all, f"{CONFIG}/*/api-key", f"{STAGED}/qwen-serve*", f"{STAGED}/qwen-serve*/api-key", f"{KEPT}/qwen-serve*"], keep


def _own_files(one: Served) -> list[str]:
    """The files that a server is made of, where it reads them."""
    return [one.unit_path, f"{one.config}/vllm.yaml", f"{one.config}/env", *([one.key] if one.key else [])]


def _staged(one: Served, path: str) -> str:
    """Where the new version of a file waits for this host's turn."""
    return f"{STAGED}/{one.unit}/{path.rsplit('/', 1)[1]}"


def _files(settings: ServeSettings, one: Served, version: int) -> None:
    label = f" of {one.instance}" if one.instance else ""
    plan = plan_here()
    flags_file(
        name=f"Flags{label}", src=str(TEMPLATES / "vllm.yaml.j2"), dest=_staged(one, f"{one.config}/vllm.yaml"),
        flags=dict(one.flags), key=plan.key, expected=dict(plan.configs.get(plan.method, {})),
        values={"model": CURRENT, "served_model_name": settings.served_model_name, "port": one.port},
    )  # fmt: skip
    files.template(
        name=f"Environment{label}", src=str(TEMPLATES / "env.j2"), dest=_staged(one, f"{one.config}/env"), mode="644",
        env=dict(one.env),
    )  # fmt: skip
    if one.key:
        try:
            key = secret_file(settings.serve_api_key_file or "")
        except ValueError as error:
            raise InventoryError(f"host {host.name}: serve_api_key_file {error}, with the key in it, one line") from None
        files.put(name=f"The engine's own key{label}", src=StringIO(f"{key}\n"), dest=_staged(one, one.key), mode="600")
    gpus = BaseSettings.of(host).expected_gpus
    files.template(
        name=f"Unit{label}", src=str(TEMPLATES / "qwen-serve.service.j2"), dest=_staged(one, one.unit_path), mode="644",
        **unit_values(settings, one, version, gpus=bool(gpus)),
    )  # fmt: skip


def unit_values(settings: ServeSettings, one: Served, version: int, *, gpus: bool) -> dict[str, Any]:
    """What the unit's template is rendered with, for one version of systemd and a host with or without cards."""
    return {
        "unit": one.unit, "instance": one.instance, "config": one.config, "folder": one.folder, "port": one.port,
        "syslog": one.unit.removesuffix(".service"), "run_as": USER, "engine": f"{ENGINES}/current", "python": PYTHON,
        "served_model_name": settings.served_model_name, "start_deadline_s": settings.serve_start_deadline_s,
        "unmeasured_s": starts.UNMEASURED_S,
        "shutdown_s": settings.serve_shutdown_s, "frozen_after_s": one.frozen_after_s, "memory_max": settings.serve_memory_max,
        "judge_text": settings.serve_judge_text, "key": one.key, "gpus": gpus, "device_groups": NVIDIA_GROUPS if gpus else (),
        "start_limit": start_limit_keys(), "restart": restart_keys(version),
    }  # fmt: skip
