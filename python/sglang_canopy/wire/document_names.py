"""Names of document fields in ``custom_params``."""

from __future__ import annotations

BOUNDS = "canopy_chunks"
"""Flat list of token positions ``[start, end, start, end, ...]``, or ``"off"``. Also the key of document
data in a response's ``meta_info`` and in a server's state."""
RATIO = "canopy_recompute_ratio"
SELECTOR = "canopy_selector"
DOCUMENTS = "canopy_documents"
"""``"parts"``: in chat messages with several text parts, each part except the last is a document."""
ORDER = "canopy_order"
FIELDS = (BOUNDS, RATIO, SELECTOR, DOCUMENTS, ORDER)
