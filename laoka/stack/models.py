"""Which checkpoint is meant: a row of the catalogue by its id or repository, or a folder."""

from __future__ import annotations

from pathlib import Path

from laoka.catalog.models import architectures, model, models
from laoka.stack.checkpoint import read_folder
from laoka.stack.request import Checkpoint, RequestError
from laoka.stack.weights import from_catalogue


def checkpoint_of(name: str) -> Checkpoint:
    """The checkpoint of a name, or of a folder where there is one of that name.

    Errors: RequestError for a name that is neither; CheckpointError for a folder that is no checkpoint.
    """
    row = model(name)
    if row is not None:
        arch = architectures()[row.architecture]
        return Checkpoint(row.id, row.scheme, from_catalogue(row, arch), arch, row)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return read_folder(folder)
    known = ", ".join(item.id for item in models())
    raise RequestError(f"model {name!r}: neither a folder nor in the catalogue; known: {known}")
