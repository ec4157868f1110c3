"""Group TTLs for a disk of a given size, from the trace itself (Kareto, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_canopy.tier.ttl import TTLTable
from sglang_canopy.tier.window import Window
from sglang_canopy.trace.record import TraceRequest


def observe(trace: Iterable[TraceRequest]) -> Window:
    """What a server's window would have learnt from the whole trace."""
    window: Window | None = None
    for request in trace:
        if window is None:
            window = Window(span_s=float("inf"), block_tokens=request.block_tokens, hash="trace")
        window.observe(request.blocks, request.time_s, request.input_tokens)
    assert window is not None, "an empty trace is refused before"
    return window


def group_table(window: Window, budget_bytes: float, bytes_per_token: float) -> TTLTable:
    """The TTLs that win most hits within ``budget_bytes`` of disk."""
    return window.table(budget_bytes, bytes_per_token)
