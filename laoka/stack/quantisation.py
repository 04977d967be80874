"""What a checkpoint's weights are: as its config says, and as the headers of its files show. Pure.

The two can differ: a checkpoint called NVFP4 may hold BF16 or FP8. What the headers show is what an engine loads.
Forms: compressed-tensors' `weight_packed` with FP8 scales for 16 weights (NVFP4); ModelOpt's U8 `weight` with `weight_scale` and
`weight_scale_2`; FP8 `weight`; AWQ's `qweight` with `qzeros`; GPTQ's with `g_idx`. Sources: the loaders in revolta 0.1.4 (vLLM).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from laoka.stack.checkpoint import Tensor

Form = Literal["nvfp4", "fp8", "int4", "awq", "gptq", "16 bit", "other"]
FORMS: tuple[Form, ...] = ("nvfp4", "fp8", "int4", "awq", "gptq", "16 bit", "other")


@dataclass(frozen=True)
class Declared:
    """What config.json (or ModelOpt's hf_quant_config.json) says. `scheme` is in the catalogue's words, "bf16" without a config.

    `method` is the engine's own word, as in its error messages; `lm_head_left_out` None when the config does not say.
    """

    method: str
    scheme: str
    detail: str = ""
    ignored: tuple[str, ...] = ()
    kv_cache: str | None = None
    lm_head_left_out: bool | None = None


@dataclass(frozen=True)
class Seen:
    """What the headers show: linear layers of the decoder by form, how many weights of each, and the form of lm_head.

    `lm_head` is None when there is none (tied to the embeddings, which are looked at instead: `embedding`). `mtp` is how many
    matrices there are for multi-token prediction (tensors mtp.*, as vLLM's loader for Qwen3.5 has them).
    """

    modules: Mapping[Form, int]
    weights: Mapping[Form, int]
    lm_head: Form | None
    embedding: Form | None
    mtp: int = 0

    @property
    def lm_head_is_plain(self) -> bool | None:
        """Whether what makes the logits is unquantised; None when the headers show neither lm_head nor embeddings."""
        form = self.lm_head if self.lm_head is not None else self.embedding
        return None if form is None else form == "16 bit"

    @property
    def form(self) -> Form | Literal["mixed"] | None:
        """The one form of the linear layers; "mixed" where quantised ones differ; 16-bit ones beside quantised ones don't count."""
        quantised = [form for form, count in self.modules.items() if count and form != "16 bit"]
        if len(quantised) > 1:
            return "mixed"
        if quantised:
            return quantised[0]
        return "16 bit" if self.modules.get("16 bit") else None

    def words(self) -> str:
        """In few words: "496 nvfp4, 2 16 bit"."""
        return ", ".join(f"{self.modules[form]} {form}" for form in FORMS if self.modules.get(form)) or "no linear layer"


# ---- what the config says -----------------------------------------------------------------------------------------------


def declared(config: Mapping[str, Any], hf_quant: Mapping[str, Any] | None = None) -> Declared:
    """What a config.json says of its weights.

    Arguments: `hf_quant` is hf_quant_config.json, which older ModelOpt exports have instead of a quantization_config.
    """
    raw = config.get("quantization_config")
    text = config.get("text_config")
    if raw is None and isinstance(text, Mapping):
        raw = text.get("quantization_config")
    if not isinstance(raw, Mapping) and hf_quant is not None:
        inner = hf_quant.get("quantization")
        raw = {**inner, "quant_method": "modelopt"} if isinstance(inner, Mapping) else None
    if not isinstance(raw, Mapping):
        return Declared("none", "bf16")
    method = str(raw.get("quant_method", ""))[:40].strip().lower() or "?"
    if method == "compressed-tensors":
        return _compressed_tensors(raw)
    if method.startswith("modelopt"):
        return _modelopt(raw, method)
    return _plain(raw, method)


def _texts(value: object) -> tuple[str, ...]:
    return tuple(str(item)[:120] for item in value) if isinstance(value, list) else ()


def _left_out(ignored: Iterable[str]) -> bool:
    return any(re.search(r"lm_head", item) for item in ignored)


def _compressed_tensors(raw: Mapping[str, Any]) -> Declared:
    form = str(raw.get("format", ""))[:40].strip().lower()
    groups = raw.get("config_groups")
    weights = (
        [group.get("weights") for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    )
    told = [_group(item) for item in weights if isinstance(item, Mapping)]
    ignored = _texts(raw.get("ignore"))
    kv = raw.get("kv_cache_scheme")
    scheme = {"nvfp4-pack-quantized": "nvfp4", "mixed-precision": "mixed"}.get(form, form or "?")
    return Declared(
        "compressed-tensors", f"compressed-tensors:{scheme}", "; ".join(dict.fromkeys(told)), ignored,
        _group(kv) if isinstance(kv, Mapping) else None, _left_out(ignored) if groups or ignored else None,
    )  # fmt: skip


def _group(weights: Mapping[str, Any]) -> str:
    bits, kind = str(weights.get("num_bits", "?"))[:4], str(weights.get("type", "?"))[:10]
    size = weights.get("group_size")
    return f"{bits}-bit {kind}" + (f", groups of {size}" if isinstance(size, int) else "")


def _modelopt(raw: Mapping[str, Any], method: str) -> Declared:
    algorithm = str(raw.get("quant_algo", ""))[:40].strip().lower()
    listed = raw.get("quantized_layers")
    layers: Mapping[str, Any] = listed if isinstance(listed, Mapping) else {}
    counts = Counter(str(item.get("quant_algo", "?"))[:20].upper() for item in layers.values() if isinstance(item, Mapping))
    ignored = _texts(raw.get("ignore", raw.get("exclude_modules")))
    kv = raw.get("kv_cache_quant_algo", raw.get("kv_cache_scheme"))
    if "nvfp4" in algorithm or method == "modelopt_fp4":
        name, scheme = "modelopt_fp4", "nvfp4"
    elif "mixed" in algorithm or method == "modelopt_mixed" or len(counts) > 1:
        name, scheme = "modelopt_mixed", "mixed"
    else:
        name, scheme = "modelopt", algorithm or "?"
    detail = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    head = None if not counts and not ignored else not any("lm_head" in str(key) for key in layers) or _left_out(ignored)
    return Declared(name, f"modelopt:{scheme}", detail, ignored, str(kv)[:20] if kv else None, head)


def _plain(raw: Mapping[str, Any], method: str) -> Declared:
    bits, size, block = (
        raw.get("bits", raw.get("w_bit")),
        raw.get("group_size", raw.get("q_group_size")),
        raw.get("weight_block_size"),
    )
    parts = [f"{bits}-bit"] if isinstance(bits, int) else []
    parts += [f"groups of {size}"] if isinstance(size, int) else []
    parts += [f"blocks of {'x'.join(str(item) for item in block[:2])}"] if isinstance(block, list) else []
    ignored = _texts(raw.get("modules_to_not_convert", raw.get("ignored_layers")))
    # AWQ and GPTQ quantise lm_head only when they say so; FP8 leaves it out unless its list is there and does not name it.
    head = True if method in ("awq", "gptq") and not raw.get("lm_head") else _left_out(ignored) if ignored else None
    return Declared(method, method, ", ".join(parts), ignored, None, head)


# ---- what the headers show ----------------------------------------------------------------------------------------------


def seen_in(tensors: Iterable[Tensor]) -> Seen:
    """What the tensors of a checkpoint show, by their names and types as published checkpoints have them."""
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for tensor in tensors:
        base, _, part = tensor.name.rpartition(".")
        parts[base][part] = tensor
    modules: Counter[Form] = Counter()
    weights: Counter[Form] = Counter()
    head: Form | None = None
    embedding: Form | None = None
    mtp = 0
    for base, named in parts.items():
        found = _form(named)
        if found is None:
            continue
        form, count = found
        last = base.rsplit(".", 1)[-1]
        if last == "lm_head":
            head = form
        elif last == "embed_tokens":
            embedding = form
        elif re.search(r"(^|\.)mtp(\.|$)", base):
            mtp += 1
        elif not re.search(r"(^|\.)(visual|vision_tower|multi_modal_projector)(\.|$)", base):
            modules[form] += 1
            weights[form] += count
    return Seen(dict(modules), dict(weights), head, embedding, mtp)


def _form(named: Mapping[str, Tensor]) -> tuple[Form, int] | None:
    """(form, number of weights) of one module; None for what is no matrix (norms, biases, convolutions' small parts)."""
    scale = named.get("weight_scale")
    fine = scale is not None and scale.dtype == "F8_E4M3" and len(scale.shape) == 2
    packed = named.get("weight_packed")
    if packed is not None:
        if packed.dtype == "U8" and fine:
            return "nvfp4", 2 * packed.bytes
        return ("int4", 2 * packed.bytes) if packed.dtype == "I32" else ("other", packed.bytes)
    quantised = named.get("qweight")
    if quantised is not None:
        return ("gptq" if "g_idx" in named else "awq" if "qzeros" in named else "other"), 2 * quantised.bytes
    weight = named.get("weight")
    if weight is None or len(weight.shape) < 2:
        return None
    if weight.dtype == "U8":
        return ("nvfp4", 2 * weight.bytes) if fine or "weight_scale_2" in named else ("other", weight.bytes)
    if weight.dtype in ("F8_E4M3", "F8_E5M2"):
        return "fp8", weight.bytes
    if weight.dtype in ("BF16", "F16", "F32"):
        # Convolutions of GDN layers (three dimensions) are no linear layers.
        return ("16 bit", weight.bytes // (4 if weight.dtype == "F32" else 2)) if len(weight.shape) == 2 else None
    return "other", weight.bytes


def scheme_of(said: Declared, seen: Seen) -> str:
    """The scheme that an engine meets, in the catalogue's words: the config's, corrected by what the headers show.

    An engine reads the config and then fails on tensors that are not there, so a config that the headers belie is named after the
    headers: that is what the checkpoint is.
    """
    form = seen.form
    if form is None or form == "other":
        return said.scheme
    if form == "16 bit":
        return "bf16"
    if said.scheme == "gptq" and form == "awq":
        return said.scheme  # without g_idx its tensors have AWQ's names
    family = said.method if said.method == "compressed-tensors" else "modelopt" if said.method.startswith("modelopt") else ""
    if form in ("nvfp4", "mixed"):
        return f"{family or 'compressed-tensors'}:{form}"
    if family and form == "fp8":
        return said.scheme if not said.scheme.endswith((":nvfp4", ":mixed")) else "fp8"
    return said.scheme if family else form


def contradictions(name: str, said: Declared, seen: Seen) -> tuple[str, ...]:
    """Where a checkpoint's name, its config and its headers tell different things; a line each. Empty when they agree."""
    if seen.form is None:
        return ()
    called_nvfp4 = re.search(r"nv-?fp4", name, re.IGNORECASE) is not None
    holds_nvfp4 = seen.form == "nvfp4" or bool(seen.modules.get("nvfp4"))
    own = [f"{name} is called NVFP4, but its files hold none: the linear layers are {seen.words()}"]
    return (*(own if called_nvfp4 and not holds_nvfp4 else ()), *belied(said, seen))


def belied(said: Declared, seen: Seen) -> tuple[str, ...]:
    """Where the headers show something else than what the config says, by which an engine goes; a line each."""
    found = []
    form = seen.form
    if form is None:
        return ()
    if said.scheme == "bf16" and form != "16 bit":
        found.append(f"its config names no quantisation, its files show {seen.words()}: an engine would read the weights as noise")
    elif said.scheme.endswith(":mixed") and form not in ("mixed", "nvfp4", "fp8"):
        found.append(f"its config says mixed precision, its files show {seen.words()}")
    elif said.scheme != "bf16" and form not in _forms_of(said.scheme):
        found.append(f"its config says {said.scheme}, its files show {seen.words()}")
    if said.lm_head_left_out and seen.lm_head not in (None, "16 bit"):
        found.append(f"its config leaves lm_head out of the quantisation, its files have it in {seen.lm_head}")
    return tuple(found)


def _forms_of(scheme: str) -> Collection[str]:
    """The forms in which a quantised scheme is stored; of one that is not known here, anything that is quantised."""
    known: Mapping[str, Collection[str]] = {
        "nvfp4": ("nvfp4",),
        "fp8": ("fp8",),
        "float-quantized": ("fp8",),
        "pack-quantized": ("int4",),
        "awq": ("awq",),
        "gptq": ("gptq", "awq"),  # without g_idx its tensors have AWQ's names
    }
    quantised = tuple(form for form in (*FORMS, "mixed") if form != "16 bit")
    return known.get(scheme.rsplit(":", 1)[-1], quantised)
