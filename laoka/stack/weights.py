"""What a checkpoint is made of, in bytes, and what it becomes on the card. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from laoka.catalog.engines import Engine
from laoka.catalog.models import Architecture, Model

NVFP4_BYTES = 0.5625
"""An NVFP4 weight in the file: 4 bits, and one FP8 scale for 16 weights."""

# Bytes of one weight of a linear layer by scheme, where the repository's size is not published.
SCHEME_BYTES = {
    "compressed-tensors:nvfp4": NVFP4_BYTES,
    "modelopt:nvfp4": NVFP4_BYTES,
    "modelopt:mixed": 0.75,
    "compressed-tensors:mixed": 0.75,
    "fp8": 1.0,
    "awq": 0.5195,  # 4 bits, and an FP16 scale and a 4-bit zero for 128 weights
    "bf16": 2.0,
}


@dataclass(frozen=True)
class Weights:
    """Bytes of a checkpoint by what they are, and how that is known."""

    embedding: int
    lm_head: int
    linear: int
    linear_parameters: int
    nvfp4_parameters: int
    """How many of the linear weights are NVFP4."""
    vision: int = 0
    mtp: int = 0
    other: int = 0
    """Norms and other small tensors: every GPU holds them whole."""
    measured: bool = False
    """True when read from the files' own headers, False when computed."""
    source: str = ""

    @property
    def total(self) -> int:
        """All bytes of the files."""
        return self.embedding + self.lm_head + self.linear + self.vision + self.mtp + self.other


def attention_parameters(arch: Architecture) -> int:
    """Weights of the projections of one full-attention layer."""
    query = arch.heads * arch.head_dim * (2 if arch.attention_gate else 1)
    return arch.hidden * (query + 2 * arch.kv_heads * arch.head_dim + arch.heads * arch.head_dim)


def gdn_parameters(arch: Architecture) -> int:
    """Weights of the projections of one GDN layer: q, k, v; z; b, a; and the way out."""
    keys, values = arch.gdn_key_heads * arch.gdn_head_dim, arch.gdn_value_heads * arch.gdn_head_dim
    return arch.hidden * ((2 * keys + values) + values + 2 * arch.gdn_value_heads + values)


def linear_parameters(arch: Architecture) -> int:
    """Weights of all linear layers of the decoder, embeddings and lm_head left out."""
    mlp = 3 * arch.hidden * arch.intermediate
    full = arch.full_attention_layers * (attention_parameters(arch) + mlp)
    return full + arch.gdn_layers * (gdn_parameters(arch) + mlp)


def mtp_parameters(arch: Architecture) -> int:
    """Weights of the multi-token-prediction layers: an attention layer each, and the joint of two hidden states."""
    return arch.mtp_layers * (attention_parameters(arch) + 3 * arch.hidden * arch.intermediate + 2 * arch.hidden**2)


def from_catalogue(model: Model, arch: Architecture) -> Weights:
    """The make-up of a catalogued checkpoint: its published size, shared out by the architecture's numbers."""
    parameters = linear_parameters(arch)
    embedding = 2 * arch.vocab * arch.hidden
    lm_head = 0 if arch.tied_embeddings else 2 * arch.vocab * arch.hidden
    if model.lm_head == "nvfp4":
        lm_head = int(NVFP4_BYTES * arch.vocab * arch.hidden)
    mtp = 2 * mtp_parameters(arch)
    if model.bytes_total is None:
        linear = int(SCHEME_BYTES[model.scheme] * parameters)
        source = (
            f"{SCHEME_BYTES[model.scheme]} bytes for each of {parameters} weights ({model.scheme}); its own size is not published"
        )
    else:
        linear = model.bytes_total - embedding - lm_head - mtp - arch.vision_bytes
        source = f"{model.bytes_total} bytes ({model.repo})"
    if model.scheme in ("compressed-tensors:nvfp4", "modelopt:nvfp4"):
        nvfp4 = parameters
    elif model.scheme.endswith(":mixed"):
        # The rest is FP8 at one byte: so many NVFP4 weights make up the size.
        nvfp4 = min(parameters, max(0, int((parameters - linear) / (1 - NVFP4_BYTES))))
    else:
        nvfp4 = 0
    return Weights(embedding, lm_head, linear, parameters, nvfp4, arch.vision_bytes, mtp, 0, False, source)


def resident_linear(weights: Weights, engine: Engine) -> int:
    """Bytes of the linear layers once the engine has repacked them: NVFP4 may grow (its scales are widened or kept twice)."""
    return weights.linear + int(weights.nvfp4_parameters * (engine.nvfp4_bytes_per_weight - NVFP4_BYTES))
