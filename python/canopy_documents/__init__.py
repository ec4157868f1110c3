"""Reuse of KV that is not a prefix (CacheTune): documents, selectors, fusion, recompute ratio.

All KV here is approximate unless the ratio is 1. Fused KV must never enter the exact tree.
"""

from typing import Any

SELECTORS = ("question", "frequency")
"""Methods to choose the tokens to recompute: attention from the question, or low-frequency energy
of the stored KV (CacheTune)."""

SPLIT_SELECTORS = ("question",)
"""Selectors that score alike on every rank of a split model; other selectors read one rank's KV."""

READ_AHEAD_BYTES = 256 << 20
"""Bytes read from disk ahead for waiting requests; others are read when they are needed."""

ATTRIBUTE = "_canopy_documents"
"""Attribute of ``ServerArgs`` with the options (``None``: documents are not reused)."""


def document_options_of(server_args: object) -> Any:
    """Return a server's options, or ``None`` without document reuse."""
    return getattr(server_args, ATTRIBUTE, None)
