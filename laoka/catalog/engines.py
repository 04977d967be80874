"""Inference engines: what a release needs, which cards and quantisations it serves, and the hash that pins it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from laoka.catalog.load import CatalogError, Row, is_sha256, load

FILE = "engines.toml"
UNVERIFIED = "unverified"

Speculation = Literal["none", "dflash", "dflash2"]


@dataclass(frozen=True, kw_only=True)
class Engine(Row):
    """One release of an engine. `advice` rows name an engine that laoka does not install, as a way out."""

    name: str
    version: str
    kind: Literal["vllm", "advice"] = "vllm"
    base: str | None = None
    """What it is built on."""
    requirements_read: bool = True
    """False: this release's own requirements were not read; its predecessor's are assumed."""
    package: str | None = None
    """Requirement name in the package index; None where the wheel is a release file."""
    wheel_file: str | None = None
    wheel_url: str | None = None
    wheel_sha256: str = UNVERIFIED
    wheel_bytes: int | None = None
    sums_url: str | None = None
    """The release's own SHA256SUMS."""
    python: tuple[str, ...] = ()
    """Python versions that it runs on, "3.12"."""
    glibc_min: str | None = None
    torch: str | None = None
    torch_backend: str | None = None
    """The build of torch in uv's words: cu128, cu130, cpu."""
    cuda_toolkit: str | None = None
    """Toolkit that it still compiles kernels with on the host, "12.8"."""
    device: Literal["cuda", "cpu"] = "cuda"
    driver_min: int | None = None
    """Oldest driver branch for its CUDA."""
    driver_recommended: str | None = None
    driver_validated: tuple[str, ...] = ()
    sm: tuple[int, ...] = ()
    """Compute capabilities that its wheel has code for."""
    quantisations: Mapping[str, int] = field(default_factory=dict)
    """Checkpoint scheme -> lowest compute capability that it is accepted on."""
    methods: tuple[str, ...] = ()
    """The methods that its own check of a config.json knows (vLLM's QUANTIZATION_METHODS); empty: they were not read."""
    quantisation_path: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint scheme -> how it is computed."""
    attention_backend: str | None = None
    """What has to be put on the command line; None leaves it to the engine."""
    speculation: Speculation = "none"
    mtp: bool = False
    kv_cache_dtype: str | None = None
    """What its recipe uses, spelled out; None leaves "auto"."""
    dtype: str | None = None
    tensor_parallel: tuple[int, ...] = ()
    """Degrees that its own release covers; empty: it does not say."""
    bad_tensor_parallel: tuple[int, ...] = ()
    """Degrees on which it is known to answer wrongly."""
    known_bad: str | None = None
    gate: str = ""
    """What its own release gate covers."""
    min_batched_tokens_dflash2: int | None = None
    """Below it the fast DFlash2 path is lost without a word."""
    default_batched_tokens: int = 8192
    nvfp4_bytes_per_weight: float = 0.5625
    """What one NVFP4 weight takes on the card once the engine has repacked it (0.5625 in the file: 4 bits + 1 byte for 16)."""
    score_workspace_mib: int | None = None
    """Attention workspace of a prefill that it allocates outside its own memory profile."""
    kv_overhead: float = 1.0
    """Fitted: how much more a request takes of the KV pool than the arithmetic says (constants in profiles.toml)."""
    pins: tuple[str, ...] = ()
    remove_after_install: tuple[str, ...] = ()
    """Packages that its requirements bring and that break it."""
    dist_info_alias: str | None = None
    """Metadata that has to be added: the command line asks for a distribution of this name."""
    env: Mapping[str, str] = field(default_factory=dict)
    notes: str = ""

    @property
    def pin(self) -> str:
        """The release as a requirement: "1cat-vllm==1.5.1"."""
        return f"{self.name}=={self.version}"


def check(rows: tuple[Engine, ...]) -> tuple[Engine, ...]:
    """What the types alone don't say. Errors: CatalogError."""
    for row in rows:
        if row.id != f"{row.name}-{row.version}":
            raise CatalogError(f"{FILE}: {row.id}: id is not {row.name}-{row.version}")
        if row.wheel_sha256 != UNVERIFIED and not is_sha256(row.wheel_sha256):
            raise CatalogError(f"{FILE}: {row.id}: wheel_sha256 is neither 64 hexadecimal digits nor {UNVERIFIED}")
        if row.kind == "advice":
            continue
        for key in ("python", "torch", "torch_backend", "glibc_min", "wheel_file"):
            if not getattr(row, key):
                raise CatalogError(f"{FILE}: {row.id}: {key} is missing")
        if row.device == "cuda" and not row.sm:
            raise CatalogError(f"{FILE}: {row.id}: sm is missing")
        if row.wheel_sha256 == UNVERIFIED and row.sums_url is None:
            raise CatalogError(f"{FILE}: {row.id}: no hash, and no sums_url to get one from")
        if row.package is None and row.wheel_url is None:
            raise CatalogError(f"{FILE}: {row.id}: neither package nor wheel_url says where it comes from")
    return rows


@cache
def engines() -> tuple[Engine, ...]:
    """Every engine release, in the file's order (newest first for each name). Errors: CatalogError."""
    return check(load(FILE, "engine", Engine))
