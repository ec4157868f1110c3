"""Learn group TTLs for a disk of a given size from the trace (Kareto, Algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from canopy_lab.group_ttl.learn import Learning
from canopy_lab.group_ttl.window import TrafficWindow, WindowSnapshot
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.ttl.table import TRACE_HASH, TTLTable

SHORTEST_S = 60.0
"""A plan is made for no shorter than this."""


MAX_BLOCKS = 1 << 24
"""Distinct blocks that are looked at, some 2 GB. Of a longer trace the last requests count."""


def observe(trace: Iterable[TraceRequest], hash: str = TRACE_HASH) -> WindowSnapshot:
    """What a server's window would have learnt from the whole trace.

    ``hash`` says whose ids the blocks are: the trace's own, or a server's.
    """
    window: TrafficWindow | None = None
    begin = end = 0.0
    for request in trace:
        if window is None:
            window = TrafficWindow(
                window_s=math.inf,
                block_tokens=request.block_tokens,
                hash=hash,
                max_requests=MAX_BLOCKS,
                max_blocks=MAX_BLOCKS,
            )
            begin = request.time_s
        end = request.time_s
        window.observe(request.blocks, request.time_s, request.input_tokens, request.category)
    assert window is not None, "an empty trace is refused before"
    # A plan is in force for about as long as what it was made from.
    return replace(window.snapshot(), learning=Learning(refresh_s=max(end - begin, SHORTEST_S)))


def group_table(window: WindowSnapshot, budget_bytes: float, bytes_per_token: float) -> TTLTable:
    """The TTLs that win most hits within ``budget_bytes`` of disk."""
    return window.table(budget_bytes, bytes_per_token)
