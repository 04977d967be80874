"""Stand-ins for engine wheels: the name, the tags and the modules of 1Cat-vLLM, without its code; libraries made by gcc."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from laoka.serving.engine_pin import STAMP, EnginePin
from laoka.serving.kernels import DRAFTER_ARCHITECTURE, VERIFIER_NAME, VERIFIER_SYMBOL
from laoka.serving.manifest import sha256_of

VERSION = "1.5.1"


@cache
def python_312() -> tuple[str, str, str]:
    """(Python to make environments with, its version, its tag): CPython 3.12, which 1Cat-vLLM wants, where this machine has it.

    Elsewhere the Python that runs the tests stands for it; the wheel is then tagged for that one.
    """
    places = [Path("/usr/bin/python3.12"), Path("/usr/local/bin/python3.12"), *Path.home().glob(".pyenv/versions/3.12*/bin/python")]
    for place in places:
        if place.exists():
            return str(place), "3.12", "cp312-cp312"
    own = f"{sys.version_info.major}{sys.version_info.minor}"
    return sys.executable, f"{sys.version_info.major}.{sys.version_info.minor}", f"cp{own}-cp{own}"


@cache
def library(source: str) -> bytes:
    """A shared library of a C text, as a compiler with -O2 makes it. gcc is needed: apt-get install gcc libc6-dev."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made.so"
        argv = ["gcc", "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(made)]
        done = subprocess.run(argv, input=source.encode(), capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr.decode()
        return made.read_bytes()


def attention(width: int | None) -> bytes:
    """The attention library of a build whose verifier takes `width` query tokens; None: of the time before it said so."""
    if width is None:
        return library("int something_else(void) { return 3; }")
    return library(f"int {VERIFIER_SYMBOL}(void) {{ return {width}; }}")


def files_of_1cat(width: int | None = 16) -> dict[str, bytes]:
    """The modules of a 1Cat-vLLM wheel, by the names that its own check script and revolta 0.1.4 have."""
    plain = library('const char *words = "nothing";')
    ops = library('const char *words[] = {"nvfp4_sm70_prepare", "nvfp4_gemm_sm70_out"};')
    suffix = "cpython-312-x86_64-linux-gnu.so"
    main = "import sys\n\n\ndef main():\n    print('1.5.1' if '--version' in sys.argv else 'serves nothing')\n"
    return {
        "vllm/__init__.py": b"",
        "vllm/entrypoints/__init__.py": b"",
        "vllm/entrypoints/cli/__init__.py": b"",
        "vllm/entrypoints/cli/main.py": main.encode(),
        "vllm/model_executor/models/registry.py": f'MODELS = {{"{DRAFTER_ARCHITECTURE}": ("qwen3_dflash2", "X")}}\n'.encode(),
        "vllm/model_executor/models/qwen3_dflash2.py": b"",
        "vllm/_C.abi3.so": ops,
        "vllm/_C_stable_libtorch.abi3.so": plain,
        "vllm/_moe_C.abi3.so": plain,
        "vllm/_sm70_sampler_C.abi3.so": plain,
        "flash_attn_v100/__init__.py": f"def {VERIFIER_NAME}():\n    return {width or 8}\n".encode(),
        f"flash_attn_v100/flash_attn_v100_cuda.{suffix}": attention(width),
        f"flash_attn_v100/paged_kv_utils.{suffix}": plain,
        "flash_qla/ops/gated_delta_rule/chunk/sm70/flash_qla_sm70_gdn_strided.so": plain,
    }


# A module that Python can import, without Python's headers: PyModuleDef by hand (its layout is the stable ABI's).
MODULE = """
typedef struct { long count; void *type; void *init; long index; void *copy; const char *name; const char *doc; long size;
                 void *methods; void *slots; void *traverse; void *clear; void *release; } Def;
extern void *PyModule_Create2(Def *, int);
static Def def = {1, 0, 0, 0, 0, "stand_in", 0, -1};
void *PyInit_%s(void) { return PyModule_Create2(&def, 1013); }
"""


def live_environment(
    folder: Path, pin: EnginePin, *, width: int = 16, says: int | None = None, capability: tuple[int, int] = (7, 0)
) -> Path:
    """An environment whose modules can be imported as those of 1Cat-vLLM can, and say what a card would; nothing in it computes.

    Arguments: `width` of the verifier in the library; `says` what its Python function returns, None: the same.
    """
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python3*/site-packages")
    files = {path: data for path, data in files_of_1cat(width).items() if ".cpython-" not in path}
    ops = 'const char *words[] = {"nvfp4_sm70_prepare", "nvfp4_gemm_sm70_out"};'
    registry = "class ModelRegistry:\n    @staticmethod\n    def get_supported_archs():\n        return ['%s']\n"
    torch = (
        "class cuda:\n    @staticmethod\n    def get_device_capability(index):\n        return %r\n"
        "class ops:\n    class _C:\n        nvfp4_sm70_prepare = nvfp4_gemm_sm70_out = print\n"
    )
    files |= {
        "torch/__init__.py": (torch % (capability,)).encode(),
        "vllm/__init__.py": (registry % DRAFTER_ARCHITECTURE).encode(),
        "vllm/model_executor/__init__.py": b"",
        "vllm/model_executor/models/__init__.py": b"",
        "vllm/_C.abi3.so": library(ops + MODULE % "_C"),
        "flash_attn_v100/__init__.py": f"def {VERIFIER_NAME}():\n    return {says or width}\n".encode(),
        "flash_attn_v100/flash_attn_v100_cuda.abi3.so": library(
            f"int {VERIFIER_SYMBOL}(void) {{ return {width}; }}" + MODULE % "flash_attn_v100_cuda"
        ),
        "flash_attn_v100/paged_kv_utils.abi3.so": library(MODULE % "paged_kv_utils"),
    }
    for path, data in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)
    (folder / STAMP).write_text(f"{pin.stamp}\n")
    return folder


def write_wheel(
    folder: Path,
    distribution: str,
    version: str,
    tag: str,
    files: Mapping[str, bytes],
    requires: Iterable[str] = (),
    script: str = "",
) -> Path:
    """A wheel that pip and uv install."""
    name = distribution.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    content = {
        **files,
        f"{info}/METADATA": (metadata + "".join(f"Requires-Dist: {line}\n" for line in requires)).encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: laoka-tests\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
    }
    if script:
        content[f"{info}/entry_points.txt"] = f"[console_scripts]\n{script}\n".encode()
    rows = []
    for path, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(data)}")
    content[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]).encode()
    target = folder / f"{name}-{version}-{tag}.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for path, data in content.items():
            archive.writestr(path, data)
    return target


def stand_in_1cat(folder: Path, width: int | None = 16, without: Iterable[str] = ()) -> Path:
    """A wheel that stands for 1cat_vllm 1.5.1: same name, tags and modules."""
    files = {path: data for path, data in files_of_1cat(width).items() if path not in set(without)}
    tag = f"{python_312()[2]}-linux_x86_64"
    return write_wheel(folder, "1cat-vllm", VERSION, tag, files, ["torch==2.10.0"], "vllm = vllm.entrypoints.cli.main:main")


def stand_in_torch(folder: Path) -> Path:
    """A wheel that stands for torch 2.10.0: nothing but its name."""
    return write_wheel(folder, "torch", "2.10.0", "py3-none-any", {"torch/__init__.py": b""})


def pin_of(wheel: Path, **change: object) -> EnginePin:
    """A pin of a stand-in, as the catalogue has it for 1Cat-vLLM 1.5.1."""
    values: dict[str, object] = {
        "name": "1cat-vllm", "version": VERSION, "wheel_file": wheel.name, "wheel_sha256": sha256_of(wheel),
        "python": (python_312()[1],), "glibc_min": "2.28", "torch": "2.10.0", "torch_backend": "cu128", "kernels": "sm70",
    }  # fmt: skip
    return EnginePin(**{**values, **change})  # type: ignore[arg-type]
