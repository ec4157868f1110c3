"""The simulator runs behind the recommendation, on several processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from canopy_lab.sim.driver import simulate
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.registry import make_policy

COARSEST_TOKENS = 256
"""Blocks may be merged up to this, or up to ``COARSEST_SHARE`` of the mean prompt."""
COARSEST_SHARE = 1 / 32
LABELS = ("both", "type", "turn", "none")


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """One simulation. Hashable, so that a result is asked for by what was run."""

    policy: str
    capacity_blocks: int
    config: tuple[tuple[str, Any], ...] = ()
    labels: str = "both"
    """Which labels (type, turn) the policy sees: one of ``LABELS``."""
    placebo_seed: int | None = None


@dataclass(slots=True)
class TraceSample:
    """The trace as the simulator gets it."""

    requests: list[TraceRequest] = field(default_factory=list)
    merged: int = 1
    """Blocks of the trace that make one of the simulator's."""
    cut: bool = False
    """Whether the trace goes on after the last request."""
    distinct_blocks: int = 0


def prepare(
    trace: Iterable[TraceRequest],
    accesses: int,
    most: int,
    *,
    most_requests: int | None = None,
    mean_tokens: float = 0.0,
) -> TraceSample:
    """Keep what ``most`` block accesses (and ``most_requests``) hold of a trace of ``accesses``.

    First blocks are merged (2, 4, 8, ...), the coarser the longer the prompts are in the mean: a
    merged block is known by its whole prefix, so a hit of it is a hit of all its parts. What is
    still too much is cut off at the end.
    """
    coarsest = max(COARSEST_TOKENS, mean_tokens * COARSEST_SHARE)
    prepared = TraceSample()
    seen: set[int] = set()
    used = 0
    for r in trace:
        if not prepared.requests:
            while (
                accesses > most * prepared.merged
                and 2 * prepared.merged * r.block_tokens <= coarsest
            ):
                prepared.merged *= 2
        if used > most or len(prepared.requests) == most_requests:
            prepared.cut = True
            break
        r = merge(r, prepared.merged)
        prepared.requests.append(r)
        used += len(r.blocks)
        seen.update(r.blocks)
    prepared.distinct_blocks = len(seen)
    return prepared


def merge(r: TraceRequest, factor: int) -> TraceRequest:
    """The same request in blocks of ``factor`` blocks, the last one partial."""
    if factor == 1:
        return r
    chained = 0
    merged = []
    for start in range(0, len(r.blocks), factor):
        chained = hash((chained, r.blocks[start : start + factor]))
        merged.append(chained)
    return replace(r, blocks=tuple(merged), block_tokens=r.block_tokens * factor)


def run_all(
    prepared: TraceSample,
    runs: Sequence[PolicyRun],
    jobs: int | None,
    progress: Callable[[], object] = lambda: None,
) -> dict[PolicyRun, np.ndarray]:
    """Uncached tokens of each request, for each run."""
    wanted = list(dict.fromkeys(runs))
    jobs = min(jobs or os.cpu_count() or 1, len(wanted)) or 1
    results: dict[PolicyRun, np.ndarray] = {}
    global _requests
    _requests = prepared.requests
    try:
        if jobs == 1:
            for run in wanted:
                results[run] = _simulate(run)
                progress()
            return results
        # Forked workers share the trace with this process instead of getting a copy.
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
            pending = {pool.submit(_simulate, run): run for run in wanted}
            for done in as_completed(pending):
                results[pending[done]] = done.result()
                progress()
        return results
    finally:
        _requests = []


_requests: list[TraceRequest] = []


def _simulate(run: PolicyRun) -> np.ndarray:
    policy = make_policy(run.policy, dict(run.config))
    trace = _requests if run.labels == "both" else [_relabel(r, run.labels) for r in _requests]
    result = simulate(trace, policy, run.capacity_blocks, placebo_seed=run.placebo_seed)
    return np.array(result.uncached_tokens, np.int64)


def _relabel(r: TraceRequest, labels: str) -> TraceRequest:
    if labels == "type":
        return replace(r, turn=1)
    if labels == "turn":
        return replace(r, category="default")
    return replace(r, category="default", turn=1, stop=None)
