"""The front door: HAProxy with an allow-list of paths and a health check by completion."""
