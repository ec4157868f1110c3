"""Reuse of KV that is not a prefix (CacheTune): chunks, selectors, fusion, the recompute ratio.

Everything here is approximate unless the ratio is 1. Fused KV must never enter the exact tree.
"""

ENCODINGS = ("prefix", "standin", "alone")
"""What a chunk may be encoded behind: the prompt's prefix; that and documents that stand in for its
predecessors; nothing. ``encode.py`` has the reasons."""
