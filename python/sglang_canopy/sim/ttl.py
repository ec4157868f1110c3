"""Traces as the TTL allocator sees them, and TTLs simulated on them (``tier/replay.py``)."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_canopy.errors import CanopyError
from sglang_canopy.reuse.categories import features
from sglang_canopy.tier.path_log import PathLog, PathSnapshot
from sglang_canopy.tier.replay import TTLOutcome, fixed_ttls, simulate_ttl
from sglang_canopy.trace.record import TraceRequest

__all__ = ["TTLOutcome", "fixed_ttls", "observe", "path_snapshot", "simulate_ttl"]


def path_snapshot(trace: Iterable[TraceRequest]) -> PathSnapshot:
    """The whole trace as a ``PathSnapshot``. Raises ``CanopyError`` for an empty one."""
    log: PathLog | None = None
    for record in trace:
        if log is None:
            log = PathLog(
                block_tokens=record.block_tokens, max_requests=1 << 40, max_blocks=1 << 40
            )
        observe(log, record)
    if log is None:
        raise CanopyError("the trace has no requests; give one that has")
    return log.snapshot()


def observe(log: PathLog, record: TraceRequest) -> None:
    """Note one request of a trace, labelled as the policy ``wa`` labels it on a server."""
    names = features(record.category, record.stop, record.turn, record.output_tokens, None)
    log.observe(record.blocks, record.time_s, record.input_tokens, "|".join(names))
