"""Many policies at many capacities over many seeds, in parallel processes.

Each trace is read once, by one process, into a compact copy on disk that the others load; from
then on every (policy, capacity, seed) is a task of its own. Processes are spawned, not forked.
"""

from __future__ import annotations

import multiprocessing
import pickle
import resource
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.driver import simulate
from canopy_lab.sim.hindsight import hindsight_class, hindsight_names, make_hindsight
from canopy_lab.sim.hindsight.future import Future
from canopy_lab.sim.model import ModelShape
from canopy_lab.sim.requests import Hints
from canopy_lab.sim.stack import LRUCurve, lru_curve, lru_uncached_tokens
from canopy_lab.trace.open import open_trace
from canopy_lab.trace.overlay import overlay
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import TAIL_TARGETS, Policy
from sglang_canopy.policy.registry import make_policy, policy_class, policy_names

_TAIL_PERCENTILE = 90


@dataclass(frozen=True, slots=True)
class PolicyArm:
    """A policy to run: ``NAME`` or ``NAME:TAG`` (the same policy with other options)."""

    label: str
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.label.split(":", 1)[0]

    @property
    def policy(self) -> type[Policy]:
        return hindsight_class(self.name) if self.hindsight else policy_class(self.name)

    @property
    def hindsight(self) -> bool:
        return self.name in hindsight_names()


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What to simulate. Capacities below 1 are fractions of a trace's distinct blocks."""

    path: str
    format: str
    choices: tuple[PolicyArm, ...]
    capacities: tuple[float, ...]
    seeds: tuple[int, ...] = (0,)
    skip_bad: int = 0
    conversations: int | None = None
    """Make an overlay of so many conversations of the archive at ``path``, one a seed."""
    window_s: float = 3600.0
    own_prefixes: bool = False
    """The conversations of an overlay share no blocks."""
    placebo: bool = False
    """Run policies that read labels a second time with labels shuffled."""
    hints: Hints | None = None
    threshold_tokens: float | None = None
    """Tail threshold; by default LRU's own 90th percentile at the same capacity."""
    slo_ms: float | None = None
    ttft_model: tuple[float, float] | None = None
    model: ModelShape | None = None
    whole_nodes: bool = False
    optional_caching: bool = False

    def random(self, placebo: bool) -> bool:
        """Whether a run depends on its seed."""
        return self.conversations is not None or placebo or self.hints is not None


@dataclass(frozen=True, slots=True)
class PreparedTrace:
    """One trace, read: where its compact copy is and what a pass over it says."""

    file: str
    seed: int
    requests: int
    distinct_blocks: int
    block_tokens: int
    capacities: tuple[int, ...]
    """In blocks, in the plan's order."""
    thresholds: tuple[float, ...]
    """Tail threshold in tokens at each capacity."""
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True)
class SweepTask:
    """One simulation."""

    trace: PreparedTrace
    choice: PolicyArm
    capacity: int
    """Index into the plan's capacities."""
    seed: int
    placebo: bool = False


@dataclass(slots=True)
class Sweep:
    """What a plan gave."""

    rows: list[dict[str, Any]]
    traces: list[PreparedTrace]
    """One a seed of the overlay, or one."""
    lru: list[LRUCurve]
    """LRU at every capacity, for each of ``traces``."""
    peak_memory_bytes: int
    """Of the largest process."""


def run_sweep(
    plan: SweepPlan, *, jobs: int, progress: Callable[[int, int, str], None] | None = None
) -> Sweep:
    """Run ``plan`` on up to ``jobs`` processes; ``progress(done, tasks, what)`` as it goes.

    Rows come ordered by seed, policy, placebo, capacity. Raises ``CanopyError`` for a trace or
    an option that is wrong, before anything long is done where that can be known.
    """
    for choice in plan.choices:
        _check(choice)
    report = progress or (lambda done, tasks, what: None)
    with tempfile.TemporaryDirectory(prefix="canopy-simulate-") as folder, _pool(jobs) as pool:
        seeds = plan.seeds if plan.conversations is not None else plan.seeds[:1]
        jobs_to_read = [(plan, seed, str(Path(folder) / f"{seed}.trace")) for seed in seeds]
        report(0, 0, "reading")
        read = sorted(_map(pool, prepare, jobs_to_read), key=lambda r: seeds.index(r[0].seed))
        traces = [trace for trace, _ in read]
        tasks = list(_tasks(plan, traces))
        done: dict[tuple[int, str, int, bool], dict[str, Any]] = {}
        report(0, len(tasks), "")
        for task, row in _map(pool, _run_task, [(plan, task) for task in tasks]):
            done[task.seed, task.choice.label, task.capacity, task.placebo] = row
            report(len(done), len(tasks), task.choice.label)
    rows = []
    for seed in plan.seeds:
        for choice, placebo in _variants(plan):
            drawn = seed if plan.random(placebo) else plan.seeds[0]
            for capacity in range(len(plan.capacities)):
                row = done[drawn, choice.label, capacity, placebo]
                rows.append({**row, "seed": seed})
    peaks = [t.peak_memory_bytes for t in traces] + [r["peak_memory_bytes"] for r in rows]
    return Sweep(rows, traces, [curve for _, curve in read], max(peaks))


def prepare(plan: SweepPlan, seed: int, file: str) -> tuple[PreparedTrace, LRUCurve]:
    """Read the plan's trace (its overlay with ``seed``) and leave a compact copy in ``file``."""
    trace = CompactTrace(_records(plan, seed))
    if not len(trace):
        raise CanopyError(f"{plan.path!r} has no requests; give a trace that has")
    curve = lru_curve(trace)
    distinct = curve.distinct_blocks
    capacities = tuple(capacity_blocks(c, distinct) for c in plan.capacities)
    if plan.threshold_tokens is None:
        uncached = lru_uncached_tokens(trace, set(capacities))
        percentiles = {c: np.percentile(left, _TAIL_PERCENTILE) for c, left in uncached.items()}
        thresholds = tuple(float(percentiles[c]) for c in capacities)
    else:
        thresholds = (plan.threshold_tokens,) * len(capacities)
    with open(file, "wb") as out:
        pickle.dump(trace, out, protocol=pickle.HIGHEST_PROTOCOL)
    prepared = PreparedTrace(
        file=file,
        seed=seed,
        requests=len(trace),
        distinct_blocks=distinct,
        block_tokens=trace[0].block_tokens,
        capacities=capacities,
        thresholds=thresholds,
        peak_memory_bytes=_peak_memory_bytes(),
    )
    return prepared, curve


def capacity_blocks(capacity: float, distinct_blocks: int) -> int:
    """Blocks of a capacity as a user gives it: a fraction of the distinct blocks, or blocks."""
    return max(1, round(capacity * distinct_blocks)) if capacity < 1 else int(capacity)


def simulate_task(plan: SweepPlan, task: SweepTask) -> dict[str, Any]:
    """One row of the result."""
    trace, future = _load(task.trace.file, task.choice.hindsight)
    capacity, threshold = (
        task.trace.capacities[task.capacity],
        task.trace.thresholds[task.capacity],
    )
    policy = _build(task.choice, future, threshold)
    result = simulate(
        trace,
        policy,
        capacity,
        threshold_tokens=threshold,
        model=plan.model,
        placebo_seed=task.seed if task.placebo else None,
        hints=plan.hints and _seeded(plan.hints, task.seed),
        slo_ms=plan.slo_ms,
        ttft_model=plan.ttft_model,
        whole_nodes=plan.whole_nodes,
        optional_caching=plan.optional_caching,
    )
    given = plan.capacities[task.capacity]
    return {
        "trace": plan.path,
        "format": plan.format,
        "policy": task.choice.label,
        "policy_config": asdict(policy.config),
        "placebo": task.placebo,
        "capacity_blocks": capacity,
        "capacity_fraction": given if given < 1 else capacity / task.trace.distinct_blocks,
        "seed": task.seed,
        "requests": result.requests,
        "distinct_blocks": task.trace.distinct_blocks,
        "block_tokens": task.trace.block_tokens,
        "block_hit_ratio": result.block_hit_ratio,
        "token_hit_ratio": result.token_hit_ratio,
        "uncached_tokens_p50": result.uncached_tokens_p50,
        "uncached_tokens_p90": result.uncached_tokens_p90,
        "uncached_tokens_p95": result.uncached_tokens_p95,
        "uncached_tokens_p99": result.uncached_tokens_p99,
        "tel_threshold_tokens": threshold,
        "tel_tokens": result.tel_tokens,
        "slo_violations": result.slo_violations,
        "kv_bytes_saved": result.kv_bytes_saved,
        "prefill_flops_saved": result.flops_saved,
        "prefill_flops_saved_ratio": result.flops_saved_ratio,
        "evictions": result.evictions,
        "evicted_blocks": result.evicted_blocks,
        "seconds": result.seconds,
        "peak_memory_bytes": _peak_memory_bytes(),
    }


def _run_task(plan: SweepPlan, task: SweepTask) -> tuple[SweepTask, dict[str, Any]]:
    return task, simulate_task(plan, task)


def _records(plan: SweepPlan, seed: int) -> Iterable[TraceRequest]:
    if plan.conversations is None:
        return open_trace(plan.path, plan.format, skip_bad=plan.skip_bad)
    return overlay(
        plan.path,
        plan.conversations,
        plan.window_s,
        seed,
        skip_bad=plan.skip_bad,
        own_prefixes=plan.own_prefixes,
    )


def _variants(plan: SweepPlan) -> Iterator[tuple[PolicyArm, bool]]:
    for choice in plan.choices:
        yield choice, False
        if plan.placebo and choice.policy.reads_labels:
            yield choice, True


def _tasks(plan: SweepPlan, traces: list[PreparedTrace]) -> Iterator[SweepTask]:
    """Every simulation once, those of one trace together: a worker keeps the last trace."""
    by_seed = {trace.seed: trace for trace in traces}
    for at, seed in enumerate(plan.seeds):
        trace = by_seed.get(seed, traces[0])
        for choice, placebo in _variants(plan):
            if at == 0 or plan.random(placebo):
                for capacity in range(len(plan.capacities)):
                    yield SweepTask(trace, choice, capacity, seed, placebo)


def _check(choice: PolicyArm) -> None:
    if not choice.hindsight and choice.name not in policy_names():
        names = ", ".join((*policy_names(), *hindsight_names()))
        raise CanopyError(f"unknown policy {choice.name!r}; choose from: {names}")
    _build(choice, Future([]), 0.0)


def _build(choice: PolicyArm, future: Future | None, threshold_tokens: float) -> Policy:
    config = dict(choice.config)
    if choice.policy.takes_tail_target and not any(key in config for key in TAIL_TARGETS):
        # The tail that the run is measured by.
        config["threshold_tokens"] = threshold_tokens
    if not choice.hindsight:
        return make_policy(choice.name, config)
    assert future is not None, "a hindsight policy needs the future"
    return make_hindsight(choice.name, future, config)


def _seeded(hints: Hints, seed: int) -> Hints:
    return Hints(hints.share, hints.accuracy, hints.over, hints.returns, seed)


_loaded: dict[str, tuple[CompactTrace, Future | None]] = {}
"""The last trace this process worked on."""


def _load(file: str, hindsight: bool) -> tuple[CompactTrace, Future | None]:
    if file not in _loaded:
        _loaded.clear()
        with open(file, "rb") as copy:
            _loaded[file] = (pickle.load(copy), None)
    trace, future = _loaded[file]
    if hindsight and future is None:
        future = Future(trace)
        _loaded[file] = (trace, future)
    return trace, future


def _peak_memory_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def _pool(jobs: int) -> Iterator[Executor | None]:
    """Spawned processes, or ``None`` for one job: that runs here."""
    if jobs <= 1:
        yield None
        _loaded.clear()
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(max_workers=jobs, mp_context=context)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _map(
    pool: Executor | None, function: Callable[..., Any], arguments: list[tuple[Any, ...]]
) -> Iterator[Any]:
    """Results of ``function`` as they come; the first error ends it."""
    if pool is None:
        yield from (function(*args) for args in arguments)
        return
    try:
        for future in as_completed([pool.submit(function, *args) for args in arguments]):
            yield future.result()
    except BrokenProcessPool:
        raise CanopyError(
            "a simulation process was killed, most likely for memory; use fewer --jobs"
        ) from None
