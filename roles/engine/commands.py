"""The commands that install an engine into a versioned environment: pure text, no I/O."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from laoka.serving.engine_pin import ENGINES as ENGINES_FOLDER
from laoka.serving.engine_pin import EnginePin

ENGINES = str(ENGINES_FOLDER)


def with_env(env: Mapping[str, str], command: str) -> str:
    """A command with variables set for it alone; nothing secret may be among them."""
    pairs = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(env.items()))
    return f"{pairs} {command}" if pairs else command


def install_command(python: str, pin: EnginePin, options: Sequence[tuple[str, str | None]]) -> str:
    """Shell text that installs a pinned engine on the host.

    Arguments: `python` of the host's own laoka; `options` of laoka.serving.engine_install, those without a value are left out.
    """
    words = [python, "-m", "laoka.serving.engine_install", "--pin", pin.to_json()]
    for name, value in options:
        words += [] if value is None else [name, value]
    return " ".join(shlex.quote(word) for word in words)


def packages_for(pin: EnginePin, toolkit: str | None) -> tuple[str, ...]:
    """Packages of the distribution that an engine needs beside its wheels.

    libnuma1: without it the CPU build's vllm._C does not load and the engine dies on `init_cpu_memory_env`. The rest is for
    engines that compile kernels on the host: a compiler, ninja, and Python.h for Triton's launcher.
    """
    base = ("python3-venv", "libnuma1")
    return (*base, "build-essential", "ninja-build", "python3-dev") if toolkit or pin.device == "cuda" else base
