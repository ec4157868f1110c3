"""Group TTLs for a disk of a given size, from the trace itself (Kareto, Algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from sglang_canopy.tier.ttl import TRACE_HASH, TTLTable
from sglang_canopy.tier.window import Window, WindowSnapshot
from sglang_canopy.trace.record import TraceRequest


def observe(trace: Iterable[TraceRequest], hash: str = TRACE_HASH) -> WindowSnapshot:
    """What a server's window would have learnt from the whole trace.

    ``hash`` says whose ids the blocks are: the trace's own, or a server's.
    """
    window: Window | None = None
    for request in trace:
        if window is None:
            window = Window(window_s=math.inf, block_tokens=request.block_tokens, hash=hash)
        window.observe(request.blocks, request.time_s, request.input_tokens, request.category)
    assert window is not None, "an empty trace is refused before"
    return window.snapshot()


def group_table(window: WindowSnapshot, budget_bytes: float, bytes_per_token: float) -> TTLTable:
    """The TTLs that win most hits within ``budget_bytes`` of disk."""
    return window.table(budget_bytes, bytes_per_token)
