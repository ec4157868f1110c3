"""Simulate many policies at many capacities over many seeds, in parallel processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.driver import simulate
from canopy_lab.sim.hindsight import hindsight_class, hindsight_names, make_hindsight
from canopy_lab.sim.hindsight.future import Future
from canopy_lab.sim.requests import SimulatedHints
from canopy_lab.sim.system.engine_profile import EngineProfile, load_profile
from canopy_lab.sim.workers import Workers
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import TAIL_TARGETS, Policy
from sglang_canopy.policy.registry import make_policy, policy_class, policy_names, simulated_names


def prefill_s(
    profile: EngineProfile, trace: Sequence[TraceRequest], uncached_tokens: Sequence[int]
) -> float:
    """Return the prefill seconds of requests with these uncached tokens, at least one each."""
    total = 0.0
    for record, uncached in zip(trace, uncached_tokens, strict=True):
        computed = max(uncached, 1)
        total += profile.prefill_batch_s([(computed, max(record.input_tokens - computed, 0))])
    return total


PREFILL_PROFILE = "llama-3.1-8b-h100"
"""Profile of the prefill seconds; between policies only its ratio of attention to the rest matters."""


@dataclass(frozen=True, slots=True)
class PolicyArm:
    """A policy to run."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    whole_nodes: bool = False
    """Evict whole nodes, as SGLang's own policies do."""

    @property
    def policy_type(self) -> type[Policy]:
        return hindsight_class(self.name) if self.is_hindsight else policy_class(self.name)

    @property
    def is_hindsight(self) -> bool:
        return self.name in hindsight_names()


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """Parameters of a sweep. Capacities below 1 are fractions of the trace's distinct blocks."""

    arms: tuple[PolicyArm, ...]
    capacities: tuple[float, ...]
    seeds: tuple[int, ...] = (0,)
    placebo: bool = False
    """Also run policies that read labels with another request's labels."""
    hints: SimulatedHints | None = None


@dataclass(frozen=True, slots=True)
class SweepTask:
    arm: PolicyArm
    capacity_index: int
    """Index into the plan's capacities."""
    seed: int
    is_placebo: bool = False


class SweepInputs:
    """Inputs shared by all simulations of a sweep."""

    def __init__(self, plan: SweepPlan, trace: CompactTrace) -> None:
        if not len(trace):
            raise CanopyError("the trace has no requests; give a trace with requests")
        self.plan, self.trace = plan, trace
        distinct = trace.distinct_blocks
        self.capacities = tuple(capacity_blocks(c, distinct) for c in plan.capacities)
        self.thresholds = tuple(
            simulate(trace, make_policy("lru"), blocks).uncached_tokens_p90
            for blocks in self.capacities
        )
        """Tail threshold at each capacity: LRU's P90 of the uncached tokens."""
        self._future: Future | None = None
        self.profile = load_profile(PREFILL_PROFILE)

    def future(self) -> Future:
        """Return the trace's future, computed once per process."""
        self._future = self._future or Future(self.trace)
        return self._future


def run_sweep(
    plan: SweepPlan,
    trace: CompactTrace,
    *,
    jobs: int,
    progress: Callable[[str, int, int], None] = lambda what, rows, tasks: None,
) -> list[dict[str, Any]]:
    """Return one row per simulation, ordered by seed, policy, placebo, capacity.

    Calls ``progress(name, done, tasks)``. Raises ``CanopyError`` for an invalid option before the
    first simulation.
    """
    for arm in plan.arms:
        _check_arm(arm)
    requested_tasks = list(_tasks(plan))
    # A run without random draws is equal for all seeds.
    tasks = list(dict.fromkeys(_representative(plan, task) for task in requested_tasks))
    rows: dict[SweepTask, dict[str, Any]] = {}
    progress("simulating", 0, len(tasks))
    with Workers(SweepInputs(plan, trace), jobs) as workers:
        for index, row in workers.map(simulate_task, tasks):
            rows[tasks[index]] = row
            progress(tasks[index].arm.name, len(rows), len(tasks))
    return [{**rows[_representative(plan, task)], "seed": task.seed} for task in requested_tasks]


def capacity_blocks(capacity: float, distinct_blocks: int) -> int:
    """Return the blocks of a user's capacity: a fraction of the distinct blocks, or blocks."""
    return max(1, round(capacity * distinct_blocks)) if capacity < 1 else int(capacity)


def simulate_task(inputs: SweepInputs, task: SweepTask) -> dict[str, Any]:
    plan = inputs.plan
    fraction_or_blocks = plan.capacities[task.capacity_index]
    capacity = inputs.capacities[task.capacity_index]
    threshold_tokens = inputs.thresholds[task.capacity_index]
    future = inputs.future() if task.arm.is_hindsight else None
    policy = _build_policy(task.arm, future, threshold_tokens)
    result = simulate(
        inputs.trace,
        policy,
        capacity,
        threshold_tokens=threshold_tokens,
        placebo_seed=task.seed if task.is_placebo else None,
        hints=None if plan.hints is None else replace(plan.hints, seed=task.seed),
        whole_nodes=task.arm.whole_nodes,
    )
    distinct = inputs.trace.distinct_blocks
    columns = (
        *("requests", "block_hit_ratio", "token_hit_ratio", "uncached_tokens_p50"),
        *("uncached_tokens_p90", "uncached_tokens_p95", "uncached_tokens_p99", "tel_tokens"),
        *("slo_violations", "evictions", "evicted_blocks", "seconds"),
    )
    return {
        "policy": task.arm.name,
        "policy_config": asdict(policy.config),
        "placebo": task.is_placebo,
        "capacity_blocks": capacity,
        "capacity_fraction": fraction_or_blocks if fraction_or_blocks < 1 else capacity / distinct,
        "seed": task.seed,
        "distinct_blocks": distinct,
        "block_tokens": inputs.trace[0].block_tokens,
        "tel_threshold_tokens": threshold_tokens,
        **{name: getattr(result, name) for name in columns},
        "prefill_s": prefill_s(inputs.profile, inputs.trace, result.uncached_tokens),
        "prefill_profile": PREFILL_PROFILE,
    }


def _tasks(plan: SweepPlan) -> Iterator[SweepTask]:
    for seed in plan.seeds:
        for arm in plan.arms:
            placebos = (False, True) if plan.placebo and arm.policy_type.reads_labels else (False,)
            for placebo in placebos:
                for capacity_index in range(len(plan.capacities)):
                    yield SweepTask(arm, capacity_index, seed, placebo)


def _representative(plan: SweepPlan, task: SweepTask) -> SweepTask:
    """Return the task that represents all tasks with an equal result."""
    is_random = task.is_placebo or plan.hints is not None
    return task if is_random else replace(task, seed=plan.seeds[0])


def _check_arm(arm: PolicyArm) -> None:
    if not arm.is_hindsight and arm.name not in {*policy_names(), *simulated_names()}:
        names = ", ".join((*simulated_names(), *hindsight_names()))
        raise CanopyError(f"unknown policy {arm.name!r}; choose from: {names}")
    _build_policy(arm, Future([]), 0.0)


def _build_policy(arm: PolicyArm, future: Future | None, threshold_tokens: float) -> Policy:
    config = dict(arm.config)
    if arm.policy_type.takes_tail_target and not any(key in config for key in TAIL_TARGETS):
        # Use the tail threshold of the run's evaluation.
        config["threshold_tokens"] = threshold_tokens
    if not arm.is_hindsight:
        return make_policy(arm.name, config)
    assert future is not None, "a hindsight policy needs the future"
    return make_hindsight(arm.name, future, config)
