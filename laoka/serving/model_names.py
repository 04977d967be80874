"""What a model's name stands for: its repository, the revision and hashes that the catalogue pins, where to look. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from laoka.catalog.models import Drafter, drafters, model
from laoka.serving.manifest import ModelError
from laoka.serving.model_source import Source, parse_source
from laoka.serving.model_store import Wish

DEFAULT_SOURCES = ("hf",)


@dataclass(frozen=True)
class Known:
    """What the catalogue says of a name; `repo` alone where it does not have it.

    `pins` are SHA-256s by path (globs allowed); `modelscope` is (repository, commit) there, where it has another name or commit.
    """

    repo: str
    revision: str | None = None
    pins: Mapping[str, str] = field(default_factory=dict)
    modelscope: tuple[str, str | None] | None = None


def known_as(name: str) -> Known:
    """What the catalogue has of a model or drafter by its id, repository or alias, else the name as a repository."""
    row = model(name)
    if row is not None:
        return Known(row.repo, row.revision, {}, (row.modelscope, None) if row.modelscope else None)
    for drafter in drafters().values():
        if name.strip().lower() in (drafter.id, drafter.repo.lower()):
            at = (drafter.repo, drafter.modelscope_revision) if drafter.modelscope_revision else None
            return Known(drafter.repo, drafter.revision, pins_of(drafter), at)
    return Known(name)


def pins_of(drafter: Drafter) -> dict[str, str]:
    """The hashes of a drafter that are published with the engine's own profile, by path."""
    told = {"config.json": drafter.config_sha256, "*.safetensors": drafter.weights_sha256}
    return {path: sha256 for path, sha256 in told.items() if sha256 is not None}


def wish_of(
    name: str,
    revision: str | None,
    sources: Sequence[str],
    pins: Mapping[str, str] | None = None,
    env: Mapping[str, str] = os.environ,
) -> Wish:
    """What to fetch for a name.

    Arguments: `revision` None takes the catalogue's; `sources` as people write them, none: the first hub; `pins` besides the
    catalogue's own. Errors: ModelError.
    """
    known = known_as(name)
    wanted = revision or known.revision
    if wanted is None:
        raise ModelError(f"{name}: name a revision (--revision COMMIT); a branch such as main is looked up once and told")
    # The catalogue's hashes are those of the catalogue's revision.
    own = known.pins if known.revision is not None and known.revision.startswith(wanted) else {}
    found = []
    for written in sources or DEFAULT_SOURCES:
        source = parse_source(written, known.repo, env)
        if source.kind == "modelscope" and written == "modelscope" and known.modelscope is not None:
            repo, commit = known.modelscope
            source = Source("modelscope", source.base, repo, commit if own else None)
        found.append(source)
    return Wish(known.repo, wanted, tuple(found), {**own, **(pins or {})})
