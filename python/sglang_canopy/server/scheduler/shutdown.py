"""The seconds that a scheduler has for the drain to disk (``server/http/shutdown.py``)."""

from __future__ import annotations

from typing import Any


def shutdown_requested(scheduler: Any, recv_req: Any, *_: Any, **__: Any) -> None:
    """Hook before ``Scheduler.handle_shutdown``. Every rank receives the same message."""
    if recv_req.rid is not None and hasattr(scheduler.tree_cache, "drain_s"):
        scheduler.tree_cache.drain_s = float(recv_req.rid)
