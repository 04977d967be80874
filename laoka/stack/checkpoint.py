"""A checkpoint folder on disk: its architecture from config.json, its bytes from the safetensors headers; no weight is read.

Files come from strangers: every size is bounded, every offset checked, and what is wrong is told in one line.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laoka.catalog.models import Architecture, models
from laoka.stack.quantisation import declared, scheme_of, seen_in
from laoka.stack.request import Checkpoint
from laoka.stack.weights import Weights, linear_parameters

MAX_CONFIG_BYTES = 4 * 1024**2
MAX_HEADER_BYTES = 64 * 1024**2
MAX_FILES = 1000
MAX_TENSORS = 1_000_000
MAX_RANK = 16
MAX_DIMENSION = 2**40
INDEX = "model.safetensors.index.json"

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64,
}  # fmt: skip


class CheckpointError(ValueError):
    """A folder that is no checkpoint, or a file of it that is broken; the message is one line with file and reason."""


@dataclass(frozen=True)
class Tensor:
    """A tensor as its file's header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def parse_header(header: bytes, data_bytes: int, where: str) -> tuple[Tensor, ...]:
    """The tensors of one safetensors header.

    Arguments: `header` the JSON text; `data_bytes` how many bytes of data follow it in the file.
    Errors: CheckpointError for anything that is not a valid header of a file of that size.
    """
    try:
        content = json.loads(header.decode("utf-8"), object_pairs_hook=_no_twins)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: its header is not JSON: {str(error)[:80] or type(error).__name__}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{where}: its header is not a table of tensors")
    if len(content) > MAX_TENSORS:
        raise CheckpointError(f"{where}: more than {MAX_TENSORS} tensors")
    found = [_tensor(name, raw, data_bytes, where) for name, raw in content.items() if name != "__metadata__"]
    end = 0
    for begin, stop, name in sorted((item[1], item[2], item[0].name) for item in found):
        if begin < end:
            raise CheckpointError(f"{where}: {name[:80]!r} overlaps another tensor")
        end = stop
    return tuple(tensor for tensor, _, _ in found)


def _tensor(name: str, raw: Any, data_bytes: int, where: str) -> tuple[Tensor, int, int]:
    label = f"{where}: {name[:80]!r}"
    if not isinstance(raw, Mapping):
        raise CheckpointError(f"{label} is not described")
    dtype, shape, offsets = raw.get("dtype"), raw.get("shape"), raw.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{label} has the unknown type {str(dtype)[:20]!r}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(_count(item) and item <= MAX_DIMENSION for item in shape):
        raise CheckpointError(f"{label} has no valid shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_count(item) for item in offsets):
        raise CheckpointError(f"{label} has no valid data_offsets")
    begin, end = offsets
    if not begin <= end <= data_bytes:
        raise CheckpointError(f"{label} lies at {begin}..{end}, the file has {data_bytes} bytes of data: truncated, or damaged")
    if (end - begin) * 8 != math.prod(shape) * DTYPE_BITS[dtype]:
        raise CheckpointError(f"{label} has {end - begin} bytes, which {dtype} {shape} is not")
    return Tensor(name, dtype, tuple(shape), end - begin), begin, end


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def header_length(first: bytes, size_bytes: int, where: str) -> int:
    """How long the header of a safetensors file is, which begins after its first 8 bytes.

    Arguments: `first` are the file's first bytes, 8 or more where it has them; `size_bytes` its size.
    Errors: CheckpointError for what can't be such a file, or was cut short.
    """
    # A clone without git-lfs has these few lines in place of each file (the format's specification, version 1).
    if first.startswith(b"version "):
        raise CheckpointError(f"{where}: a pointer of Git LFS, not the weights: git lfs pull, or fetch it from its hub")
    if len(first) < 8:
        raise CheckpointError(f"{where}: {size_bytes} bytes: too short for a safetensors file")
    (length,) = struct.unpack("<Q", first[:8])
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{where}: says that its header has {length} bytes, more than {MAX_HEADER_BYTES}: not a safetensors file"
        )
    if length > size_bytes - 8:
        raise CheckpointError(f"{where}: its header has {length} bytes, the file {size_bytes}: truncated")
    return int(length)


def read_tensors(path: Path) -> tuple[Tensor, ...]:
    """The tensors of one safetensors file, from its header alone. Errors: CheckpointError."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = header_length(stream.read(8), size, path.name)
            header = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{path.name}: {error.strerror}") from None
    return parse_header(header, size - 8 - length, path.name)


def read_folder(folder: Path) -> Checkpoint:
    """The checkpoint in a folder. Errors: CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    config = _read_config(folder / "config.json")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: no *.safetensors file: is it fetched?")
    if len(files) > MAX_FILES:
        raise CheckpointError(f"{folder}: {len(files)} safetensors files, more than {MAX_FILES}")
    _check_index(folder, {path.name for path in files})
    tensors: dict[str, Tensor] = {}
    for path in files:
        for tensor in read_tensors(path):
            if tensor.name in tensors:
                raise CheckpointError(f"{path.name}: {tensor.name[:80]!r} is in another file too")
            tensors[tensor.name] = tensor
    arch = parse_config(config, str(folder / "config.json"))
    # What the headers show decides: a BF16 checkpoint stays one under an NVFP4 name and config.
    scheme = scheme_of(declared(config), seen_in(tensors.values()))
    weights = weigh(tuple(tensors.values()), arch, f"headers of {len(files)} file(s) in {folder}")
    return Checkpoint(folder.name, scheme, weights, arch, _catalogued(folder.name))


def _catalogued(name: str) -> Any:
    """The catalogue's row when the folder is called like its repository, for drafter and hints; else None."""
    wanted = name.lower()
    return next(
        (row for row in models() if wanted in (row.id, row.repo.split("/")[1].lower(), row.repo.replace("/", "--").lower())), None
    )


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise CheckpointError(f"{path}: larger than {MAX_CONFIG_BYTES} bytes: not a model's config.json")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {str(error)[:80] or type(error).__name__}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a table")
    return content


def _check_index(folder: Path, present: set[str]) -> None:
    """Every file that belongs to the checkpoint is there. Errors: CheckpointError."""
    path = folder / INDEX
    data: bytes | None = None
    try:
        if path.exists():
            if path.stat().st_size > MAX_HEADER_BYTES:
                raise CheckpointError(f"{INDEX}: larger than {MAX_HEADER_BYTES} bytes")
            data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{INDEX}: {error.strerror}") from None
    check_complete(present, data, str(folder))


def check_complete(present: Collection[str], index: bytes | None, where: str) -> None:
    """Refuse a checkpoint that lacks some of its files.

    Arguments: `present` names of its safetensors files; `index` the content of its index, None where it has none: then the numbers
    in the names (model-00001-of-00003) tell. Errors: CheckpointError.
    """
    if index is not None:
        try:
            wanted = {str(name) for name in json.loads(index.decode("utf-8"))["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{where}: {INDEX}: not an index: {type(error).__name__}") from None
    else:
        wanted = _siblings(present)
    missing = sorted(wanted - set(present))
    if missing:
        raise CheckpointError(f"{where}: {len(missing)} of {len(wanted)} files are missing, {missing[0][:80]!r} first: fetch them")


def _siblings(present: Collection[str]) -> set[str]:
    """The names that numbered files say there are."""
    found = set()
    for name in present:
        numbered = re.fullmatch(r"(.*-)(\d{5})-of-(\d{5})(\.safetensors)", name)
        if numbered and int(numbered[3]) <= MAX_FILES:
            found |= {f"{numbered[1]}{number:05d}-of-{numbered[3]}{numbered[4]}" for number in range(1, int(numbered[3]) + 1)}
    return found


def _number(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if not _count(value) or value > MAX_DIMENSION:
        raise CheckpointError(f"{where}: {key} is {str(value)[:40]!r}, not a number")
    assert isinstance(value, int)
    return value


def parse_config(config: Mapping[str, Any], where: str) -> Architecture:
    """The architecture of a config.json: plain transformers, and hybrids of full attention and gated delta nets.

    Errors: CheckpointError when a number that the plan needs is missing.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{where}: text_config is not a table")
    layers = _number(text, "num_hidden_layers", where)
    heads = _number(text, "num_attention_heads", where)
    hidden = _number(text, "hidden_size", where)
    if not (0 < layers <= 4096 and heads > 0 and hidden > 0):
        raise CheckpointError(f"{where}: {layers} layers, {heads} heads, hidden size {hidden}: not a model")
    kinds, interval = text.get("layer_types"), text.get("full_attention_interval")
    if isinstance(kinds, list) and len(kinds) == layers and all(isinstance(kind, str) for kind in kinds):
        gdn = sum(kind == "linear_attention" for kind in kinds)
    elif interval is not None and "linear_num_value_heads" in text:
        step = _number(text, "full_attention_interval", where)
        if step < 1:
            raise CheckpointError(f"{where}: full_attention_interval is {step}")
        gdn = layers - layers // step
    else:
        gdn = 0
    recurrent = {
        "gdn_key_heads": _number(text, "linear_num_key_heads", where),
        "gdn_value_heads": _number(text, "linear_num_value_heads", where),
        "gdn_head_dim": _number(text, "linear_value_head_dim", where),
        "gdn_conv_kernel": _number(text, "linear_conv_kernel_dim", where, 4),
        "gdn_state_bytes": 4 if text.get("mamba_ssm_dtype", "float32") == "float32" else 2,
    } if gdn else {}  # fmt: skip
    kv_heads = _number(text, "num_key_value_heads", where, heads)
    if kv_heads < 1:
        raise CheckpointError(f"{where}: num_key_value_heads is {kv_heads}")
    today = models()[0].checked
    return Architecture(
        id=where, source=where, checked=today, model_type=str(text.get("model_type", config.get("model_type", "?")))[:40],
        hidden=hidden, layers=layers, full_attention_layers=layers - gdn, gdn_layers=gdn, heads=heads, kv_heads=kv_heads,
        head_dim=_number(text, "head_dim", where, hidden // heads), intermediate=_number(text, "intermediate_size", where),
        vocab=_number(text, "vocab_size", where), max_position=_number(text, "max_position_embeddings", where),
        attention_gate=bool(text.get("attn_output_gate", gdn > 0)), mtp_layers=_number(text, "mtp_num_hidden_layers", where, 0),
        tied_embeddings=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))), **recurrent,
    )  # fmt: skip


def quantisation_scheme(config: Mapping[str, Any]) -> str:
    """The checkpoint's scheme in the catalogue's words, from quantization_config alone; "bf16" without one."""
    return declared(config).scheme


def weigh(tensors: tuple[Tensor, ...], arch: Architecture, source: str) -> Weights:
    """Share the tensors out by what they are, from their names as published checkpoints have them."""
    size = dict.fromkeys(("embedding", "lm_head", "linear", "vision", "mtp", "other"), 0)
    nvfp4 = 0
    for tensor in tensors:
        kind = _kind(tensor)
        size[kind] += tensor.bytes
        # Two NVFP4 weights lie in one byte; the scales beside them (one for 16) tell them from other packed formats.
        if kind == "linear" and tensor.dtype == "F8_E4M3" and tensor.name.endswith("weight_scale") and len(tensor.shape) == 2:
            nvfp4 += 16 * tensor.bytes
    packed = sum(tensor.bytes for tensor in tensors if tensor.dtype in ("U8", "I8") and _kind(tensor) == "linear")
    return Weights(
        **size, linear_parameters=linear_parameters(arch), nvfp4_parameters=min(nvfp4, 2 * packed), measured=True, source=source
    )


def _kind(tensor: Tensor) -> str:
    name = tensor.name
    if name.startswith("mtp.") or ".mtp." in name:
        return "mtp"
    if ".visual." in f".{name}" or "vision_tower" in name or "multi_modal_projector" in name:
        return "vision"
    if "embed_tokens" in name:
        return "embedding"
    if "lm_head" in name:
        return "lm_head"
    if len(tensor.shape) >= 2 or name.endswith(("_scale", "_scale_2", "scales", "qzeros", "global_scale")):
        return "linear"
    return "other"
