"""Search for the front, after Algorithm 1 of Kareto (arXiv 2603.08739, section 4.2).

The paper has the first three of these four steps, without thresholds:

1. *Coarse grid*: a few sizes of DRAM times a few sizes of disk, per class.
2. *Expansion*: along DRAM while a step still gains ``MARGINAL_GAIN`` in a performance objective;
   again at the end, on series that midpoints have made.
3. *Midpoints* (``size_series.py``): between any two adjacent evaluated sizes of DRAM, disk or bandwidth.
   Midpoints that could add most to the front, and at which the objectives curve most, come first.
   Midpoints may be off the coarse grid, down to the resolution of sizes (``sizes.py``).
4. *Remaining gain*: a midpoint is at best as good as the better of its two neighbours, at its own
   price, which is known without simulation. The search ends when all midpoints together, each at
   its best, would add less than ``tolerance`` to the dominated volume.

Choices that are not sizes (TTL, policies, SGLang's settings) are tried on points of the front only:
first on a few points, and on the others if that helped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from canopy_lab.plan.objective import Objectives, PlanRow, Scale
from canopy_lab.plan.size_series import LowerBounds, Midpoint, midpoints, series_of
from canopy_lab.plan.space import KNOBS, Configuration, Knob, Space, slice_of

Evaluate = Callable[[Sequence[Configuration]], Sequence[PlanRow]]

_BATCH_SIZE = 8
"""Midpoints per round. Fixed: results must not depend on the processes."""
_CHOICES_TOLERANCES = 4.0
"""Remaining gain, in tolerances, at which choices are tried."""
MARGINAL_GAIN = 0.01
"""Minimum gain of a DRAM step, as a share of the range."""
PROBE_COUNT = 3
"""Points of the front on which a choice is tried first."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Stopping criteria. Shares are of the volume that the front dominates."""

    tolerance: float = 0.02
    """Remaining gain from further sizes at which the search ends."""
    evaluations: int = 400
    """Maximum number of evaluations. The result reports the remaining gain."""


@dataclass(slots=True)
class SearchResult:
    """Evaluated configurations, in order, and the reason for the end."""

    rows: dict[Configuration, PlanRow] = field(default_factory=dict)
    stages: dict[str, int] = field(default_factory=dict)
    """Evaluations by step of the algorithm."""
    remaining_gain: float = 0.0
    """Largest gain from further sizes, as a share of the dominated volume."""
    budget: int = 0
    is_out_of_budget: bool = False


def search(
    space: Space,
    objectives: Objectives,
    evaluate: Evaluate,
    *,
    bounds_of: LowerBounds | None = None,
    options: SearchOptions | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> SearchResult:
    """Approximate the front of ``space``. Deterministic.

    ``evaluate`` receives batches of new configurations, and may evaluate a batch in parallel.
    """
    options = options or SearchOptions()
    run = _Search(space, objectives, evaluate, bounds_of, options, progress)
    run.evaluate_grid()
    run.expand()
    if any(len(space.values(knob)) > 1 for knob in KNOBS):
        run.refine(options.tolerance * _CHOICES_TOLERANCES)
        run.try_choices()
    run.refine(options.tolerance)
    # Midpoints make series that the coarse grid lacks (with less bandwidth). These series end at the
    # coarse grid's sizes, so expand them too.
    while run.expand():
        run.refine(options.tolerance)
    return run.result


class _Search:
    def __init__(
        self,
        space: Space,
        objectives: Objectives,
        evaluate: Evaluate,
        bounds_of: LowerBounds | None,
        options: SearchOptions,
        progress: Callable[[str, int], None] | None,
    ) -> None:
        self.space, self.objectives, self.options = space, objectives, options
        self._evaluate, self._bounds_of, self._progress = evaluate, bounds_of, progress
        self.result = SearchResult(budget=options.evaluations)
        self._start_slices = space.first_slices()
        self._slices: set[Configuration] = set()
        self._expanded_series: set[tuple[Configuration, float]] = set()
        """Expanded series, each with the last DRAM size before the expansion."""
        for base in self._start_slices:
            self._allow_slices(base)

    def evaluate_grid(self) -> None:
        """Evaluate the coarse grid (step 1)."""
        drams, disks = self.space.dram_gib, self.space.disk_gib
        middle, largest = len(drams) // 2, len(disks) - 1
        grid = []
        for base in self._start_slices:
            # Include the largest DRAM, because caches have cliffs: nothing is gained until the
            # working set fits, and smaller steps do not show it.
            for index in sorted({0, min(1, middle), middle, len(drams) - 1}):
                grid.append(self.space.resized(base, drams[index], 0.0))
            *slower, fastest = self.space.bandwidths(base.disk)
            for disk in sorted({(largest + 1) // 2, largest} - {0}):
                for index in sorted({min(1, middle), middle}):
                    grid.append(self.space.resized(base, drams[index], disks[disk], fastest))
            for mib_s in slower:
                grid.append(self.space.resized(base, drams[middle], disks[largest], mib_s))
        self._evaluate_new("coarse", grid)

    def expand(self) -> int:
        """Evaluate the next DRAM size of series whose last step gained (step 2); return how many."""
        dram_sizes, expanded, evaluations = self.space.dram_gib, self._expanded_series, 0
        while not self.result.is_out_of_budget:
            scale, configurations = self._scale(), []
            for series in series_of(self.result.rows, self.space, self._slices):
                if series.axis != "dram_gib" or series.base.disk is None or len(series.by_size) < 2:
                    continue
                (_, previous), (size, latest) = series.by_size[-2:]
                larger = (replace(series.base, dram_gib=d) for d in dram_sizes if d > size)
                next_points = [c for c in larger if self.space.fits(c)]
                if not next_points or (series.base, size) in expanded:
                    continue
                expanded.add((series.base, size))
                gain = scale(self._vector(previous)) - scale(self._vector(latest))
                if gain.max() >= MARGINAL_GAIN:
                    configurations.append(next_points[0])
            added = self._evaluate_new("expansion", configurations)
            evaluations += added
            if not added:
                break
        return evaluations

    def refine(self, tolerance: float) -> None:
        """Evaluate midpoints until the remaining gain is below ``tolerance`` (steps 3 and 4)."""
        while True:
            candidates = self._midpoints()
            self.result.remaining_gain = self._remaining_gain(candidates)
            if self.result.remaining_gain <= tolerance:
                self.result.is_out_of_budget = False
                return
            batch = sorted(candidates, key=lambda m: -m.priority)[:_BATCH_SIZE]
            if not self._evaluate_new("midpoints", [m.configuration for m in batch]):
                return

    def try_choices(self) -> None:
        """Try TTLs, policies and settings on a few points; if that helped, on the whole front."""
        for knob in KNOBS:
            name = knob.name
            for value in self.space.values(knob)[1:]:
                probes = self._probes(knob)
                if not probes:
                    continue
                volume = self._volume()
                original_of = {replace(c, **{name: value}).normalised(): c for c in probes}
                self._evaluate_new(name, original_of)
                pairs = [(old, new) for new, old in original_of.items() if new in self.result.rows]
                helpful = [new for old, new in pairs if self._gain(old, new) > MARGINAL_GAIN]
                if self._volume() - volume <= self.options.tolerance and not helpful:
                    continue
                front = [replace(c, **{name: value}) for c in self._front() if knob.applies(c)]
                for c in (*front, *helpful):
                    self._allow_slices(c)
                self._evaluate_new(name, front)

    def _allow_slices(self, base: Configuration) -> None:
        """Allow refinement of series with the choices of ``base``."""
        self._slices.add(slice_of(base))
        self._slices.add(slice_of(replace(base, disk_gib=0.0).normalised()))

    def _probes(self, knob: Knob) -> list[Configuration]:
        """Return points on which a choice is tried: some of the front, and the largest disks.

        The front may barely use a tier that a better choice would make worth its price.
        """
        front = [c for c in self._front() if knob.applies(c)]
        indices = np.linspace(0, len(front) - 1, min(PROBE_COUNT, len(front)))
        probes = dict.fromkeys(front[round(i)] for i in indices)
        for disk in self.space.disks if knob.tier == "disk" else ():
            rows = [c for c in self.result.rows if c.disk == disk]
            if rows:
                gib = max(c.disk_gib for c in rows)
                dram_sizes = sorted(c.dram_gib for c in rows if c.disk_gib == gib)
                for dram in sorted({dram_sizes[0], dram_sizes[-1]}):
                    # The first such row has the first value of every other choice.
                    probes[next(c for c in rows if (c.disk_gib, c.dram_gib) == (gib, dram))] = None
        return list(probes)

    def _gain(self, original: Configuration, changed: Configuration) -> float:
        """Return the largest gain of any objective, as a share of its range."""
        scale = self._scale()
        return float((scale(self._vector(original)) - scale(self._vector(changed))).max())

    def _evaluate_new(self, stage: str, candidates: Iterable[Configuration | None]) -> int:
        """Evaluate the new configurations in ``candidates`` within the budget; return their number."""
        new = [c for c in dict.fromkeys(candidates) if c is not None and c not in self.result.rows]
        budget_left = self.result.budget - len(self.result.rows)
        if len(new) > budget_left:
            self.result.is_out_of_budget = True
            new = new[:budget_left]
        if not new:
            return 0
        self.result.rows.update(zip(new, self._evaluate(new)))
        self.result.stages[stage] = self.result.stages.get(stage, 0) + len(new)
        if self._progress is not None:
            self._progress(stage, len(self.result.rows))
        return len(new)

    def _midpoints(self) -> list[Midpoint]:
        rows, scale = self.result.rows, self._scale()
        all_series = series_of(rows, self.space, self._slices)
        return midpoints(all_series, rows, self.objectives, scale, self.space, self._bounds_of)

    def _remaining_gain(self, candidates: Sequence[Midpoint]) -> float:
        """Return the gain of all midpoints at their best, as a share of the volume."""
        if not candidates:
            return 0.0
        scale, points = self._scale(), self.objectives.matrix(self.result.rows.values())
        volume = scale.hypervolume(points)
        bound = scale.hypervolume(np.vstack([points, *(m.bound for m in candidates)]))
        return (bound - volume) / max(volume, 1e-12)

    def _vector(self, point: Configuration) -> np.ndarray:
        return self.objectives.vector(self.result.rows[point])

    def _scale(self) -> Scale:
        return Scale.around(self.objectives.matrix(self.result.rows.values()))

    def _front(self) -> list[Configuration]:
        """Return the non-dominated configurations, ordered by the first objective."""
        points = list(self.result.rows)
        front = self.objectives.front(list(self.result.rows.values()))
        return sorted((points[i] for i in front), key=lambda p: tuple(self._vector(p)))

    def _volume(self) -> float:
        return self._scale().hypervolume(self.objectives.matrix(self.result.rows.values()))
