"""The model's files: fetched by revision, every SHA-256 checked, one atomic switch with a way back; old revisions pruned."""

from __future__ import annotations

from collections.abc import Sequence

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
from roles.model.peers import is_from_peer, named_hosts, set_up, written
from roles.settings import InventoryError, RoleSettings, data_of

CURRENT = f"{STORE}/{CURRENT_NAME}"
DEADLINE_S = 24 * 3600


class ModelSettings(RoleSettings):
    """Settings of the model."""

    model_id: str | None = None
    """Its name, such as QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4."""
    model_revision: str | None = None
    """The hub's whole commit (40 digits), or the SHA-256 of its manifest.json (64), which `laoka model manifest` prints."""
    model_source: str | tuple[str, ...] | None = None
    """Where from, one or several in the order of trial: host:NAME for another host of the inventory (NAME itself skips it), hf,
    hf-mirror, modelscope, https://FOLDER, ssh://HOST/FOLDER, /FOLDER."""
    model_peer_address: str | None = None
    """Address under which the other hosts reach this one when they copy from it; None takes ssh_hostname."""
    model_pins: dict[str, str] = {}
    """SHA-256 by path (globs allowed) that files must have whatever a source says: {"model-*.safetensors": "..."}."""


def sources_of(settings: ModelSettings) -> tuple[str, ...]:
    """The sources of the inventory, in order."""
    return _tuple(settings.model_source)


def _tuple(told: str | Sequence[str] | None) -> tuple[str, ...]:
    return (told,) if isinstance(told, str) else tuple(told or ())


def target_folder(on: Host) -> str:
    """Where the pinned revision of a host's model lies; empty where the inventory pins none. Errors: InventoryError."""
    settings = ModelSettings.of(on)
    if not (settings.model_id and settings.model_revision):
        return ""
    try:
        return f"{folder_of(STORE, known_as(settings.model_id).repo)}/{settings.model_revision}"
    except ModelError as error:
        raise InventoryError(f"host {on.name}: {error}") from None


def askers_of(on: Host) -> list[Host]:
    """The other hosts of the inventory whose model or drafter may come from this one."""
    found = []
    for other in on.state.inventory:
        data = data_of(other)
        told = (*_tuple(data.get("model_source")), *_tuple(data.get("drafter_source")))
        if other.name != on.name and on.name in named_hosts(told):
            found.append(other)
    return found


def sm_of(on: Host) -> int | None:
    """The lowest compute capability of a host's cards; None without cards, or with one that the catalogue does not have."""
    found = [by_device_id(gpu.device_id) for gpu in BaseSettings.of(on).expected_gpus]
    known = [gpu.sm for gpu in found if gpu is not None]
    return min(known) if known and len(known) == len(found) else None


@deploy("Model's files")
def model_files() -> None:
    """Fetch the pinned revision unless it is there whole."""
    settings = ModelSettings.of(host)
    model_id, revision, sources = settings.model_id, settings.model_revision, sources_of(settings)
    if not (model_id and revision and sources):
        raise InventoryError(f"host {host.name}: model_id, model_revision and model_source are needed to place a model: set them")
    if not is_pinned(revision):
        raise InventoryError(
            f"host {host.name}: model_revision {revision!r} pins nothing: write the whole commit (40 digits) or a manifest's "
            f"SHA-256 (64); `laoka model fetch {model_id} --revision {revision} --dry` tells the commit"
        )
    repo, folder = known_as(model_id).repo, target_folder(host)
    pin = choice_here(EngineSettings.of(host)).pin
    from_where = written(host, sources, "/".join(folder.rsplit("/", 2)[1:]))
    if not from_where:
        raise InventoryError(f"host {host.name}: model_source names this host alone: name also where it gets the model from itself")
    command = fetch_command(repo, revision, from_where, settings.model_pins, pin.pin if pin is not None else None, sm_of(host))
    commands, what = [with_env(BaseSettings.of(host).proxy_env(), command)], f"{repo} at {revision[:12]}"
    set_up((*sources, *_tuple(data_of(host).get("drafter_source"))), askers_of(host))
    if not is_from_peer(host, sources):
        have_folder(name=f"{what}, every file by its SHA-256", path=folder, commands=commands, _timeout=DEADLINE_S)
    # Who copies from another host goes after that one.
    if is_from_peer(host, sources):
        have_folder(
            name=f"{what} from another host, every file by its SHA-256", path=folder, commands=commands, _timeout=DEADLINE_S
        )


@deploy("Model")
def model() -> None:
    """Fetch the pinned revision unless it is there whole; then switch to it."""
    model_files()
    switch_served(
        name="Switch to it", link=CURRENT, target=target_folder(host), python=PYTHON, unit=UNIT, previous=f"{STORE}/{PREVIOUS}",
        _timeout=7200,
    )  # fmt: skip
