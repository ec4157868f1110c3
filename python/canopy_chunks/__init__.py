"""Reuse of KV that is not a prefix (CacheTune): chunks, selectors, fusion, the recompute ratio.

All KV here is approximate unless the ratio is 1. Fused KV must never enter the exact tree.
"""

ENCODINGS = ("prefix", "mixed")
"""Encodings of a chunk.

``prefix``: behind the prompt's head. ``mixed``: behind the head for a first chunk, behind the head
and stand-in documents for later chunks. ``variants.py`` has the reasons.
"""

SELECTORS = ("question", "frequency")
"""Methods that choose the tokens to recompute: by the question's attention, or by CacheTune's low
frequencies of the stored KV."""

SPLIT_SELECTORS = ("question",)
"""Selectors with equal scores on every rank of a split model; the others read one rank's KV."""

TENANT_SHARE = 0.1
"""One tenant's share of each bound: registered tokens and documents, pinned bytes."""
