"""Opens the gateway's port in the firewall that a host has, and keeps its engines to itself; SSH stays."""
