"""Eviction policies: one a file, the contract that they share, and the registry of their names."""
