"""Settings of the driver role."""

from __future__ import annotations

from typing import Literal

from roles.settings import RoleSettings


class DriverSettings(RoleSettings):
    """Settings of the driver."""

    driver_branch: str | None = None
    """Driver branch, such as 580, the last one that drives a V100; None takes the newest maintained one for the cards."""
    reboot: Literal["ask", "allowed", "never"] = "ask"
    """Whether a driver or kernel change may reboot the host; ask: only in a run that was given --yes."""
    reboot_deadline_s: int = 900
    """How long a host may take to come back from a reboot; old boards with much memory take minutes."""
    drain_deadline_s: int = 120
    """How long running requests may go on before the model server is stopped for a driver change."""
