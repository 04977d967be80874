"""What `laoka bench run --baseline -o FILE` found fastest on a host, read for speculative = "measure". Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from laoka.serving.bench.baseline import DECIDED, TARGET_ONLY
from laoka.serving.speculative import Method

METHODS: dict[str, Method] = {"dflash": "dflash2", "mtp": "mtp"}
"""Methods of the engine's command line, as inventories call them."""

UNDECIDED = {
    "baseline_no_variant": "the host was measured without speculation only, so nothing was compared",
    "baseline_not_measured": "a way's decode speed could not be measured",
    "baseline_noise_unknown": "a way was faster, but by one repeat, whose noise is not known (--repeats 3)",
}
"""Why a file of laoka bench chose nothing, by its reason."""


@dataclass(frozen=True)
class Measured:
    """The way of speculation that was chosen by measurement, and how that is told; `method` None: the file says nothing usable."""

    method: Method | None
    told: str


def measured_in(text: str, engine_version: str) -> Measured:
    """What a file of `laoka bench run --baseline` chose.

    Arguments: `engine_version` of the host's engine now: a choice that was measured with another one does not count.
    """
    try:
        content = json.loads(text)
        if content["laoka_baseline"] != 1:
            raise ValueError("another format")
        choice, results = content["choice"], content["results"]
        variant, reason = str(choice["variant"]), str(choice["reason"])
        source = results[variant]["provenance"]
        seen = str(source["engine_version"])
        method = _method(variant, content["variants"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return Measured(None, f"not a file of `laoka bench run --baseline -o`: {type(error).__name__} {str(error)[:60]}")
    if reason not in DECIDED:
        return Measured(None, f"{UNDECIDED.get(reason, reason)}: measure again")
    if seen.split("+")[0] != engine_version.split("+")[0]:
        return Measured(None, f"measured with engine {seen}, the host has {engine_version}: measure again")
    if method is None:
        return Measured(None, f"{variant} was fastest, which laoka sets up by serve_flags only")
    ratio = choice.get("decode_ratio")
    gain = f", decode {ratio:.2f}x of the target alone" if isinstance(ratio, float) and method != "none" else ""
    made_up = " (a simulated card: the figures mean nothing)" if source.get("simulated") else ""
    return Measured(method, f"{variant} chosen by laoka bench{gain}, on {source.get('host') or '?'} with engine {seen}{made_up}")


def _method(variant: str, variants: dict[str, Any]) -> Method | None:
    if variant == TARGET_ONLY:
        return "none"
    config = variants[variant]
    return METHODS.get(str((json.loads(config) if isinstance(config, str) else config)["method"]))
