"""Reuse of KV that is not a prefix (CacheTune): chunks, selectors, fusion, the recompute ratio.

All KV here is approximate unless the ratio is 1. Fused KV must never enter the exact tree.
"""

ENCODINGS = ("prefix", "mixed")
"""Encodings of a chunk.

``prefix``: encoded after the prompt's head. ``mixed``: a first chunk after the head, later chunks
after the head and stand-in documents. ``variants.py`` has the reasons.
"""

SELECTORS = ("question", "frequency")
"""Methods to choose the tokens to recompute: attention from the question, or low-frequency energy
of the stored KV (CacheTune)."""

SPLIT_SELECTORS = ("question",)
"""Selectors that score alike on every rank of a split model; other selectors read one rank's KV."""

TENANT_SHARE = 0.1
"""Share of each bound (registered tokens and documents, pinned bytes) that one tenant may use."""

ATTRIBUTE = "_canopy_chunks"
"""Attribute of ``ServerArgs`` with the options (``None``: documents are not reused)."""
