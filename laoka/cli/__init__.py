"""The laoka command: one module per command; each parses, calls one function, and prints."""
