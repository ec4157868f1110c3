"""Policies of the simulator only, for comparison. Names: ``policy/registry.py``."""
