"""laoka: from a bare board with second-hand Tesla V100 cards to an LLM endpoint that stays up."""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

FACTS = ("LaokaDeployed", "NextBoot", "NvidiaCards", "NvidiaDriver")


def __getattr__(name: str) -> object:
    """pyinfra's command line looks for `laoka.NvidiaDriver` here: facts are imported only when they are asked for."""
    if name in FACTS:
        # By name: whatever else imports this package must not need pyinfra.
        return getattr(importlib.import_module("laoka.facts.nvidia"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
