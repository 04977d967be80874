"""The cards during a run, out of samples of nvidia-smi: clocks, caps, temperatures, ECC, and what of it spoils figures. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from laoka.host.nvidia_smi import Smi, SmiGpu
from laoka.host.unread import Maybe, Unread
from laoka.stack.message import Message, message

# Reasons by nvidia-smi's names (`nvidia-smi --help-query-gpu`, driver 580): the card is slower than it could be, and by what.
THERMAL = ("sw_thermal_slowdown", "hw_thermal_slowdown")
BRAKE = ("hw_power_brake_slowdown", "hw_slowdown")
POWER = ("sw_power_cap",)
CAP_TOLERANCE_W = 1.0


def table(samples: Sequence[Smi]) -> list[dict[str, Any]]:
    """One row for each card: lowest, mean and highest of what moves; the cap; ECC errors that came during the run."""
    rows = []
    for address, seen in _by_card(samples).items():
        last = seen[-1]
        row: dict[str, Any] = {"address": address, "name": _value(last.name), "samples": len(seen)}
        for name in ("sm_clock_mhz", "core_temperature_c", "memory_temperature_c", "power_draw_w", "gpu_utilization_percent"):
            row[name] = _range(getattr(gpu, name) for gpu in seen)
        row["sm_clock_max_mhz"] = _value(last.sm_clock_max_mhz)
        row["power_limit_w"], row["power_limit_default_w"] = _value(last.power_limit_w), _value(last.power_limit_default_w)
        row["slowdown_reasons"] = sorted({reason for gpu in seen for reason in _reasons(gpu)} - {"gpu_idle", "none"})
        row["ecc_enabled"] = _value(last.ecc_enabled)
        for name in ("volatile_corrected", "volatile_uncorrected"):
            row[f"ecc_{name.removeprefix('volatile_')}_during"] = _grown(getattr(gpu.ecc, name) for gpu in seen)
        rows.append(row)
    return rows


def banners(samples: Sequence[Smi]) -> list[Message]:
    """What of the cards' state has to be said beside the figures, the worst first."""
    found = []
    for address, seen in _by_card(samples).items():
        reasons = {reason for gpu in seen for reason in _reasons(gpu)}
        if hot := sorted(reasons.intersection(THERMAL)):
            highest = _range(gpu.core_temperature_c for gpu in seen)
            found.append(
                message("bench.throttled", card=address, reasons=", ".join(hot), temperature_c=highest["high"] if highest else "?")
            )
        if brake := sorted(reasons.intersection(BRAKE)):
            found.append(message("bench.braked", card=address, reasons=", ".join(brake)))
        limit_w, default_w = _value(seen[-1].power_limit_w), _value(seen[-1].power_limit_default_w)
        if limit_w is not None and default_w is not None and limit_w < default_w - CAP_TOLERANCE_W:
            found.append(message("bench.capped", card=address, limit_w=f"{limit_w:.0f}", default_w=f"{default_w:.0f}"))
        elif reasons.intersection(POWER):
            found.append(message("bench.at_power_limit", card=address, limit_w="?" if limit_w is None else f"{limit_w:.0f}"))
        grown = _grown(gpu.ecc.volatile_uncorrected for gpu in seen)
        if grown:
            found.append(message("bench.ecc", card=address, count=grown))
    counts = {len([gpu for gpu in smi.gpus if gpu.address]) for smi in samples}
    if len(counts) > 1:
        found.append(message("bench.card_lost", most=max(counts), least=min(counts)))
    return found


def _by_card(samples: Sequence[Smi]) -> dict[str, list[SmiGpu]]:
    found: dict[str, list[SmiGpu]] = {}
    for smi in samples:
        for gpu in smi.gpus:
            if gpu.address:
                found.setdefault(gpu.address, []).append(gpu)
    return found


def _reasons(gpu: SmiGpu) -> tuple[str, ...]:
    return () if isinstance(gpu.throttle_reasons, Unread) else gpu.throttle_reasons


def _value(value: Maybe[Any]) -> Any:
    return None if isinstance(value, Unread) else value


def _range(values: Iterable[Maybe[float]]) -> dict[str, float] | None:
    read = [value for value in values if not isinstance(value, Unread)]
    return {"low": min(read), "mean": round(sum(read) / len(read), 1), "high": max(read)} if read else None


def _grown(values: Iterable[Maybe[int]]) -> int | None:
    read = [value for value in values if not isinstance(value, Unread)]
    return read[-1] - read[0] if read else None
