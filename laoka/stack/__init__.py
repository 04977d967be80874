"""From cards, system and model to a pinned stack or a refusal; the memory plan; the lock file. Pure."""
