"""Run one simulation in a worker process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from canopy_lab.group_ttl.learn import LearningOptions, learn
from canopy_lab.group_ttl.paths import Paths, paths_of
from canopy_lab.plan.disk_class import GIB
from canopy_lab.plan.prices import Prices
from canopy_lab.plan.space import GROUP, Configuration
from canopy_lab.plan.system import Engine, metrics_of, system_of
from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.system.result import SystemResult
from canopy_lab.sim.system.run import simulate_system
from canopy_lab.sim.system.workload import Workload
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.ttl.table import TRACE_HASH, TTLTable

MIN_LIFETIME_S = 60.0
"""Minimum lifetime of a plan, seconds."""


@dataclass(frozen=True, slots=True)
class SimulationTask:
    """A configuration to simulate at a load (1: the trace's own)."""

    configuration: Configuration
    load: float = 1.0


@dataclass(slots=True)
class PlanInputs:
    """Inputs that all tasks of a plan share."""

    trace: CompactTrace
    engine: Engine
    prices: Prices
    policy_configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    hash: str = TRACE_HASH
    """Origin of the trace's block ids (``ttl.table.HASHES``)."""
    _paths: dict[float, Paths] = field(default_factory=dict)
    _tables: dict[tuple[float, float], TTLTable] = field(default_factory=dict)
    _workloads: dict[float, Workload] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the inputs only, without derived tables."""
        inputs = (self.trace, self.engine, self.prices, self.policy_configs, self.hash)
        return PlanInputs, inputs

    def with_trace(self, trace: CompactTrace) -> PlanInputs:
        """Return the inputs for another trace, without derived tables."""
        return PlanInputs(trace, self.engine, self.prices, self.policy_configs, self.hash)

    def group_table(self, disk_gib: float, load: float = 1.0) -> TTLTable:
        """Return the TTLs (Kareto, Algorithm 2) for ``disk_gib`` of disk, all instances together."""
        key = (disk_gib, load)
        if key not in self._tables:
            if load not in self._paths:
                self._paths[load] = paths_of(at_load(self.trace, load), lambda r: r.category)
            paths = self._paths[load]
            # A plan is used for about the duration of its trace.
            learning = LearningOptions(refresh_s=max(paths.end_s - paths.start_s, MIN_LIFETIME_S))
            disk_tokens = disk_gib * GIB / self.engine.profile.kv_bytes_per_token
            self._tables[key] = learn(paths, disk_tokens, learning, self.hash).table
        return self._tables[key]

    def table_of(self, point: Configuration, load: float = 1.0) -> TTLTable | None:
        if point.ttl != GROUP or point.disk is None:
            return None
        disk_count = self.prices.disk_count(point.disk, point.instances)
        return self.group_table(point.disk_gib * disk_count, load)

    def learning_requests(self, load: float = 1.0) -> int:
        """Return the number of requests used to learn group TTLs."""
        return len(self._paths.get(load, self.trace))

    def loaded_workload(self, load: float = 1.0) -> Workload:
        """Return the workload at this load, prepared once for all its simulations."""
        if load not in self._workloads:
            self._workloads[load] = Workload(at_load(self.trace, load))
        return self._workloads[load]


def simulate_one(inputs: PlanInputs, task: SimulationTask) -> tuple[SystemResult, TTLTable | None]:
    """Run one simulation. Returns its result and its group TTLs."""
    point = task.configuration
    table = inputs.table_of(point, task.load)
    config = system_of(point, inputs.engine, inputs.prices, inputs.policy_configs, table)
    workload, profile = inputs.loaded_workload(task.load), inputs.engine.profile
    return simulate_system(workload, config, profile), table


def run_task(inputs: PlanInputs, task: SimulationTask) -> dict[str, Any]:
    """Return the metrics of one simulation."""
    result, table = simulate_one(inputs, task)
    metrics = metrics_of(result)
    if table is not None:
        metrics["ttl_table"] = {
            "groups": len(table.groups),
            "categories": len(table.categories),
            "residual_ttl_s": None if math.isinf(table.residual_ttl_s) else table.residual_ttl_s,
            "requests": inputs.learning_requests(task.load),
        }
    return metrics


def at_load(trace: Iterable[TraceRequest], load: float) -> Iterable[TraceRequest]:
    if load == 1.0:
        return trace
    return (replace(request, time_s=request.time_s / load) for request in trace)
