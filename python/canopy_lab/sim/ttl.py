"""Convert traces for the TTL allocator, and simulate TTLs on them (``group_ttl/replay.py``)."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from canopy_lab.group_ttl.learn import Learning, Learnt, learn
from canopy_lab.group_ttl.path_log import PathLog, PathSnapshot
from canopy_lab.group_ttl.replay import TTLOutcome, fixed_ttls, simulate_ttl
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError
from sglang_canopy.reuse.categories import features
from sglang_canopy.ttl.table import TRACE_HASH, TTLTable

__all__ = [
    "TTLOutcome",
    "fixed_ttls",
    "observe",
    "online_schedule",
    "path_snapshot",
    "simulate_ttl",
    "window_snapshots",
]


def path_snapshot(trace: Iterable[TraceRequest]) -> PathSnapshot:
    """Return the whole trace as a ``PathSnapshot``. Raises ``CanopyError`` for an empty trace."""
    log: PathLog | None = None
    for record in trace:
        if log is None:
            log = PathLog(
                block_tokens=record.block_tokens, max_requests=1 << 40, max_blocks=1 << 40
            )
        observe(log, record)
    if log is None:
        raise CanopyError("the trace has no requests; give a trace with requests")
    return log.snapshot()


def observe(log: PathLog, record: TraceRequest) -> None:
    """Record one request of a trace, labelled as the policy ``wa`` labels it on a server."""
    names = features(record.category, record.stop, record.turn, record.output_tokens, None)
    log.observe(record.blocks, record.time_s, record.input_tokens, "|".join(names))


def window_snapshots(
    trace: Iterable[TraceRequest], window_s: float, refresh_s: float
) -> list[tuple[float, PathSnapshot]]:
    """Return (time, content of a server's window of ``window_s``) every ``refresh_s`` seconds.

    A snapshot contains no request after its time.
    """
    snapshots: list[tuple[float, PathSnapshot]] = []
    log: PathLog | None = None
    due_s = inf
    for record in trace:
        if log is None:
            due_s = record.time_s + refresh_s
            log = PathLog(
                window_s=window_s,
                block_tokens=record.block_tokens,
                max_requests=1 << 40,
                max_blocks=1 << 40,
            )
        while record.time_s > due_s:
            snapshots.append((due_s, log.snapshot()))
            due_s += refresh_s
        observe(log, record)
    return snapshots


def online_schedule(
    snapshots: Iterable[tuple[float, PathSnapshot]],
    budget_tokens: float | None,
    learning: Learning,
    first: TTLTable,
) -> tuple[list[tuple[float, TTLTable]], list[Learnt]]:
    """Return the tables that a server would have used: ``first``, then one per snapshot.

    ``learning.refresh_s`` should equal that of ``window_snapshots``.
    """
    schedule, tables = [(-inf, first)], []
    for time_s, log in snapshots:
        learnt = learn(log, budget_tokens, learning, TRACE_HASH)
        schedule.append((time_s, learnt.table))
        tables.append(learnt)
    return schedule, tables
