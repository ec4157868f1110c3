"""Time for the drain to disk after SIGTERM: the HTTP process measures it, the schedulers use it.

SGLang ends requests first, sends ``ShutdownReq`` to its schedulers, and kills those that run 15 s later.
"""

from __future__ import annotations

import time
from typing import Any

from sglang_canopy.config.server_options import options_of

RELEASE_S = 15.0
"""Seconds that SGLang gives a scheduler to end, without a drain."""
_signalled_at: list[float] = []


def sigterm_received(*_: Any, **__: Any) -> None:
    """Hook before ``SignalHandler.sigterm_handler``: record the time of the first signal."""
    if not _signalled_at:
        _signalled_at.append(time.monotonic())


def message_dispatched(manager: Any, obj: Any, *_: Any, **__: Any) -> None:
    """Hook before ``TokenizerManager._dispatch_to_scheduler``: put the seconds left for the drain
    into a ``ShutdownReq``, and extend SGLang's wait by the same time."""
    if not _signalled_at:
        return
    from sglang.srt.managers import tokenizer_manager
    from sglang.srt.managers.io_struct import ShutdownReq

    is_last = isinstance(obj, ShutdownReq)
    if not is_last or manager.server_args.hicache_storage_backend is None:
        return
    budget_s = options_of(manager.server_args).tiers.drain_s
    left_s = max(0.0, budget_s - (time.monotonic() - _signalled_at[0]))
    obj.rid = f"{left_s:.3f}"
    tokenizer_manager._SCHEDULER_EXIT_TIMEOUT_SECS = RELEASE_S + left_s
