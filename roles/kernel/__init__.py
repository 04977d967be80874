"""The kernel packages that must not move."""
