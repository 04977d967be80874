"""What goes into qwen-serve's unit and files, as values: keys by systemd's version, device groups, flags, instances. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

# From which version on systemd knows a key (its NEWS). An older one ignores it, but says so at every reload, and
# `systemd-analyze verify` finds fault with it.
SINCE: Mapping[str, int] = {
    "LoadCredential": 247,
    "ProtectProc": 247,
    "RestartSteps": 254,
    "RestartMaxDelaySec": 254,
}
OLDEST = 249
"""Ubuntu 22.04's."""

# Groups of /proc/devices (seen on a host with driver 580.159; nvidia-frontend is the name in branches up to 535).
NVIDIA_GROUPS = ("char-nvidia", "char-nvidia-frontend", "char-nvidiactl", "char-nvidia-uvm", "char-nvidia-caps")

NOT_FLAGS: Mapping[str, str] = {
    "host": "the engine listens on loopback only, as its key does not guard all of its paths; gateway_listen is for clients",
    "uds": "the engine listens on loopback, where the guard asks it",
    "port": "set serve_port, or an instance's port",
    "model": "the model comes from the lock file (laoka lock)",
    "served-model-name": "set served_model_name",
    "config": "laoka writes that file itself",
    "api-key": "set serve_api_key_file: everybody on the host can read the flags",
}
"""Flags that are laoka's own, with what to do instead."""
NOT_ENV: Mapping[str, str] = {
    "VLLM_API_KEY": "set serve_api_key_file: everybody on the host can read the environment's file",
    "VLLM_SERVER_DEV_MODE": "it opens paths that pause the engine to whoever asks",
}
NOT_INSTANCES = ("main", "env", "api-key")
"""Names that a file of the only server has, or its socket."""


def checked_flags(flags: Mapping[str, object]) -> None:
    """Errors: ValueError for a flag that is laoka's own, or no flag at all."""
    for key in flags:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", key):
            raise ValueError(f"{key!r} is no flag: write it without the dashes before it, such as max-model-len")
        reason = NOT_FLAGS.get(key.replace("_", "-").lower())
        if reason:
            raise ValueError(f"{key} is not for you to set: {reason}")


def checked_env(env: Mapping[str, str]) -> None:
    """Errors: ValueError for a variable that is laoka's own, or can't be one of a systemd unit."""
    for key, value in env.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", key):
            raise ValueError(f"{key!r} is no name of a variable")
        if any(character in value for character in "\n\r\0"):
            raise ValueError(f"{key}: its value has more than one line")
        if key in NOT_ENV:
            raise ValueError(f"{key} is not for you to set: {NOT_ENV[key]}")


INSTANCE_NAME = r"^[a-z0-9][a-z0-9-]{0,19}$"

DEFAULT_FLAGS: Mapping[str, Any] = {
    # Probes every few seconds would fill the journal.
    "disable-access-log-for-endpoints": "/health,/metrics,/ping,/v1/models",
}

DEFAULT_ENV: Mapping[str, str] = {
    # Tells a stuck worker in two minutes; the default of 300 s leaves clients hanging. The engine then exits and restarts.
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "120",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}


def systemd_version(text: str) -> int:
    """The version in `systemctl --version`; OLDEST when it can't be read, which emits only what every version knows."""
    match = re.match(r"systemd (\d+)", text.strip())
    return int(match[1]) if match else OLDEST


def known_keys(keys: Mapping[str, str], version: int) -> dict[str, str]:
    """Those of `keys` that this version of systemd knows."""
    return {key: value for key, value in keys.items() if version >= SINCE.get(key, 0)}


def restart_keys(version: int) -> dict[str, str]:
    """How long systemd waits before it starts the engine again: growing to five minutes where it can, ten seconds where not."""
    if version < SINCE["RestartSteps"]:
        return {"RestartSec": "10s"}
    return known_keys({"RestartSec": "5s", "RestartSteps": "6", "RestartMaxDelaySec": "5min"}, version)


def start_limit_keys() -> dict[str, str]:
    """No limit on starts: a unit that gave up would stay down when what it waited for (a disk, a card) is back."""
    return {"StartLimitIntervalSec": "0"}


def visible_devices(all_bdfs: Sequence[str], uuids: Mapping[str, str], wanted: Sequence[str]) -> str:
    """CUDA_VISIBLE_DEVICES for some of a host's cards.

    Arguments: `all_bdfs` of every card of the host; `uuids` by bdf where known; `wanted` bdfs.
    A UUID stays right when a card before it vanishes; without UUIDs it is the place in PCI order (CUDA_DEVICE_ORDER=PCI_BUS_ID).
    Errors: ValueError for a card that the host does not have.
    """
    ordered = sorted(all_bdfs)
    for bdf in wanted:
        if bdf not in ordered:
            raise ValueError(f"{bdf} is not in expected_gpus")
    if all(uuids.get(bdf) for bdf in wanted):
        return ",".join(uuids[bdf] for bdf in wanted)
    return ",".join(str(ordered.index(bdf)) for bdf in wanted)


def flags_of(
    locked: Mapping[str, Any], own: Mapping[str, Any], *, shutdown_s: int, max_tokens: int | None = None
) -> dict[str, Any]:
    """Flags of `vllm serve`: laoka's defaults, under the lock's, under the inventory's.

    Arguments: `max_tokens` is the most that one answer may have, also for a request that names no number.
    """
    ceiling = {} if max_tokens is None else {"override-generation-config": json.dumps({"max_new_tokens": max_tokens})}
    return {**DEFAULT_FLAGS, "shutdown-timeout": shutdown_s, **ceiling, **locked, **own}


def longest_silence_s(flags: Mapping[str, Any]) -> int:
    """How long a healthy engine may go without a sign of life: three steps of prefill at the slowest speed that is still one.

    A step is max-num-batched-tokens (8192 unless said), or the whole context where chunked prefill is off. 300 tokens/s is
    about a fifth of the slowest published prefill of V100s (1602, laoka/catalog/profiles.toml); at least 30 s.
    """
    whole = flags.get("enable-chunked-prefill") is False or flags.get("no-enable-chunked-prefill") is True
    tokens = flags.get("max-model-len" if whole else "max-num-batched-tokens")
    return max(30, 3 * tokens_of(tokens, 8192) // 300)


def tokens_of(value: object, default: int) -> int:
    """A count as vLLM takes it: 4096, "4096", "8k" (8000), "8K" (8192); `default` for anything else ("auto")."""
    match = re.fullmatch(r"(\d+)([kKmM]?)", str(value).strip())
    if not match:
        return default
    return int(match[1]) * {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}[match[2]]
