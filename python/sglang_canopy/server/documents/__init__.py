"""Hooks for document reuse, in each process; without ``--canopy-chunks`` they do nothing."""
