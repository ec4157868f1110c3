"""A whole plan: read, search, choose, check the neighbours and other loads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.plan.choice import (
    ChosenConfiguration,
    Constraint,
    choose,
    configuration_of,
    extremes,
    why_not,
)
from sglang_canopy.plan.evaluate import Evaluator
from sglang_canopy.plan.objective import DEFAULT_OBJECTIVES, METRICS, Metric, Objectives, Row, Scale
from sglang_canopy.plan.prices import GIB, Prices
from sglang_canopy.plan.search import SearchOptions, SearchResult, full_grid, search
from sglang_canopy.plan.space import TTL, Configuration, Space, sizes
from sglang_canopy.plan.system import Engine
from sglang_canopy.plan.worker import PlanInputs
from sglang_canopy.sim.compact import CompactTrace

LOADS = (0.8, 1.2)
"""Sensitivity: the same requests at these rates."""
DRAM_LEVELS, DISK_LEVELS = 9, 6
DRAM_MOST_GIB = 2048.0
"""Of one instance: what a machine of eight GPUs has."""
BASELINE_SHARE = 0.25
"""The fixed baseline's DRAM, as a share of the trace's distinct KV."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What to plan. Sizes of 0 or empty choices are worked out from the trace and the prices."""

    disks: tuple[str, ...] | None = None
    """``None``: every class of the price list."""
    ttls: tuple[TTL, ...] = (None, "group")
    instances: tuple[int, ...] = (1,)
    device_policies: tuple[str, ...] = ("lru",)
    host_policies: tuple[str, ...] = ("lru",)
    disk_policies: tuple[str, ...] = ("lru",)
    dram_most_gib: float = 0.0
    disk_most_gib: float = 0.0
    dram_levels: int = DRAM_LEVELS
    disk_levels: int = DISK_LEVELS
    baseline_gib: float = 0.0
    """DRAM of the fixed baseline, all instances together."""
    objectives: tuple[str, ...] = DEFAULT_OBJECTIVES
    constraints: tuple[Constraint, ...] = ()
    minimise: Metric = METRICS["cost"]
    grid: bool = False
    """The full grid instead of the search."""
    options: SearchOptions = field(default_factory=SearchOptions)
    checks: bool = True
    """Neighbours of the choice and other loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A neighbour of the choice."""

    row: Row
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """What was found."""

    request: PlanRequest
    space: Space
    found: SearchResult
    front: tuple[Row, ...]
    """Non-dominated rows, quickest first."""
    baseline: Row
    extremes: Mapping[str, Row]
    choice: ChosenConfiguration
    neighbours: tuple[Rejected, ...]
    sensitivity: Mapping[float, Row]
    """The choice at other loads; 1.0 is the choice itself."""
    hypervolume: float
    """Of the front, as a share of the box from the best to the reference point."""
    scale: Scale
    footprint_gib: float
    """KV of the trace's distinct blocks."""
    grid_size: int
    simulated: int
    from_cache: int
    trace_hash: str
    seconds: float


def make_space(request: PlanRequest, footprint_gib: float, prices: Prices) -> Space:
    """The lattice for a trace of this footprint. Raises ``CanopyError``."""
    dram = request.dram_most_gib or min(footprint_gib, DRAM_MOST_GIB)
    dram = max(dram / max(min(request.instances), 1), 2.0**-10)
    disk = request.disk_most_gib or max(footprint_gib, 2.0**-10)
    names = tuple(prices.disks) if request.disks is None else request.disks
    for name in names:
        prices.disk(name)
    if request.disk_most_gib == 0 and names:
        disk = min(disk, *(prices.disk(name).largest_gib / 2 for name in names))
    disk_gib = sizes(disk, request.disk_levels) if names else (0.0,)
    for name in names:
        prices.disk(name).bought_gib(disk_gib[-1])
    return Space(
        dram_gib=sizes(dram, request.dram_levels),
        disk_gib=disk_gib,
        disks=names,
        ttls=request.ttls,
        instances=request.instances,
        device_policies=request.device_policies,
        host_policies=request.host_policies,
        disk_policies=request.disk_policies,
    )


def baseline_of(request: PlanRequest, space: Space, footprint_gib: float) -> Configuration:
    """The fixed set-up that a plan is compared with: DRAM and no disk.

    The paper's is 1,024 GB, for traces of two hours. This one scales with the trace: a
    quarter of the distinct KV, rounded to a power of two, shared out over the first instance count.
    """
    instances = space.instances[0]
    total = request.baseline_gib or sizes(footprint_gib * BASELINE_SHARE, 1)[-1]
    return Configuration(instances, dram_gib=total / instances).normal()


def make_plan(
    request: PlanRequest,
    work: PlanInputs,
    *,
    jobs: int = 1,
    backend: str = "local",
    cache: Path | str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> CapacityPlan:
    """Plan. ``progress(stage, done, at most)`` as it goes. Raises ``CanopyError``."""
    started = time.perf_counter()
    objectives = Objectives.of(request.objectives)
    footprint_gib = footprint(work.trace, work.engine)
    space = make_space(request, footprint_gib, work.prices)
    grid_size = len(space.grid())
    with Evaluator(work, jobs=jobs, backend=backend, cache=cache) as evaluate:
        say = progress or (lambda stage, done, most: None)
        say("baseline", 0, grid_size)
        baseline = evaluate([baseline_of(request, space, footprint_gib)])[0]
        if request.grid:
            say("grid", 0, grid_size)
            found = full_grid(space, evaluate)
        else:
            most = max(1, int(request.options.budget_share * grid_size))
            found = search(
                space,
                objectives,
                evaluate,
                known=evaluate.known,
                options=request.options,
                progress=lambda stage, done: say(stage, done, most),
            )
        rows = list(found.rows.values())
        choice = choose(rows, request.constraints, request.minimise)
        neighbours: list[Rejected] = []
        sensitivity: dict[float, Row] = {1.0: choice.row}
        if request.checks:
            say("neighbours", len(rows), len(rows))
            choice, neighbours, seen = _settle(choice, rows, request, space, evaluate)
            found.stages["neighbours"] = len(seen) - len(rows)
            found.rows, rows = seen, list(seen.values())
            say("other loads", len(rows), len(rows))
            sensitivity = {1.0: choice.row}
            for load in LOADS:
                sensitivity[load] = evaluate([configuration_of(choice.row)], load)[0]
        points = objectives.matrix(rows)
        scale = Scale.of(points)
        front = [rows[i] for i in objectives.front(rows)]
        front.sort(key=lambda row: tuple(objectives.vector(row)))
        return CapacityPlan(
            request=request,
            space=space,
            found=found,
            front=tuple(front),
            baseline=baseline,
            extremes=extremes([*rows, baseline], baseline),
            choice=choice,
            neighbours=tuple(neighbours),
            sensitivity=dict(sorted(sensitivity.items())),
            hypervolume=scale.hypervolume(points),
            scale=scale,
            footprint_gib=footprint_gib,
            grid_size=grid_size,
            simulated=evaluate.simulated,
            from_cache=evaluate.from_cache,
            trace_hash=evaluate.trace_hash,
            seconds=time.perf_counter() - started,
        )


def footprint(trace: CompactTrace, engine: Engine) -> float:
    """GiB of KV of the trace's distinct blocks. Raises ``CanopyError`` for an empty trace."""
    if not len(trace):
        raise CanopyError("the trace has no requests; give one that has")
    tokens = trace.distinct_blocks * trace[0].block_tokens
    return tokens * engine.profile.kv_bytes_per_token / GIB


def _settle(
    choice: ChosenConfiguration,
    rows: list[Row],
    request: PlanRequest,
    space: Space,
    evaluate: Evaluator,
) -> tuple[ChosenConfiguration, list[Rejected], dict[Configuration, Row]]:
    """Look at the neighbours; move to a better one as long as there is one."""
    seen: dict[Configuration, Row] = {configuration_of(row): row for row in rows}
    for _ in range(len(space.dram_gib) + len(space.disk_gib)):
        chosen = configuration_of(choice.row)
        around = space.neighbours(chosen)
        beside = evaluate(around)
        seen.update(zip(around, beside))
        better = choose(list(seen.values()), request.constraints, request.minimise)
        if configuration_of(better.row) == chosen:
            rejected = [
                Rejected(
                    row=row, why=why_not(choice.row, row, request.constraints, request.minimise)
                )
                for row in beside
            ]
            return better, rejected, seen
        choice = better
    return choice, [], seen


def to_json(plan: CapacityPlan, about: Mapping[str, Any]) -> dict[str, Any]:
    """What ``--json`` writes. ``about`` says where the plan comes from."""
    objectives = Objectives.of(plan.request.objectives)
    names = [m.key for m in objectives.metrics]
    sign = [-1.0 if m.maximise else 1.0 for m in objectives.metrics]

    def point(values: Iterable[float]) -> dict[str, float]:
        return {n: s * float(v) for n, s, v in zip(names, sign, values)}

    return {
        "format": "canopy-plan-report",
        "version": 1,
        "about": dict(about),
        "objectives": list(plan.request.objectives),
        "constraints": [c.text for c in plan.request.constraints],
        "evaluations": len(plan.found.rows),
        "grid_size": plan.grid_size,
        "stages": plan.found.stages,
        "pruned": plan.found.pruned,
        "out_of_budget": plan.found.out_of_budget,
        "simulated": plan.simulated,
        "from_cache": plan.from_cache,
        "front": [dict(row) for row in plan.front],
        "evaluated": [dict(row) for row in plan.found.rows.values()],
        "baseline": dict(plan.baseline),
        "extremes": {name: dict(row) for name, row in plan.extremes.items()},
        "chosen": dict(plan.choice.row),
        "feasible": plan.choice.feasible,
        "binding": [c.text for c in plan.choice.binding],
        "neighbours": [{**n.row, "why_not": n.why} for n in plan.neighbours],
        "sensitivity": {f"{load:g}": dict(row) for load, row in plan.sensitivity.items()},
        "hypervolume": plan.hypervolume,
        "hypervolume_reference": point(plan.scale.reference),
        "hypervolume_best": point(plan.scale.best),
        "footprint_gib": plan.footprint_gib,
        "seconds": plan.seconds,
    }
