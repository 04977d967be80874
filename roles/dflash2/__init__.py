"""Speculative decoding: whether DFlash2 is used on this host, and why not."""
