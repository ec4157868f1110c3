"""Reuse of KV that is not a prefix (CacheTune): chunks, selectors, fusion, the recompute ratio.

Everything here is approximate unless the ratio is 1. Fused KV must never enter the exact tree.
"""

ENCODINGS = ("prefix", "standin", "mixed", "alone")
"""What a chunk may be encoded behind: the prompt's prefix; that and documents that stand in for its
predecessors; the former where it comes first and the latter elsewhere; nothing. ``encode.py`` and
``variants.py`` have the reasons."""

SERVABLE = (
    "default",
    "asked",
    "last-token",
    "head+asked",
    "head+last-token",
    "query",
    "head+query",
    "prophetkv",
    "first-k",
    "epic",
    "frequency",
    "high-frequency",
    "v-norm",
    "random",
    "hkvd",
)
"""Selectors a server can run. Not the two per-layer ones (SGLang's forward keeps its rows through all
layers) and not the yardstick ``oracle``."""

SPLIT_SELECTORS = tuple(
    name for name in SERVABLE if name not in ("frequency", "high-frequency", "v-norm", "hkvd")
)
"""Selectors whose scores every rank of a split model finds alike. The others look at one rank's own KV."""

TENANT_SHARE = 0.1
"""What one tenant may hold of what is bounded: registered tokens and documents, pinned bytes."""
