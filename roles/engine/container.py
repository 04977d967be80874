"""The engine in a container: the values that the lock's pin puts into Containerfile, quadlet and `docker run`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from laoka.serving.engine_install import constraints_of
from laoka.serving.engine_pin import EnginePin
from laoka.serving.model_store import STORE

PORT, NAME, DEADLINE_S = 8000, "qwen", 1200


def container_values(pin: EnginePin, stack: Mapping[str, Any], data: Mapping[str, Any], base: str, python: str) -> dict[str, Any]:
    """What the templates of the container are filled with.

    Arguments: `stack` is the locked or resolved stack; `data` the host's in the inventory; `base` the image to build on; `python`
    that of the host's own laoka, which asks for the completion that makes the unit ready.
    """
    version = pin.python[0] if len(pin.python) == 1 else "3.12"
    return {
        "base": base,
        "image": f"localhost/laoka/{pin.name}:{pin.version}",
        "pin": pin.pin,
        "distribution": pin.wheel_file.split("-", 1)[0].replace("_", "-"),
        "wheel_file": pin.wheel_file,
        "wheel_sha256": pin.wheel_sha256,
        "wheel_url": pin.wheel_url or "",
        "package": pin.package or "",
        "python_version": version,
        "constraints": constraints_of(pin),
        "store": str(STORE),
        "python": python,
        "port": data.get("serve_port", PORT),
        "served_model_name": data.get("served_model_name", NAME),
        "start_deadline_s": data.get("serve_start_deadline_s") or DEADLINE_S,
        "shm_size": "16g",
        "tensor_parallel": stack.get("tensor_parallel", 1),
    }
