"""What speculative decoding a host is planned to have, from its inventory data and its resolved or locked stack. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from laoka.serving.engine_pin import EnginePin
from laoka.serving.speculative import NOT_MEASURED, Method, Plan, Wanted
from laoka.stack.resolve import MTP_TOKENS
from roles.dflash2.measured import measured_in

FLAG = "speculative-config"
MTP = {"method": "mtp", "num_speculative_tokens": MTP_TOKENS}
HUBS = ("hf", "hf-mirror", "modelscope")


def plan_of(
    wanted: Wanted,
    pin: EnginePin | None,
    stack: Mapping[str, Any] | None,
    data: Mapping[str, Any],
    *,
    target: str,
    sources: Sequence[str],
    pins: Mapping[str, str] | None = None,
    measured: str | None = None,
) -> Plan:
    """The plan of one host.

    Arguments: `pin` of its engine, None for a host that was refused; `stack` as a table, None for a model that the catalogue does
    not have; `data` the host's in the inventory; `target` the folder of the model's revision; `sources` of the drafter, and `pins`
    its SHA-256s by path, besides what the stack has; `measured` the content of the file that `laoka bench run --baseline` wrote.
    """
    engine, stamp, kernels = (pin.pin, pin.stamp, pin.kernels) if pin is not None else ("?", "", "none")
    own = _own(data)
    found = measured_in(measured, pin.version) if measured is not None and pin is not None and wanted == "measure" else None
    measurement = (found.told if found is not None else NOT_MEASURED) if wanted == "measure" else None

    def plan(method: Method, reason: str, **rest: Any) -> Plan:
        return Plan(wanted, method, reason, engine, stamp, kernels, target, measurement=measurement, **rest)

    if own is not None:
        return plan("none", "--speculative-config is set there", configs={"own": own}, own=True)
    if wanted == "none":
        return plan("none", "speculative = none in the inventory")
    if pin is None or pin.device == "cpu":
        return plan("none", f"the engine is {engine}, and DFlash2's kernels run on a GPU only")
    if data.get("engine_route") == "container":
        return plan(
            "none", "the engine is in a container, which laoka renders and does not start: its kernels can't be proven here"
        )
    if not data.get("expected_gpus"):
        return plan("none", "no GPU is listed in expected_gpus")
    if data.get("serve_instances"):
        why = "the memory plan is for one server, and this host has several (serve_instances): give each its own speculative-config"
        return plan("none", why)
    if stack is None:
        return plan("none", "the catalogue does not have this model, so no drafter and no memory plan is known for it")
    method: Method = stack.get("speculative", "none")
    fallback: Method = stack.get("speculative_fallback", "none")
    reason = str(stack.get("speculative_reason", "the lock says no more: laoka lock again"))
    if wanted in ("dflash2", "mtp") and wanted != method:
        if wanted == fallback:
            method, fallback, reason = wanted, "none", f"speculative = {wanted} is wished for"
        else:
            return plan("none", f"the lock has {method} for this host ({reason}): laoka lock again")
    if found is not None and found.method is not None and found.method != method:
        # What was measured and does not fit was measured with other settings: the memory plan stays.
        if found.method in ("none", fallback):
            method, fallback, reason = found.method, "none", f"measured: {found.told}"
        else:
            measurement = f"{found.told}; not used: {reason}"
    if method == "none":
        return plan("none", reason)
    configs: dict[str, Mapping[str, Any]] = {"mtp": MTP} if "mtp" in (method, fallback) else {}
    if method == "mtp":
        return plan("mtp", reason, configs=configs)
    configs["dflash2"] = json.loads(stack.get("serve_flags", {}).get(FLAG, "{}"))
    locked = {"*.safetensors": str(stack["drafter_sha256"])} if stack.get("drafter_sha256") else {}
    drafter = {
        "repo": stack.get("drafter_repo"), "revision": stack.get("drafter_revision"),
        "sources": list(sources), "pins": {**locked, **(pins or {})},
    }  # fmt: skip
    return plan("dflash2", reason, fallback=fallback, drafter=drafter, configs=configs)


def _own(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The --speculative-config that the inventory brings itself; `laoka.fleet.requests` has judged its form."""
    told = (data.get("serve_flags") or {}).get(FLAG)
    if told is None:
        return None
    content = told if isinstance(told, Mapping) else json.loads(str(told))
    return dict(content)


def hubs_of(sources: Sequence[str]) -> tuple[str, ...]:
    """Those of a model's sources that have the drafter too: other hosts' stores and hubs, not a folder of that model alone."""
    kept = [source for source in sources if source.startswith("host:") or source.split(":")[0].split("+")[0] in HUBS]
    # A hub's own name of the model is not the drafter's.
    plain = [source if source.startswith(("host:", "hf+", "modelscope+")) else source.split(":")[0] for source in kept]
    return tuple(dict.fromkeys(word.split("#")[0] for word in plain))
