"""Traces as the TTL allocator sees them, and TTLs simulated on them (``tier/replay.py``)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from sglang_canopy.errors import CanopyError
from sglang_canopy.reuse.categories import features
from sglang_canopy.tier.learn import Learning, Learnt
from sglang_canopy.tier.path_log import PathLog, PathSnapshot
from sglang_canopy.tier.replay import TTLOutcome, fixed_ttls, simulate_ttl
from sglang_canopy.tier.ttl import TRACE_HASH, TTLTable
from sglang_canopy.tier.window import Window
from sglang_canopy.trace.record import TraceRequest

__all__ = [
    "Refresh",
    "TTLOutcome",
    "fixed_ttls",
    "observe",
    "online_schedule",
    "path_snapshot",
    "simulate_ttl",
]


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


@dataclass(frozen=True, slots=True)
class Refresh:
    """One re-allocation of an online window."""

    time_s: float
    learnt: Learnt
    seconds: float
    """Wall time it took."""


def online_schedule(
    trace: Iterable[TraceRequest],
    budget_tokens: float,
    learning: Learning,
    *,
    window_s: float,
    first: TTLTable,
) -> tuple[list[tuple[float, TTLTable]], list[Refresh]]:
    """The tables a server would have had, each learnt from the ``window_s`` before it.

    The first is in force until ``learning.refresh_s``; then there is one every so often. None
    sees a request that comes after it was made.
    """
    schedule: list[tuple[float, TTLTable]] = []
    refreshes: list[Refresh] = []
    window: Window | None = None
    due_s = inf
    for record in trace:
        if window is None:
            schedule.append((record.time_s, first))
            due_s = record.time_s + learning.refresh_s
            window = Window(
                window_s=window_s,
                block_tokens=record.block_tokens,
                learning=learning,
                hash=TRACE_HASH,
                max_requests=1 << 40,
                max_blocks=1 << 40,
            )
        while record.time_s > due_s:
            began = time.perf_counter()
            learnt = window.snapshot().learn(budget_tokens, 1.0)
            refreshes.append(Refresh(due_s, learnt, time.perf_counter() - began))
            schedule.append((due_s, learnt.table))
            due_s += learning.refresh_s
        observe(window.log, record)
    return schedule, refreshes
