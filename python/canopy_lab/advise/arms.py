"""The simulations behind advice: policies, hints, placebo and hindsight, on several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from canopy_lab.sim.driver import simulate
from canopy_lab.sim.hindsight import make_hindsight
from canopy_lab.sim.hindsight.future import Future
from canopy_lab.sim.requests import SimulatedHints
from canopy_lab.sim.workers import Workers
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.registry import AUTO, make_policy


@dataclass(frozen=True, slots=True)
class CacheArm:
    """One configuration of a cache to simulate."""

    label: str
    """Name on the page."""
    flag: str
    """Value for ``--radix-eviction``; empty if no server can run the arm."""
    policy: str
    whole_nodes: bool = False
    hints: tuple[float, float] | None = None
    """Share of the clients that give hints, and share of true hints."""
    is_placebo: bool = False
    is_hindsight: bool = False


SGLANG_LRU = CacheArm("lru, as in SGLang", "lru", "lru", whole_nodes=True)
"""The baseline: SGLang's own policy, which evicts whole nodes."""
CANOPY_LRU = CacheArm("canopy-lru", "canopy-lru", "lru")
WA = CacheArm("wa", AUTO, "wa")
CANDIDATE_ARMS = (CANOPY_LRU, WA)
"""Policies that a server can run without hints from clients, the simplest first."""
PLACEBO_ARM = CacheArm("wa, random labels", "", "wa", is_placebo=True)
HINTED_ARMS = (
    CacheArm("wa, half of the clients hint, 9 in 10 right", AUTO, "wa", hints=(0.5, 0.9)),
    CacheArm("wa, every client hints, always right", AUTO, "wa", hints=(1.0, 1.0)),
)
HINDSIGHT_ARM = CacheArm("hindsight bound", "", "belady", is_hindsight=True)

ArmCapacity = tuple[CacheArm, int]
"""An arm and a capacity in blocks of the sample."""
Uncached = NDArray[np.int64]
"""Prompt tokens that each request has to compute, in the sample's order."""


def run_arms(
    requests: Sequence[TraceRequest],
    runs: Iterable[ArmCapacity],
    *,
    jobs: int | None = None,
    seed: int = 1,
    progress: Callable[[], object] = lambda: None,
) -> dict[ArmCapacity, Uncached]:
    """Simulate each of ``runs`` once. Raises ``CanopyError`` if a process was killed."""
    unique_runs = list(dict.fromkeys(runs))
    jobs = max(1, min(jobs or os.cpu_count() or 1, len(unique_runs)))
    results: dict[ArmCapacity, Uncached] = {}
    with Workers((requests, seed), jobs) as workers:
        for index, uncached in workers.map(_simulate, unique_runs):
            results[unique_runs[index]] = uncached
            progress()
    return results


def hit_ratio(uncached: Uncached, tokens: NDArray[np.int64]) -> float:
    """Return the share of the prompt tokens that were in the cache."""
    return 1.0 - float(uncached.sum()) / max(float(tokens.sum()), 1.0)


def _simulate(shared: tuple[Sequence[TraceRequest], int], run: ArmCapacity) -> Uncached:
    (requests, seed), (arm, capacity_blocks) = shared, run
    if arm.is_hindsight:
        policy = make_hindsight(arm.policy, Future(requests), {})
    else:
        policy = make_policy(arm.policy)
    result = simulate(
        requests,
        policy,
        capacity_blocks,
        placebo_seed=seed if arm.is_placebo else None,
        hints=None if arm.hints is None else SimulatedHints(*arm.hints, seed=seed),
        whole_nodes=arm.whole_nodes,
    )
    return np.array(result.uncached_tokens, np.int64)
