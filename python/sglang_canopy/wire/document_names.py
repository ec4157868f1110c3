"""What requests and messages about documents are called: fields of ``custom_params``, and commands."""

from __future__ import annotations

BOUNDS = "canopy_chunks"
"""Flat list of token positions ``[start, end, start, end, ...]``, or ``"off"``. Also what an answer's
``meta_info`` and a server's state call what they say of documents."""
RATIO = "canopy_recompute_ratio"
SELECTOR = "canopy_selector"
DOCUMENTS = "canopy_documents"
"""``"parts"``: in chat messages with several text parts, all but the last are documents."""
FIELDS = (BOUNDS, RATIO, SELECTOR, DOCUMENTS)

COMMAND = "canopy_chunk:"
"""How a command begins in ``SetInternalStateReq.server_args``: ``canopy_chunk:pin:ID:TENANT``."""
