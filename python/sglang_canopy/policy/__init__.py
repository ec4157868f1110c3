"""Eviction policies, one per file, their common contract, and the registry of their names."""
