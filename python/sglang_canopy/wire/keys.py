"""Keys that the HTTP process and the schedulers both know."""

from __future__ import annotations

EXPLAIN = "canopy_explain:"
"""As in ``radix/explain.py``, which only schedulers import."""

TIME = "canopy_time:"
"""How a message's key begins in ``SetInternalStateReq.server_args`` that tells schedulers the
time, in seconds on the requests' clock: sessions fade while no request comes."""


RETRY_AFTER = "canopy_retry_after_s"
"""Key of a finish reason: after how many seconds the client may try again."""
