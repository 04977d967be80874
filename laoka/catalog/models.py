"""Models: architectures, the checkpoints of them, and the drafters that match."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from laoka.catalog.load import CatalogError, Row, by_id, is_sha256, load, references

FILE = "models.toml"

Scheme = Literal["compressed-tensors:nvfp4", "modelopt:nvfp4", "modelopt:mixed", "compressed-tensors:mixed", "fp8", "awq", "bf16"]


@dataclass(frozen=True, kw_only=True)
class Architecture(Row):
    """The numbers of a hybrid transformer: some layers with full attention, the others gated delta nets (GDN)."""

    model_type: str
    hidden: int
    layers: int
    full_attention_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_position: int
    attention_gate: bool = False
    """The query projection is twice as wide: it makes an output gate too."""
    gdn_layers: int = 0
    gdn_key_heads: int = 0
    gdn_value_heads: int = 0
    gdn_head_dim: int = 0
    gdn_conv_kernel: int = 0
    gdn_state_bytes: int = 4
    """Bytes of one element of the recurrent state (mamba_ssm_dtype)."""
    mtp_layers: int = 0
    tied_embeddings: bool = False
    vision_bytes: int = 0
    """Vision tower and the small tensors, in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class Model(Row):
    """One published checkpoint."""

    repo: str
    architecture: str
    scheme: Scheme
    bytes_total: int | None = None
    """Size of its weight files; None when nobody told it: then it is computed from the scheme and said to be."""
    revision: str | None = None
    """A revision, or the beginning of one that was published."""
    modelscope: str | None = None
    quantised_linears: int | None = None
    lm_head: Literal["bf16", "nvfp4", "unknown"] = "unknown"
    drafter: str | None = None
    validated_by: tuple[str, ...] = ()
    """Engines whose own release covers it."""
    min_gpu_memory_mib: int | None = None
    """A card below it fails while loading, whatever the sum says."""
    aliases: tuple[str, ...] = ()
    notes: str = ""


@dataclass(frozen=True, kw_only=True)
class Drafter(Row):
    """A draft model for speculative decoding."""

    repo: str
    method: Literal["dflash"]
    """The method's name on the engine's command line. There is none called dflash2."""
    architecture: str
    bytes_total: int
    speculative_tokens: int | None = None
    """Tokens that it drafts in a round; None when not published."""
    revision: str | None = None
    modelscope_revision: str | None = None
    weights_sha256: str | None = None
    config_sha256: str | None = None
    replicated: bool = True
    """Every GPU holds it whole; tensor parallelism does not share it out."""
    layers: int | None = None
    sliding_window: int | None = None
    validated: bool = False
    notes: str = ""


def check(architectures: tuple[Architecture, ...], models: tuple[Model, ...], drafters: tuple[Drafter, ...]) -> None:
    """What the types alone don't say. Errors: CatalogError."""
    references(models, "architecture", by_id(architectures), FILE)
    references(models, "drafter", by_id(drafters), FILE)
    for arch in architectures:
        if arch.full_attention_layers + arch.gdn_layers != arch.layers:
            raise CatalogError(f"{FILE}: {arch.id}: full attention and GDN layers don't add up to {arch.layers}")
    for drafter in drafters:
        for key in ("weights_sha256", "config_sha256"):
            value = getattr(drafter, key)
            if value is not None and not is_sha256(value):
                raise CatalogError(f"{FILE}: {drafter.id}: {key} is not 64 hexadecimal digits")
    seen: dict[str, str] = {}
    for model in models:
        for name in {model.id, model.repo, *model.aliases}:
            if name in seen:
                raise CatalogError(f"{FILE}: {name} names both {seen[name]} and {model.id}")
            seen[name] = model.id


@cache
def models() -> tuple[Model, ...]:
    """Every checkpoint. Errors: CatalogError."""
    rows = load(FILE, "model", Model)
    check(load(FILE, "architecture", Architecture), rows, load(FILE, "drafter", Drafter))
    return rows


@cache
def architectures() -> dict[str, Architecture]:
    """Architectures by id. Errors: CatalogError."""
    return by_id(load(FILE, "architecture", Architecture))


@cache
def drafters() -> dict[str, Drafter]:
    """Drafters by id. Errors: CatalogError."""
    return by_id(load(FILE, "drafter", Drafter))


def model(name: str) -> Model | None:
    """A checkpoint by its id, repository or alias (any case), or None."""
    wanted = name.strip().lower()
    for row in models():
        if wanted in {known.lower() for known in (row.id, row.repo, *row.aliases)}:
            return row
    return None
