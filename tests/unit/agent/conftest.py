"""Settings of the agent's tests: a property has no deadline on a busy machine, and sixty examples are enough to run often."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("laoka", deadline=None, max_examples=60)
settings.load_profile("laoka")
