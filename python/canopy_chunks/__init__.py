"""Reuse of KV that is not a prefix (CacheTune): chunks, selectors, fusion, the recompute ratio.

Everything here is approximate unless the ratio is 1. Fused KV must never enter the exact tree.
"""

ENCODINGS = ("prefix", "mixed")
"""What a chunk may be encoded behind: the prompt's prefix; that where it comes first, and that and
documents that stand in for its predecessors elsewhere. ``variants.py`` has the reasons."""

SELECTORS = ("question", "frequency")
"""Who may choose the tokens that are recomputed: what the question attends to, or CacheTune's low
frequencies of the stored KV."""

SPLIT_SELECTORS = ("question",)
"""Selectors whose scores every rank of a split model finds alike. The others look at one rank's own KV."""

TENANT_SHARE = 0.1
"""What one tenant may hold of what is bounded: registered tokens and documents, pinned bytes."""
