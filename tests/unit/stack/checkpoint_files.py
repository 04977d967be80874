"""Checkpoint folders for tests: real headers of real size, and files without weights (sparse: they take no space)."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

from laoka.stack.checkpoint import DTYPE_BITS

DATA = Path(__file__).resolve().parents[2] / "data" / "checkpoints"
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]


def header_of(shapes: Shapes) -> tuple[bytes, int]:
    """(header text, bytes of data) of a safetensors file with these tensors one after another."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in shapes.items():
        size = math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    return json.dumps(header).encode(), end


def write_file(path: Path, shapes: Shapes) -> None:
    """A safetensors file whose data is a hole."""
    header, size = header_of(shapes)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + size)


def quasar_shapes() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensors of Qwen3.8-27B in NVFP4: packed weights, FP8 scales for 16 weights, the rest in BF16."""
    hidden, mlp, vocab = 5120, 17408, 248320
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.language_model.embed_tokens.weight": ("BF16", (vocab, hidden)),
        "lm_head.weight": ("BF16", (vocab, hidden)),
        "model.language_model.norm.weight": ("BF16", (hidden,)),
        # Its 27 blocks as one: what counts is the bytes.
        "model.visual.blocks.weight": ("BF16", (464_000_000,)),
    }

    def linear(name: str, out: int, inner: int, packed: bool = True) -> None:
        if not packed:
            found[f"{name}.weight"] = ("BF16", (out, inner))
            return
        found[f"{name}.weight_packed"] = ("U8", (out, inner // 2))
        found[f"{name}.weight_scale"] = ("F8_E4M3", (out, inner // 16))
        found[f"{name}.weight_global_scale"] = ("F32", (1,))

    def block(at: str, full: bool, packed: bool = True) -> None:
        found[f"{at}.input_layernorm.weight"] = ("BF16", (hidden,))
        if full:
            for name, out, inner in (("q", 12288, hidden), ("k", 1024, hidden), ("v", 1024, hidden), ("o", hidden, 6144)):
                linear(f"{at}.self_attn.{name}_proj", out, inner, packed)
        else:
            for name, out, inner in (
                ("in_proj_qkv", 10240, hidden),
                ("in_proj_z", 6144, hidden),
                ("in_proj_a", 48, hidden),
                ("in_proj_b", 48, hidden),
                ("out_proj", hidden, 6144),
            ):
                linear(f"{at}.linear_attn.{name}", out, inner, packed)
        for name, out, inner in (("gate", mlp, hidden), ("up", mlp, hidden), ("down", hidden, mlp)):
            linear(f"{at}.mlp.{name}_proj", out, inner, packed)

    for layer in range(64):
        block(f"model.language_model.layers.{layer}", layer % 4 == 3)
    block("mtp.layers.0", True, packed=False)
    linear("mtp.fc", hidden, 2 * hidden, packed=False)
    return found


def quasar_folder(folder: Path) -> Path:
    """A folder like the QUASAR repository: config.json, two sparse files, an index."""
    folder.mkdir()
    shutil.copy(DATA / "qwen3.8-27b-quasar-nvfp4" / "config.json", folder)
    shapes = quasar_shapes()
    names = sorted(shapes)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for name, held in files.items():
        write_file(folder / name, {tensor: shapes[tensor] for tensor in held})
    places = {tensor: name for name, held in files.items() for tensor in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder
