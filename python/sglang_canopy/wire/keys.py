"""Keys shared by the HTTP process and the schedulers."""

from __future__ import annotations

EXPLAIN = "canopy_explain:"
"""Same key as in ``radix/explain.py``, which only schedulers import."""

TIME = "canopy_time:"
"""Prefix of a key in ``SetInternalStateReq.server_args`` with the time, in seconds on the requests'
clock, because sessions fade even without requests."""


RETRY_AFTER = "canopy_retry_after_s"
"""Key of a finish reason: seconds until the client may retry."""
