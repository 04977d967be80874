"""Metrics and log limits."""
