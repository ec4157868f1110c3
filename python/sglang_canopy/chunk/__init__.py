"""Reuse of KV that is not a prefix (CacheTune): chunks, selectors, fusion, the recompute ratio.

Everything here is approximate unless the ratio is 1. Fused KV must never enter the exact tree.
"""
