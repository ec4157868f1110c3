"""Gains of cache policies, hints and memory on a log of requests."""
