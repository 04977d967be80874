"""The model's files: fetched by revision, every SHA-256 checked, one atomic switch with a way back; old revisions pruned."""

from __future__ import annotations

from pyinfra.api.deploy import deploy
from pyinfra.api.host import Host
from pyinfra.context import host

from laoka.catalog.gpus import by_device_id
from laoka.operations.versions import have_folder, switch_served
from laoka.serving.manifest import ModelError, is_pinned
from laoka.serving.model_names import known_as
from laoka.serving.model_store import CURRENT as CURRENT_NAME
from laoka.serving.model_store import PREVIOUS, STORE, folder_of
from laoka.serving.switch import UNIT
from roles.agent.deploy import PYTHON
from roles.base.deploy import BaseSettings
from roles.engine.commands import with_env
from roles.engine.deploy import EngineSettings, choice_here
from roles.model.commands import fetch_command
from roles.settings import InventoryError, RoleSettings

CURRENT = f"{STORE}/{CURRENT_NAME}"
DEADLINE_S = 24 * 3600


class ModelSettings(RoleSettings):
    """Settings of the model."""

    model_id: str | None = None
    """Its name, such as QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4."""
    model_revision: str | None = None
    """The hub's whole commit (40 digits), or the SHA-256 of its manifest.json (64), which `laoka model manifest` prints."""
    model_source: str | tuple[str, ...] | None = None
    """Where from, one or several in the order of trial: hf, hf-mirror, modelscope, https://FOLDER, ssh://HOST/FOLDER, /FOLDER."""
    model_pins: dict[str, str] = {}
    """SHA-256 by path (globs allowed) that files must have whatever a source says: {"model-*.safetensors": "..."}."""


def sources_of(settings: ModelSettings) -> tuple[str, ...]:
    """The sources of the inventory, in order."""
    told = settings.model_source
    return (told,) if isinstance(told, str) else tuple(told or ())


def sm_of(on: Host) -> int | None:
    """The lowest compute capability of a host's cards; None without cards, or with one that the catalogue does not have."""
    found = [by_device_id(gpu.device_id) for gpu in BaseSettings.of(on).expected_gpus]
    known = [gpu.sm for gpu in found if gpu is not None]
    return min(known) if known and len(known) == len(found) else None


@deploy("Model")
def model() -> None:
    """Fetch the pinned revision unless it is there whole; then switch to it."""
    settings = ModelSettings.of(host)
    model_id, revision, sources = settings.model_id, settings.model_revision, sources_of(settings)
    if not (model_id and revision and sources):
        raise InventoryError(f"host {host.name}: model_id, model_revision and model_source are needed to place a model: set them")
    if not is_pinned(revision):
        raise InventoryError(
            f"host {host.name}: model_revision {revision!r} pins nothing: write the whole commit (40 digits) or a manifest's "
            f"SHA-256 (64); `laoka model fetch {model_id} --revision {revision} --dry` tells the commit"
        )
    repo = known_as(model_id).repo
    try:
        folder = f"{folder_of(STORE, repo)}/{revision}"
    except ModelError as error:
        raise InventoryError(f"host {host.name}: {error}") from None
    pin = choice_here(EngineSettings.of(host)).pin
    command = fetch_command(repo, revision, sources, settings.model_pins, pin.pin if pin is not None else None, sm_of(host))
    have_folder(
        name=f"{repo} at {revision[:12]}, every file by its SHA-256",
        path=folder,
        commands=[with_env(BaseSettings.of(host).proxy_env(), command)],
        _timeout=DEADLINE_S,
    )
    switch_served(
        name="Switch to it", link=CURRENT, target=folder, python=PYTHON, unit=UNIT, previous=f"{STORE}/{PREVIOUS}", _timeout=7200
    )
