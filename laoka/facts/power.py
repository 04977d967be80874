"""Facts about the power caps that are in force."""

from __future__ import annotations

from pyinfra.api.facts import FactBase


class PowerLimits(FactBase[list[float]]):
    """The enforced power cap of each card in watts, as nvidia-smi says; empty when it does not answer within 20 s."""

    default = list

    def command(self) -> str:
        return "timeout 20 nvidia-smi --query-gpu=power.limit --format=csv,noheader,nounits 2>/dev/null || true"

    def process(self, output: list[str]) -> list[float]:
        found = []
        for line in output:
            try:
                found.append(float(line))
            except ValueError:
                return []  # [N/A] or an error text: unknown, and so not as wanted
        return found
