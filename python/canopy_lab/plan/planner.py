"""Make a whole plan: read, search, choose, check the neighbours and other loads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from canopy_lab.plan.choice import ChosenConfiguration, choose, extremes
from canopy_lab.plan.disk_class import GIB
from canopy_lab.plan.evaluate import Evaluator
from canopy_lab.plan.objective import OBJECTIVES, PlanRow, Scale
from canopy_lab.plan.prices import Prices
from canopy_lab.plan.request import PlanRequest
from canopy_lab.plan.sampled import SearchTarget, busiest_window, sampled_search
from canopy_lab.plan.search import SearchOptions, SearchResult, search
from canopy_lab.plan.settle import settle
from canopy_lab.plan.sizes import halved_sizes, round_size
from canopy_lab.plan.space import Configuration, Space
from canopy_lab.plan.system import Engine
from canopy_lab.plan.worker import PlanInputs
from canopy_lab.sim.compact import CompactTrace
from sglang_canopy.errors import CanopyError

GRID_STEPS = (16, 8)
"""Number of equal steps of DRAM and of disk added in the full grid."""
MAX_DRAM_GIB = 2048.0
"""Largest default DRAM of an instance: a machine of eight GPUs."""
BASELINE_SHARE = 0.25
"""Baseline's DRAM, as a share of the trace's distinct KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    request: PlanRequest
    space: Space
    result: SearchResult
    front: tuple[PlanRow, ...]
    """Non-dominated rows, quickest first."""
    baseline: PlanRow
    extremes: Mapping[str, PlanRow]
    choice: ChosenConfiguration
    sensitivity: Mapping[float, PlanRow]
    """The choice at other loads; 1.0 is the choice itself."""
    hypervolume: float
    """The front's volume, as a share of the box to the reference."""
    scale: Scale
    footprint_gib: float
    """KV of the trace's distinct blocks."""
    reusable_gib: float
    """KV of the blocks that more than one request contains."""
    grid_size: int
    simulated: int
    seconds: float

    @property
    def predicted(self) -> int:
        return sum(row.predicted for row in self.result.rows.values())


def make_space(
    request: PlanRequest,
    footprint_gib: float,
    prices: Prices,
    min_gib: float = 0.0,
    reusable_gib: float = math.inf,
) -> Space:
    """Return the initial search space for a trace of this footprint. Raises ``CanopyError``.

    Not tried are sizes below ``min_gib``, and host memory of all instances together beyond
    ``reusable_gib`` (``reusable_gib_of``), which no limit of the request raises.
    """
    host_gib = min(request.dram_gib or MAX_DRAM_GIB, footprint_gib, reusable_gib)
    dram_gib = host_gib / max(min(request.instances), 1)
    dram_sizes = halved_sizes(dram_gib, request.dram_levels, min_gib) if dram_gib > 0 else (0.0,)
    max_disk_gib = request.disk_gib or max(footprint_gib, 2.0**-10)
    disk_names = tuple(prices.disks) if request.disks is None else request.disks
    for name in disk_names:
        prices.disk(name)
    if request.disk_gib == 0 and disk_names:
        max_disk_gib = min(max_disk_gib, *(prices.disk(n).largest_gib / 2 for n in disk_names))
    disk_gib = halved_sizes(max_disk_gib, request.disk_levels, min_gib) if disk_names else (0.0,)
    for name in disk_names:
        prices.disk(name).bought_gib(disk_gib[-1])
    return Space(
        dram_gib=tuple(min(size, dram_gib) for size in dram_sizes),
        max_host_gib=host_gib,
        disk_gib=disk_gib,
        disks=disk_names,
        bandwidths_mib_s={n: pair for n in disk_names if (pair := prices.disk(n).bandwidths())},
        min_gib=min_gib,
        instances=request.instances,
        policy=request.policy,
        choices=request.choices,
    )


def baseline_of(request: PlanRequest, space: Space, footprint_gib: float) -> Configuration:
    """Return the fixed baseline of a plan: DRAM and no disk.

    The paper's baseline is 1,024 GB, for traces of two hours. This one scales with the trace: a
    quarter of the distinct KV, rounded up to a power of two, at most the space's host memory, divided
    by the first instance count.
    """
    instances = space.instances[0]
    power = math.ceil(math.log2(max(footprint_gib * BASELINE_SHARE, 2.0**-20)) - 1e-9)
    total_gib = min(2.0**power, space.max_host_gib)
    return replace(space.first_slices()[0], dram_gib=total_gib / instances, disk=None).normalised()


def make_plan(
    request: PlanRequest,
    inputs: PlanInputs,
    *,
    jobs: int = 1,
    progress: Callable[[str, int, int], None] | None = None,
) -> CapacityPlan:
    """Make a plan. Calls ``progress(stage, done, at most)``. Raises ``CanopyError``."""
    start_s = time.perf_counter()
    options = SearchOptions(evaluations=request.evaluations)
    footprint_gib = footprint_gib_of(inputs.trace, inputs.engine)
    min_gib = min_tier_gib(inputs.trace, inputs.engine)
    reusable_gib = reusable_gib_of(inputs.trace, inputs.engine)
    space = make_space(request, footprint_gib, inputs.prices, min_gib, reusable_gib)

    def report_progress(stage: str, done: int) -> None:
        if progress is not None:
            progress(stage, done, request.evaluations)

    with Evaluator(inputs, jobs=jobs) as evaluate:
        base = baseline_of(request, space, footprint_gib)
        if uses_sample(request, len(inputs.trace)):
            window = inputs.with_trace(busiest_window(inputs.trace, request.sample_requests))
            target = SearchTarget(OBJECTIVES, request.constraints, request.minimise, options)
            with Evaluator(window, jobs=jobs) as on_window:
                result = sampled_search(space, target, on_window, evaluate, [base], report_progress)
        else:
            result = search(
                space, OBJECTIVES, evaluate, bounds_of=evaluate.bounds_of, options=options,
                progress=report_progress,
            )  # fmt: skip
        baseline = result.rows.get(base) or evaluate([base])[0]
        choice, sensitivity = _choose_and_check(request, space, result, evaluate, report_progress)
    rows = list(result.rows.values())
    objective_matrix = OBJECTIVES.matrix(rows)
    scale = Scale.around(objective_matrix)
    front = [rows[i] for i in OBJECTIVES.front(rows)]
    front.sort(key=lambda row: tuple(OBJECTIVES.vector(row)))
    return CapacityPlan(
        request=request,
        space=space,
        result=result,
        front=tuple(front),
        baseline=baseline,
        extremes=extremes([*rows, baseline], baseline),
        choice=choice,
        sensitivity=sensitivity,
        hypervolume=scale.hypervolume(objective_matrix),
        scale=scale,
        footprint_gib=footprint_gib,
        reusable_gib=reusable_gib,
        grid_size=space.finer(*GRID_STEPS).count(),
        simulated=evaluate.simulation_count,
        seconds=time.perf_counter() - start_s,
    )


def _choose_and_check(
    request: PlanRequest,
    space: Space,
    result: SearchResult,
    evaluate: Evaluator,
    report_progress: Callable[[str, int], None],
) -> tuple[ChosenConfiguration, dict[float, PlanRow]]:
    """Choose among rows simulated on the whole trace; evaluate the neighbours of the choice.

    Adds rows to ``result``. Returns the choice, and its rows by load.
    """
    rows = [row for row in result.rows.values() if not row.predicted]
    choice = choose(rows, request.constraints, request.minimise)
    if request.checks == "off":
        return choice, {1.0: choice.row}
    report_progress("neighbours", len(rows))
    if len(rows) == len(result.rows):
        choice, seen = settle(choice, rows, request.constraints, request.minimise, space, evaluate)
        result.stages["neighbours"] = len(seen) - len(rows)
        result.rows = seen
    report_progress("other loads", len(result.rows))
    other_rows = evaluate.rows_at([(choice.row.configuration, load) for load in request.loads])
    loads = {1.0: choice.row, **dict(zip(request.loads, other_rows))}
    return choice, dict(sorted(loads.items()))


def uses_sample(request: PlanRequest, request_count: int) -> bool:
    """Return whether the search runs on a part of a trace of ``request_count`` requests."""
    return 0 < 2 * request.sample_requests < request_count


def footprint_gib_of(trace: CompactTrace, engine: Engine) -> float:
    """Return the GiB of KV of the trace's distinct blocks. Raises ``CanopyError`` if empty."""
    if not len(trace):
        raise CanopyError("the trace has no requests; give a trace with requests")
    tokens = trace.distinct_blocks * trace[0].block_tokens
    return tokens * engine.profile.kv_bytes_per_token / GIB


def reusable_gib_of(trace: CompactTrace, engine: Engine) -> float:
    """Return the GiB of KV of the blocks that more than one request contains."""
    tokens = trace.repeated_blocks * trace[0].block_tokens
    return tokens * engine.profile.kv_bytes_per_token / GIB


def min_tier_gib(trace: CompactTrace, engine: Engine) -> float:
    """Return the smallest tier size to try, GiB: the KV of a prompt of mean length."""
    tokens = sum(max(r.input_tokens, 1) for r in trace) / len(trace)
    return round_size(tokens * engine.profile.kv_bytes_per_token / GIB)


def to_json(plan: CapacityPlan, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``--json`` report. ``origin``: origin of the plan."""
    names = [m.key for m in OBJECTIVES.metrics]
    sign = [-1.0 if m.is_maximised else 1.0 for m in OBJECTIVES.metrics]

    def values_by_key(values: Iterable[float]) -> dict[str, float]:
        return {key: direction * float(value) for key, direction, value in zip(names, sign, values)}

    return {
        "format": "canopy-plan-report",
        "version": 1,
        "about": dict(origin),
        "objectives": [m.name for m in OBJECTIVES.metrics],
        "constraints": [c.text for c in plan.request.constraints],
        "evaluations": len(plan.result.rows),
        "grid_size": plan.grid_size,
        "stages": plan.result.stages,
        "left_to_gain": plan.result.remaining_gain if plan.predicted == 0 else None,
        "predicted": plan.predicted,
        "out_of_budget": plan.result.is_out_of_budget,
        "simulated": plan.simulated,
        "front": [row.to_json() for row in plan.front],
        "evaluated": [row.to_json() for row in plan.result.rows.values()],
        "baseline": plan.baseline.to_json(),
        "extremes": {name: row.to_json() for name, row in plan.extremes.items()},
        "chosen": plan.choice.row.to_json(),
        "feasible": plan.choice.is_feasible,
        "binding": [c.text for c in plan.choice.binding],
        "sensitivity": {f"{load:g}": row.to_json() for load, row in plan.sensitivity.items()},
        "hypervolume": plan.hypervolume,
        "hypervolume_reference": values_by_key(plan.scale.reference),
        "hypervolume_best": values_by_key(plan.scale.best),
        "footprint_gib": plan.footprint_gib,
        "reusable_gib": plan.reusable_gib,
        "seconds": plan.seconds,
    }
