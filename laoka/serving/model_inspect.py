"""What a model is, by its config and the headers of its files, read from a source or a folder without fetching a weight."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from laoka.serving.manifest import ModelError
from laoka.serving.model_source import Listing, RemoteFile, Source, SourceError, read_part
from laoka.stack.checkpoint import (
    INDEX,
    MAX_CONFIG_BYTES,
    MAX_FILES,
    MAX_HEADER_BYTES,
    CheckpointError,
    Tensor,
    check_complete,
    header_length,
    parse_header,
)
from laoka.stack.quantisation import Declared, Seen, belied, contradictions, declared, scheme_of, seen_in

FIRST_BYTES = 64 * 1024
"""What is read of a file at once: the headers of most checkpoints fit, so that one request does."""
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")
NO_WEIGHTS = "RuntimeError: Cannot find any model weights with ..."
"""vLLM 0.32.0's default loader."""


@dataclass(frozen=True)
class Inspected:
    """A model's format. `seen` is None where the headers can't be read; then only the config is known.

    `belied` are those of the contradictions in which an engine that goes by the config can't load the files; `other_weights` names
    weights of another form than safetensors where there are no others.
    """

    name: str
    said: Declared
    seen: Seen | None
    scheme: str
    contradictions: tuple[str, ...]
    belied: tuple[str, ...]
    model_type: str
    files: int
    other_weights: tuple[str, ...] = ()


def inspect(name: str, source: Source, listing: Listing, say: Callable[[str], None] = lambda line: None) -> Inspected:
    """Read config.json and the headers of every safetensors file.

    Arguments: `name` as the model is called, to tell where the name promises something else.
    Errors: ModelError for a model without config or with a damaged header; SourceError when the source fails.
    """
    named = {file.path: file for file in listing.files}
    config = _json(source, listing, named, "config.json")
    if config is None:
        raise ModelError(f"{source}: no config.json: not a model that vLLM serves")
    said = declared(config, _json(source, listing, named, "hf_quant_config.json"))
    weights = sorted(path for path in named if path.endswith(".safetensors"))
    if len(weights) > MAX_FILES:
        raise ModelError(f"{source}: {len(weights)} safetensors files, more than {MAX_FILES}")
    others = tuple(sorted(path for path in named if path.endswith(OTHER_WEIGHTS)))
    if not weights and not others:
        raise ModelError(f"{source}: no weights (*.safetensors): an engine would end with: {NO_WEIGHTS}")
    try:
        check_complete(weights, _read(source, listing, named[INDEX], MAX_HEADER_BYTES) if INDEX in named else None, str(source))
    except CheckpointError as error:
        raise ModelError(str(error)) from None
    seen: Seen | None = None
    if weights and source.kind != "rsync":
        tensors: list[Tensor] = []
        for path in weights:
            tensors += _tensors(source, listing, named[path])
        seen = seen_in(tensors)
        say(f"{name}: headers of {len(weights)} file(s) read: {seen.words()}")
    scheme = scheme_of(said, seen) if seen is not None else said.scheme
    told = contradictions(name, said, seen) if seen is not None else ()
    wrong = belied(said, seen) if seen is not None else ()
    text = config.get("text_config")
    kind = text.get("model_type") if isinstance(text, Mapping) else config.get("model_type")
    kind = str(config.get("model_type") or kind or "?")[:40]
    return Inspected(name, said, seen, scheme, told, wrong, kind, len(weights), () if weights else others)


def _json(source: Source, listing: Listing, named: Mapping[str, RemoteFile], path: str) -> Mapping[str, Any] | None:
    if path not in named:
        return None
    data = _read(source, listing, named[path], MAX_CONFIG_BYTES)
    try:
        content = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        raise ModelError(f"{source}: {path} is not JSON") from None
    if not isinstance(content, dict):
        raise ModelError(f"{source}: {path} is not a table")
    return content


def _read(source: Source, listing: Listing, file: RemoteFile, most_bytes: int) -> bytes:
    """A whole small file. Errors: ModelError, SourceError."""
    if file.size_bytes > most_bytes:
        raise ModelError(f"{source}: {file.path} has {file.size_bytes} bytes: not what its name says")
    return read_part(source, file.path, listing.revision, 0, max(1, file.size_bytes))


def _tensors(source: Source, listing: Listing, file: RemoteFile) -> tuple[Tensor, ...]:
    first = read_part(source, file.path, listing.revision, 0, min(FIRST_BYTES, max(8, file.size_bytes)))
    try:
        length = header_length(first, file.size_bytes, file.path)
    except CheckpointError as error:
        raise ModelError(f"{source}: {error}") from None
    header = first[8 : 8 + length]
    if len(header) < length:
        header += read_part(source, file.path, listing.revision, len(first), 8 + length)
    if len(header) < length:
        raise SourceError(f"{source}: {file.path}: its header is cut short")
    try:
        return parse_header(header, file.size_bytes - 8 - length, file.path)
    except CheckpointError as error:
        raise ModelError(f"{source}: {error}") from None
