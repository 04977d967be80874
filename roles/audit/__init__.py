"""The nightly audit of a host by itself."""
