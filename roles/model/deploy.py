"""The model's files: fetched by manifest, every SHA-256 checked, one atomic switch; the old revision stays."""

from __future__ import annotations

from shlex import quote

from pyinfra.api.deploy import deploy
from pyinfra.context import host

from laoka.operations.steps import switch_link, until_stamped
from roles.agent.deploy import PYTHON
from roles.base.deploy import BaseSettings
from roles.engine.commands import with_env
from roles.settings import InventoryError, RoleSettings

STORE = "/srv/laoka/models"
CURRENT = f"{STORE}/current"


class ModelSettings(RoleSettings):
    """Settings of the model."""

    model_id: str | None = None
    """Its name, such as QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4."""
    model_revision: str | None = None
    """SHA-256 of its manifest.json, which lists every file with size and SHA-256."""
    model_source: str | None = None
    """Folder on the host, or http(s) address, that has manifest.json and the files: a mirror, another host, a USB disk."""


def folder_of(model_id: str) -> str:
    """Where a model's revisions lie on the host."""
    return f"{STORE}/{model_id.replace('/', '--')}"


@deploy("Model")
def model() -> None:
    """Fetch the pinned revision unless it is there whole; then switch to it."""
    settings = ModelSettings.of(host)
    model_id, revision, source = settings.model_id, settings.model_revision, settings.model_source
    if not (model_id and revision and source):
        raise InventoryError(f"host {host.name}: model_id, model_revision and model_source are needed to place a model: set them")
    folder = folder_of(model_id)
    store = f"{PYTHON} -m laoka.serving.model_store"
    base = BaseSettings.of(host)
    proxy = {"https_proxy": base.http_proxy, "http_proxy": base.http_proxy, "no_proxy": base.no_proxy} if base.http_proxy else {}
    fetch = f"{store} fetch --source {quote(source)} --revision {quote(revision)} --into {quote(folder)}"
    until_stamped(
        name=f"{model_id} at {revision[:12]}, every file by its SHA-256",
        stamp=f"{folder}/.fetched",
        text=revision,
        commands=[f"mkdir -p {quote(folder)}", with_env({k: str(v) for k, v in proxy.items()}, fetch)],
        _timeout=6 * 3600,
    )
    switch_link(name="Switch to it", path=CURRENT, target=f"{folder}/{revision}")
