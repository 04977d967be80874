"""Proof that an engine has the kernels for DFlash2: from its files alone (a wheel or a site-packages folder), or by importing them.

There is no package called dflash2: for sm_70 the kernels are inside 1Cat-vLLM and ReVolta, and the drafter's architecture is in the
engine's registry. Sources: 1Cat-vLLM's own check script (release 1.5.1) and the files of revolta 0.1.4.
"""

from __future__ import annotations

import fnmatch
import io
import json
import re
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal, Protocol

from laoka.process import run
from laoka.serving.elf import NotElf, constant_of, glibc_needed

Kind = Literal["sm70", "upstream", "none"]

VERIFIER_WIDTH = 16
"""Query tokens of the grouped verifier in a build that has DFlash2's kernels; older builds verify 8."""
LEGACY_WIDTH = 8
VERIFIER_SYMBOL = "_Z47flash_attention_grouped_verify_max_query_tokensv"
VERIFIER_NAME = "flash_attn_grouped_verify_max_query_tokens"
DRAFTER_ARCHITECTURE = "DFlash2DraftModel"
REGISTRY = "vllm/model_executor/models/registry.py"
UPSTREAM_FIRST = (0, 28)
"""The first upstream release with DFlash2 (vllm PR #52816; absent in 0.27.1)."""
ATTENTION = "flash_attn_v100/flash_attn_v100_cuda*.so"
C_EXTENSION = "vllm/_C.abi3.so"
NVFP4_OPS = (b"nvfp4_sm70_prepare", b"nvfp4_gemm_sm70_out")
# Paths with globs: the middle of an extension's name is the interpreter's.
SM70_FILES = (
    "flash_attn_v100/__init__.py",
    ATTENTION,
    "flash_attn_v100/paged_kv_utils*.so",
    "flash_qla/ops/gated_delta_rule/chunk/sm70/flash_qla_sm70_gdn_strided*.so",
    C_EXTENSION,
    "vllm/_C_stable_libtorch*.so",
    "vllm/_moe_C*.so",
    "vllm/_sm70_sampler_C*.so",
    "vllm/model_executor/models/qwen3_dflash2.py",
    REGISTRY,
)
SEPARATE = "flash-attn-v100"
"""The distribution, in its normal spelling, that brings a module of the bundled one's name without DFlash2's kernels."""
MAX_SOURCE_BYTES = 4 * 1024**2
LIVE_DEADLINE_S = 300


class Tree(Protocol):
    """The files of an engine: a wheel, or the folder that it was installed to."""

    def names(self) -> Sequence[str]:
        """Every file's path."""

    def open(self, name: str) -> IO[bytes]:
        """A file that can be sought in."""


@dataclass(frozen=True)
class Folder:
    """A site-packages folder."""

    root: Path

    def names(self) -> Sequence[str]:
        """The files that matter: those of the engine's own packages, and what other distributions are there."""
        own = [path for top in ("vllm", "flash_attn_v100", "flash_qla") for path in (self.root / top).rglob("*") if path.is_file()]
        return [str(path.relative_to(self.root)) for path in [*own, *self.root.glob("*.dist-info/METADATA")]]

    def open(self, name: str) -> IO[bytes]:
        return (self.root / name).open("rb")


@dataclass(frozen=True)
class Wheel:
    """A wheel that is not installed yet."""

    path: Path

    def names(self) -> Sequence[str]:
        with zipfile.ZipFile(self.path) as archive:
            return archive.namelist()

    def open(self, name: str) -> IO[bytes]:
        with zipfile.ZipFile(self.path) as archive:
            return io.BytesIO(archive.read(name))


@dataclass(frozen=True)
class Proof:
    """What an engine's files show. `faults` is empty when it has what it should; each is one line for people."""

    kind: Kind
    version: str
    verifier_width: int | None
    drafter_registered: bool
    glibc_needed: str | None
    faults: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the kernels are proven."""
        return not self.faults

    def table(self) -> dict[str, object]:
        """For a record in JSON."""
        return asdict(self) | {"ok": self.ok}


def prove(tree: Tree, kind: Kind, version: str) -> Proof:
    """Prove from files alone, without importing anything.

    Arguments: `kind` what the engine should have: "sm70" 1Cat-vLLM and ReVolta, "upstream" vLLM for sm_75 and later, "none"
    nothing; `version` the engine's own. Errors: OSError, zipfile.BadZipFile for a tree that can't be read at all.
    """
    names = tree.names()
    if kind == "none":
        return Proof(kind, version, None, False, None, ())
    faults: list[str] = []
    registered = _has(tree, names, REGISTRY, DRAFTER_ARCHITECTURE.encode())
    if not registered:
        faults.append(f"{DRAFTER_ARCHITECTURE} is not in {REGISTRY}: this build does not know DFlash2's drafter")
    if kind == "upstream":
        if _release(version) < UPSTREAM_FIRST:
            faults.append(f"vLLM {version} is older than {'.'.join(map(str, UPSTREAM_FIRST))}, the first one with DFlash2")
        return Proof(kind, version, None, registered, None, tuple(faults))
    faults += [f"{pattern} is missing" for pattern in SM70_FILES if not fnmatch.filter(names, pattern)]
    if not _has(tree, names, "flash_attn_v100/__init__.py", VERIFIER_NAME.encode()):
        faults.append(f"flash_attn_v100 has no {VERIFIER_NAME}: no DFlash2 kernels in this build")
    absent = [word.decode() for word in NVFP4_OPS if not _has(tree, names, C_EXTENSION, word, MAX_LIBRARY_BYTES)]
    if absent:
        faults.append(f"{C_EXTENSION} has no {', '.join(absent)}: NVFP4 would not run on sm_70")
    width, told = _verifier_width(tree, names)
    if told:
        faults.append(told)
    elif width != VERIFIER_WIDTH:
        faults.append(
            f"the verifier takes {width} query tokens, DFlash2 needs {VERIFIER_WIDTH}: the attention kernels are of an older build"
        )
    faults += separate_distributions(names)
    glibc, broken = _glibc(tree, names)
    return Proof(kind, version, width, registered, glibc, (*faults, *broken))


MAX_LIBRARY_BYTES = 1024**3


def separate_distributions(names: Sequence[str]) -> list[str]:
    """Faults for distributions that overwrite the bundled flash_attn_v100."""
    found = []
    for name in names:
        parts = re.fullmatch(r"([^/]+)-([^-/]+)\.dist-info/METADATA", name)
        if parts and re.sub(r"[-_.]+", "-", parts[1]).lower() == SEPARATE:
            found.append(f"a separate {parts[1]} {parts[2]} overwrites the engine's own module: pip uninstall {parts[1]}")
    return found


def _has(tree: Tree, names: Sequence[str], name: str, word: bytes, limit: int = MAX_SOURCE_BYTES) -> bool:
    if name not in names:
        return False
    with tree.open(name) as stream:
        tail = b""
        while piece := stream.read(min(limit, 1024**2)):
            if word in tail + piece:
                return True
            tail = piece[-len(word) :]
    return False


def _verifier_width(tree: Tree, names: Sequence[str]) -> tuple[int | None, str | None]:
    """(query tokens of the verifier, what went wrong). A library without the function is of the time before it: 8."""
    for name in fnmatch.filter(names, ATTENTION):
        try:
            with tree.open(name) as stream:
                width = constant_of(stream, VERIFIER_SYMBOL)
        except (NotElf, ValueError) as error:
            return None, f"{name}: {error}"
        return (LEGACY_WIDTH if width is None else width), None
    return None, None


def _glibc(tree: Tree, names: Sequence[str]) -> tuple[str | None, list[str]]:
    """(newest glibc that a library of it asks for, libraries that can't be read)."""
    found: list[tuple[int, int]] = []
    broken = []
    for name in fnmatch.filter(names, "*.so"):
        try:
            with tree.open(name) as stream:
                needed = glibc_needed(stream)
        except NotElf as error:
            broken.append(f"{name}: {error}")
            continue
        if needed is not None:
            found.append(needed)
    return (".".join(map(str, max(found))) if found else None), broken


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:2])


# ---- live ---------------------------------------------------------------------------------------------------------------

# Run by the engine's own Python on a host with its GPU. The value is a function in revolta 0.1.4, and may be a number.
LIVE = f"""
import importlib.util, json
import torch, vllm
import vllm._C
from flash_attn_v100 import flash_attn_v100_cuda, paged_kv_utils, {VERIFIER_NAME} as width
print(json.dumps({{
    "capability": list(torch.cuda.get_device_capability(0)),
    "verifier_width": int(width() if callable(width) else width),
    "drafter_model": importlib.util.find_spec("vllm.model_executor.models.qwen3_dflash2") is not None,
    "drafter_registered": "{DRAFTER_ARCHITECTURE}" in vllm.ModelRegistry.get_supported_archs(),
    "nvfp4_ops": all(hasattr(torch.ops._C, name) for name in {[word.decode() for word in NVFP4_OPS]!r}),
}}))
"""
LIVE_UPSTREAM = f"""
import json
import torch, vllm
print(json.dumps({{
    "capability": list(torch.cuda.get_device_capability(0)),
    "drafter_registered": "{DRAFTER_ARCHITECTURE}" in vllm.ModelRegistry.get_supported_archs(),
}}))
"""


def prove_live(python: Path, kind: Kind) -> tuple[dict[str, object] | None, tuple[str, ...]]:
    """Prove by importing, with the engine's own Python and the card: (what it said, faults)."""
    if kind == "none":
        return None, ()
    script = LIVE if kind == "sm70" else LIVE_UPSTREAM
    # Away from any checkout of the engine's sources: Python would import those, without their extensions.
    done = run([str(python), "-I", "-c", script], deadline_s=LIVE_DEADLINE_S, cwd="/", env={"PYTHONNOUSERSITE": "1"})
    if not done.ok:
        return None, (f"the kernels can't be imported: {done.last_line()}",)
    return judge_live(done.stdout, kind)


def judge_live(text: str, kind: Kind) -> tuple[dict[str, object] | None, tuple[str, ...]]:
    """(what the live check printed, faults). Pure."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    try:
        told = json.loads(lines[-1])
    except (IndexError, ValueError):
        return None, ("the live check printed nothing that can be read",)
    faults = []
    if not told.get("drafter_registered"):
        faults.append(f"{DRAFTER_ARCHITECTURE} is not in the model registry")
    if kind == "sm70":
        if told.get("capability") != [7, 0]:
            faults.append(f"the first card has compute capability {told.get('capability')}, these kernels are for 7.0")
        if told.get("verifier_width") != VERIFIER_WIDTH:
            faults.append(f"the verifier takes {told.get('verifier_width')} query tokens, DFlash2 needs {VERIFIER_WIDTH}")
        faults += [f"{name} is missing" for name in ("drafter_model", "nvfp4_ops") if not told.get(name)]
    return told, tuple(faults)
