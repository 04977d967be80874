"""A tiny Qwen3-architecture model with random weights, written byte for byte the same on every machine; no torch needed.

It exists so that a real engine can load a real checkpoint in seconds. Its answers are noise.
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

from laoka.files import write_atomic
from laoka.serving.manifest import MANIFEST, make_manifest

MODEL_ID = "laoka/tiny-qwen3"
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 128, 2, 2, 1, 64, 320
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tensors() -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Qwen3 checkpoint of these dimensions (embeddings tied, so there is no lm_head)."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.input_layernorm.weight": (HIDDEN,),
            f"{at}.post_attention_layernorm.weight": (HIDDEN,),
            f"{at}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{at}.self_attn.q_norm.weight": (HEAD_DIM,),
            f"{at}.self_attn.k_norm.weight": (HEAD_DIM,),
            f"{at}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{at}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{at}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    return found


def safetensors(seed: int = 0) -> bytes:
    """The weights in safetensors form, bfloat16: ones for norms, small random numbers for the rest."""
    source = random.Random(seed)  # noqa: S311 - weights, not secrets
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, shape in sorted(tensors().items()):
        count = 1
        for size in shape:
            count *= size
        start = len(body)
        for index in range(count):
            value = 1.0 if name.endswith("norm.weight") else source.uniform(-0.1, 0.1)
            if name == "model.embed_tokens.weight" and not _sayable(index // HIDDEN):
                value = 0.0  # a token without weight is never the likeliest: the noise is plain letters, and it does not stop
            body += struct.pack("<f", value)[2:]  # bfloat16 is the upper half of a float32
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, len(body)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(body)


def _sayable(token: int) -> bool:
    """Whether a token is a letter, a digit or a blank (as byte-level BPE writes it)."""
    number = token - len(SPECIAL_TOKENS)
    alphabet = byte_alphabet()
    if not 0 <= number < len(alphabet):
        return False
    character = alphabet[number]
    return character == "\u0120" or (character.isascii() and character.isalnum())


def byte_alphabet() -> list[str]:
    """The 256 characters by which byte-level BPE writes bytes: printable ones stand for themselves, others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    return [chr(value) for value in printable] + [chr(0x100 + index) for index in range(256 - len(printable))]


def tokenizer() -> dict[str, object]:
    """A byte-level tokenizer without merges: one token a byte, and ChatML's special tokens."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *byte_alphabet()])}
    added = [
        {"id": vocabulary[token], "content": token, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for token in SPECIAL_TOKENS
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocabulary, "merges": []},
    }  # fmt: skip


def files() -> dict[str, bytes]:
    """Every file of the checkpoint, by name."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": True, "use_cache": True,
        "torch_dtype": "bfloat16", "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None,
    }  # fmt: skip
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "model_max_length": 8192, "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    texts = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": 2, "pad_token_id": 0, "do_sample": False},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": tokenizer_config,
    }
    found = {name: (json.dumps(content, indent=1, sort_keys=True) + "\n").encode() for name, content in texts.items()}
    found["model.safetensors"] = safetensors()
    return found


def write(folder: Path) -> None:
    """Write the checkpoint and its manifest to a folder."""
    for name, content in files().items():
        write_atomic(folder / name, content)
    write_atomic(folder / MANIFEST, make_manifest(folder))
