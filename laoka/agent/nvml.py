"""The NVML sensor: temperatures, power limit, retired pages and lost cards, asked by a child that has a deadline
(laoka.agent.nvml_probe).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laoka.agent.config import Config, ExpectedGpu
from laoka.agent.signals import Reading, Signal
from laoka.catalog import gpus
from laoka.host.pci_address import normal

# Numbers of nvml.h (nvmlReturn_t).
NOT_LOADED, NO_LIBRARY, MISMATCH, NOT_FOUND = 9, 12, 18, 6
START_S = 10.0
"""What the start of that process may take on a busy host; the wait for a child that was killed is in it."""
END_S = 2.0
HOT_AGAIN_BELOW_C = 3
"""A card that was too hot is cool again when it is so much below the limit."""
PAGES_MANY = 60
"""Retired pages: a card before Ampere has room for 64 (checks in use elsewhere call it bad from 60 or 62 on)."""
# Reasons why clocks are held back that are no part of normal work (nvml.h, nvmlClocksEventReasons).
THROTTLE_REASONS = {0x08: "hw_slowdown", 0x20: "sw_thermal", 0x40: "hw_thermal", 0x80: "hw_power_brake"}
POWER_LIMIT_TOLERANCE_W = 1.0
MAX_ANSWER_BYTES = 1024 * 1024


@dataclass
class Prober:
    """Talks to the process that asks NVML, which is started when it is first needed and again when it is gone."""

    deadline_s: float
    argv: tuple[str, ...] = (sys.executable, "-I", "-m", "laoka.agent.nvml_probe")
    asker: subprocess.Popen[bytes] | None = None

    def ask(self) -> dict[str, Any]:
        """The answer; {"hung": N} when it did not come in time, {"broken": why} when it was none."""
        line = b""
        try:
            if self.asker is None:
                # Not laoka.process: that one starts, waits and forgets, and this process stays.
                self.asker = subprocess.Popen(
                    self.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
                )
            assert self.asker.stdin is not None and self.asker.stdout is not None
            self.asker.stdin.write(f"{self.deadline_s}\n".encode())
            self.asker.stdin.flush()
            line = _read_line(self.asker.stdout.fileno(), self.deadline_s + START_S)
            answer = json.loads(line)
        except (OSError, ValueError):
            answer = None
        if isinstance(answer, dict):
            return answer
        return {"broken": f"the process that asks NVML {self.close()} and gave no answer"}

    def close(self) -> str:
        """End that process; how it ended, in words."""
        asker, self.asker = self.asker, None
        if asker is None:
            return "did not start"
        for pipe in (asker.stdin, asker.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            return f"ended with status {asker.wait(END_S)}"
        except subprocess.TimeoutExpired:
            asker.kill()
            asker.wait()
        return "hung"


def ask_once(deadline_s: float) -> dict[str, Any]:
    """One answer, by a process of its own."""
    prober = Prober(deadline_s)
    try:
        return prober.ask()
    finally:
        prober.close()


def _read_line(descriptor: int, deadline_s: float) -> bytes:
    """A line; what came until then when it does not come in time, ends or is longer than an answer can be."""
    found, until_s = b"", time.monotonic() + deadline_s
    while not found.endswith(b"\n") and len(found) < MAX_ANSWER_BYTES:
        if not select.select([descriptor], [], [], max(0.0, until_s - time.monotonic()))[0]:
            break
        part = os.read(descriptor, 65536)
        if not part:
            break
        found += part
    return found


def judge(
    config: Config, answer: Mapping[str, Any], hot: frozenset[str] = frozenset(), held: frozenset[str] = frozenset()
) -> Reading:
    """A reading of the child's answer. `hot` are the cards that were too hot before (see `hot_cards`), `held` those whose clocks
    were held back before (see `held_cards`): once is no news.
    """
    if "hung" in answer:
        values: dict[str, str | int | float] = {"deadline_s": f"{config.nvml_deadline_s:g}", "count": int(answer["hung"])}
        seen = f"NVML did not answer within {config.nvml_deadline_s:g} s"
        return _bad((Signal("nvml_hung", "nvml", seen=seen, values=values),), {}, seen)
    if "broken" in answer:
        return Reading("nvml", "unknown", detail=str(answer["broken"]))
    error, listed = answer.get("error"), answer.get("cards", [])
    if not isinstance(error, int) or not isinstance(listed, list):
        return Reading("nvml", "unknown", detail="the NVML child's answer is not understood")
    if error:
        kinds = {NOT_LOADED: "nvml_not_loaded", NO_LIBRARY: "nvml_no_library", MISMATCH: "nvml_mismatch"}
        words = str(answer.get("words", f"error {error}"))
        return _bad((Signal(kinds.get(error, "nvml_failed"), "nvml", seen=f"NVML: {words}", values={"error": words}),), {}, words)
    cards = {bdf: card for card in listed if (bdf := normal(str(card.get("bdf") or "")))}
    signals: list[Signal] = []
    for gpu in config.gpu:
        signals += _card_signals(config, gpu, cards.get(gpu.bdf), gpu.bdf in hot, gpu.bdf in held)
    facts = {"driver": answer.get("driver"), "count": len(listed), "cards": cards}
    if signals:
        return _bad(tuple(signals), facts, signals[0].seen)
    unread = [f"{bdf}: {', '.join(card['faults'])}" for bdf, card in cards.items() if card.get("faults")]
    if unread:
        return Reading("nvml", "unknown", detail=f"could not read {'; '.join(unread)}", facts=facts)
    return Reading("nvml", "ok", detail=f"{len(cards)} cards, driver {answer.get('driver')}", facts=facts)


def _bad(signals: tuple[Signal, ...], facts: Mapping[str, Any], detail: str) -> Reading:
    return Reading("nvml", "bad", signals, detail, facts)


def _card_signals(config: Config, gpu: ExpectedGpu, card: Mapping[str, Any] | None, was_hot: bool, was_held: bool) -> list[Signal]:
    bdf = gpu.bdf
    if card is None:
        return [Signal("nvml_missing", "nvml", bdf, seen=f"NVML does not list {bdf}")]
    if card.get("lost"):
        return [Signal("nvml_lost", "nvml", bdf, seen=f"NVML: GPU {bdf} is lost")]
    found = []
    for key in ("uuid", "serial"):
        wanted, got = getattr(gpu, key), card.get(key)
        if wanted and got and wanted != got:
            values: dict[str, str | int | float] = {"found": str(got), "expected": wanted}
            seen = f"{bdf}: {key} {got}, expected {wanted}"
            found.append(Signal("card_swapped", "nvml", bdf, subject=key, seen=seen, values=values))
    found += _heat(gpu, card, was_hot)
    if card.get("pages_pending"):
        seen = f"{bdf}: retired pages pending"
        found.append(Signal("pages_pending", "nvml", bdf, seen=seen, values={"count": card.get("pages_retired") or 0}))
    if (card.get("pages_retired") or 0) >= PAGES_MANY:
        pages = int(card["pages_retired"])
        found.append(Signal("pages_many", "nvml", bdf, seen=f"{bdf}: {pages} retired pages", values={"count": pages}))
    if was_held and (reasons := throttle_reasons(card)):
        words = ", ".join(reasons)
        found.append(Signal("throttled", "nvml", bdf, seen=f"{bdf}: clocks held back: {words}", values={"reasons": words}))
    if card.get("ecc_uncorrected"):
        count = int(card["ecc_uncorrected"])
        found.append(Signal("ecc_uncorrected", "nvml", bdf, seen=f"{bdf}: {count} uncorrectable errors", values={"count": count}))
    limit_w, wanted_w = card.get("power_limit_w"), config.power_limit_w
    if wanted_w is not None and limit_w is not None and abs(limit_w - wanted_w) > POWER_LIMIT_TOLERANCE_W:
        values = {"limit_w": f"{limit_w:g}", "expected_w": f"{wanted_w:g}"}
        found.append(Signal("power_cap", "nvml", bdf, seen=f"{bdf}: power limit {limit_w:g} W", values=values))
    return found


def limits(gpu: ExpectedGpu, card: Mapping[str, Any]) -> dict[str, float]:
    """Temperature limits by part: what the card itself says, else what the catalogue has a source for. None: no entry."""
    row = gpus.by_device_id(gpu.device_id)
    memory = card.get("memory_max_c") or (row.memory_max_operating_c if row else None)
    core = card.get("slowdown_c") or (row.gpu_slowdown_c if row else None)
    return {part: float(limit) for part, limit in (("memory", memory), ("core", core)) if limit}


def _heat(gpu: ExpectedGpu, card: Mapping[str, Any], was_hot: bool) -> list[Signal]:
    found = []
    for part, limit_c in limits(gpu, card).items():
        temperature_c = card.get(f"{part}_c")
        if temperature_c is not None and temperature_c >= limit_c - (HOT_AGAIN_BELOW_C if was_hot else 0):
            shown = {"memory": "HBM", "core": "core"}[part]
            values: dict[str, str | int | float] = {
                "part": shown,
                "temperature_c": int(temperature_c),
                "limit_c": f"{limit_c:g}",
            }
            seen = f"{gpu.bdf}: {shown} {temperature_c} C, limit {limit_c:g} C"
            found.append(Signal("heat", "nvml", gpu.bdf, subject=part, seen=seen, values=values))
    return found


def throttle_reasons(card: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the reasons of heat and power for which a card's clocks are held back now; a power cap that was set is none."""
    bits = card.get("throttle_reasons") or 0
    return tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)


def held_cards(reading: Reading) -> frozenset[str]:
    """The cards whose clocks a reading found held back."""
    return frozenset(bdf for bdf, card in reading.facts.get("cards", {}).items() if throttle_reasons(card))


def hot_cards(signals: Sequence[Signal]) -> frozenset[str]:
    """The cards that a reading found too hot."""
    return frozenset(signal.bdf for signal in signals if signal.kind == "heat" and signal.bdf)
