"""The tiny model is the same on every machine, and is the revision that the sandbox's inventory pins."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

from laoka.sandbox import tiny_model
from laoka.serving.manifest import MANIFEST, parse_files
from laoka.serving.model_store import verify

ROOT = Path(__file__).resolve().parents[3]


def test_it_is_the_revision_that_the_inventory_pins(tmp_path: Path) -> None:
    tiny_model.write(tmp_path)
    revision = hashlib.sha256((tmp_path / MANIFEST).read_bytes()).hexdigest()
    assert f'"model_revision": "{revision}"' in (ROOT / "inventories" / "sandbox.py").read_text()


def test_its_own_manifest_verifies(tmp_path: Path) -> None:
    tiny_model.write(tmp_path / "new")
    revision = hashlib.sha256((tmp_path / "new" / MANIFEST).read_bytes()).hexdigest()
    folder = (tmp_path / "new").rename(tmp_path / revision)
    assert verify(folder) == {}
    assert {file.path for file in parse_files((folder / MANIFEST).read_text())} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }


def test_weights_are_well_formed_safetensors() -> None:
    data = tiny_model.safetensors()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    end = 0
    for name, shape in sorted(tiny_model.tensors().items()):
        start, stop = header[name]["data_offsets"]
        count = 1
        for length in shape:
            count *= length
        assert (start, stop - start) == (end, 2 * count)  # bfloat16 has two bytes
        end = stop
    assert len(data) == 8 + size + end


def test_byte_alphabet_is_that_of_byte_level_bpe() -> None:
    alphabet = tiny_model.byte_alphabet()
    assert len(set(alphabet)) == 256
    # GPT-2's published table: a blank is U+0120, a line feed U+010A; both are bytes without a printable form
    assert "\u0120" in alphabet and "\u010a" in alphabet and " " not in alphabet
