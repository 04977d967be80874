"""What an inventory may say for `laoka plan` and `laoka lock`; the roles do not read it yet."""

from __future__ import annotations

from roles.settings import RoleSettings


class PlanSettings(RoleSettings):
    """Settings of the plan and the lock file."""

    os_release: str | None = None
    """The host's system, such as ubuntu-24.04 or debian-12; None stands for ubuntu-24.04."""
    kernel: str | None = None
    """Its kernel, such as 6.8.0-124-generic."""
    model: str | None = None
    """A model of the catalogue, or a folder with a checkpoint; None takes model_id."""
    context_tokens: int | None = None
    """The longest context that is wanted; None takes max-model-len of serve_flags."""
    streams: int | None = None
    """How many requests at once; None takes max-num-seqs of serve_flags."""
    engine: str | None = None
    """An engine, such as 1cat-vllm==1.5.1; None takes engine_name and engine_version."""
    driver: str | None = None
    """A driver branch or version; None takes driver_branch."""
