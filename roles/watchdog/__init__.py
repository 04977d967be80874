"""The watchdog that notices dropped cards and tells people."""
