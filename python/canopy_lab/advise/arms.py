"""The simulations behind advice: policies, hints, placebo and hindsight, on several processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from canopy_lab.sim.driver import simulate
from canopy_lab.sim.hindsight import make_hindsight
from canopy_lab.sim.hindsight.future import Future
from canopy_lab.sim.requests import Hints
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import make_policy


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run a cache."""

    label: str
    """As the page names it."""
    flag: str
    """What ``--radix-eviction`` would be given; empty where no server can run it."""
    policy: str
    config: tuple[tuple[str, object], ...] = ()
    whole_nodes: bool = False
    hints: tuple[float, float] | None = None
    """(share of the clients that give hints, how often these are right)."""
    placebo: bool = False
    hindsight: bool = False


SGLANG_LRU = Arm("lru, as in SGLang", "lru", "lru", whole_nodes=True)
"""The baseline: SGLang's own policy, which evicts whole nodes."""
LRU = Arm("canopy-lru", "canopy-lru", "lru")
WA = Arm("wa", "wa", "wa")
CANDIDATES = (
    LRU,
    WA,
)
"""What a server could run instead, without a word from clients. Simplest first."""
PLACEBO = Arm("wa, labels shuffled", "", "wa", placebo=True)
HINTED = (
    Arm("wa, half of the clients hint, 9 in 10 right", "wa", "wa", hints=(0.5, 0.9)),
    Arm("wa, every client hints, always right", "wa", "wa", hints=(1.0, 1.0)),
)
BOUND = Arm("hindsight bound", "", "belady", hindsight=True)

Run = tuple[Arm, int]
"""An arm and a capacity in blocks of the sample."""
Uncached = NDArray[np.int64]
"""Prompt tokens that each request has to compute, in the sample's order."""


def run_arms(
    requests: Sequence[TraceRequest],
    runs: Iterable[Run],
    *,
    jobs: int | None = None,
    seed: int = 1,
    progress: Callable[[], object] = lambda: None,
) -> dict[Run, Uncached]:
    """Simulate each of ``runs`` once. Raises ``CanopyError`` where a process was killed."""
    global _requests
    wanted = list(dict.fromkeys(runs))
    results: dict[Run, Uncached] = {}
    jobs = max(1, min(jobs or os.cpu_count() or 1, len(wanted)))
    _requests = requests
    try:
        if jobs == 1:
            for run in wanted:
                results[run] = _simulate(run, seed)
                progress()
            return results
        # Forked workers share the sample with this process instead of getting a copy.
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
            pending = {pool.submit(_simulate, run, seed): run for run in wanted}
            for done in as_completed(pending):
                results[pending[done]] = done.result()
                progress()
        return results
    except BrokenProcessPool:
        raise CanopyError(
            "a simulation process was killed, most likely for memory; use a smaller "
            "--sample-requests or fewer --jobs"
        ) from None
    finally:
        _requests = ()


def hit_ratio(uncached: Uncached, tokens: NDArray[np.int64]) -> float:
    """Share of the prompt tokens that were in the cache."""
    return 1.0 - float(uncached.sum()) / max(float(tokens.sum()), 1.0)


_requests: Sequence[TraceRequest] = ()


def _simulate(run: Run, seed: int) -> Uncached:
    arm, capacity = run
    options: Mapping[str, object] = dict(arm.config)
    if arm.hindsight:
        policy = make_hindsight(arm.policy, Future(_requests), {})
    else:
        policy = make_policy(arm.policy, options)
    hints = None if arm.hints is None else Hints(*arm.hints, seed=seed)
    result = simulate(
        _requests,
        policy,
        capacity,
        placebo_seed=seed if arm.placebo else None,
        hints=hints,
        whole_nodes=arm.whole_nodes,
    )
    return np.array(result.uncached_tokens, np.int64)
