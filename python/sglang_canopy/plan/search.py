"""The search for the front, after Algorithm 1 of Kareto (arXiv 2603.08739, section 4.2).

The paper's halves between any two neighbours and gives no thresholds; this one stays on a lattice,
has a budget, and prunes what could not add to the front.

Four steps, all on the lattice of ``Space``, so that a found front is a subset of the full grid's:

1. *Coarse grid*: few sizes of DRAM, up to the middle, times few sizes of disk, for each class.
2. *Expansion*: along DRAM while a step still gains ``marginal_gain`` in a performance objective.
3. *Midpoints*: between two evaluated neighbours on a line, those first that could add most to the
   front and where the objectives curve most.
4. *Pruning*: a midpoint is dropped when even the best it could be adds less than ``tolerance`` to
   the dominated volume. Best it could be: as good as the better of its two neighbours, at its
   own price, which is known without simulating. Beyond the paper, and what makes 99 % of the
   volume likely: where performance does not fall with size, nothing larger is ever dropped.

The choices that are not sizes (TTL, policies) are tried on points of the front only: first on a few
of them, and on the others if that helped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sglang_canopy.errors import CanopyError
from sglang_canopy.plan.objective import Objectives, Row, Scale
from sglang_canopy.plan.space import Configuration, Slice, Space

Evaluate = Callable[[Sequence[Configuration]], Sequence[Row]]
Known = Callable[[Configuration, Sequence[Row]], Mapping[str, float]]
"""What is certain of a configuration without evaluating it: lower bounds by row key, given the
rows of its evaluated neighbours."""

_BATCH = 8
"""Midpoints of one round. Fixed, so that the result does not depend on the number of processes."""
_Line = list[tuple[int, Configuration]]
"""Evaluated points of one line of the lattice, with their indices on it."""
_CHOICES = ("ttl", "disk_policy", "host_policy", "device_policy")


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """When to stop. Shares are of the volume that the front dominates."""

    tolerance: float = 0.0005
    marginal_gain: float = 0.01
    """Of the range of an objective, for one step of DRAM."""
    budget_share: float = 0.25
    """Evaluations at most, as a share of the grid's."""
    probes: int = 3
    """Points of the front that a choice is tried on first."""

    def __post_init__(self) -> None:
        for name in ("tolerance", "marginal_gain", "budget_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise CanopyError(f"{name} must be between 0 and 1, got {getattr(self, name)!r}")


@dataclass(slots=True)
class SearchResult:
    """What the search evaluated, in order, and why it ended."""

    rows: dict[Configuration, Row] = field(default_factory=dict)
    stages: dict[str, int] = field(default_factory=dict)
    """Evaluations by step of the algorithm."""
    pruned: int = 0
    """Midpoints left out at the end because they could not add ``tolerance``."""
    budget: int = 0
    out_of_budget: bool = False


def search(
    space: Space,
    objectives: Objectives,
    evaluate: Evaluate,
    *,
    known: Known | None = None,
    options: SearchOptions | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> SearchResult:
    """Approximate the front of ``space``. Deterministic.

    ``evaluate`` gets batches of new configurations, and may do each batch in parallel.
    """
    options = options or SearchOptions()
    run = _Search(space, objectives, evaluate, known, options, progress)
    run.coarse()
    run.expand()
    alternatives = sum(len(getattr(space, _plural(name))) - 1 for name in _CHOICES)
    run.refine(0.65 if alternatives else 1.0)
    run.choices()
    run.refine(1.0)
    run.polish()
    return run.found


def full_grid(space: Space, evaluate: Evaluate) -> SearchResult:
    """Every configuration of ``space``, in the form of a search's result."""
    configurations = space.grid()
    found = SearchResult(budget=len(configurations))
    found.rows.update(zip(configurations, evaluate(configurations)))
    found.stages["grid"] = len(found.rows)
    return found


@dataclass(frozen=True, slots=True)
class _Midpoint:
    """A point between two evaluated ones on a line of the lattice."""

    configuration: Configuration
    potential: float
    """Share of the volume that it could add at best."""
    priority: float


class _Search:
    def __init__(
        self,
        space: Space,
        objectives: Objectives,
        evaluate: Evaluate,
        known: Known | None,
        options: SearchOptions,
        progress: Callable[[str, int], None] | None,
    ) -> None:
        self.space, self.objectives, self.options = space, objectives, options
        self._evaluate, self._known, self._progress = evaluate, known, progress
        self.found = SearchResult(
            budget=max(1, math.floor(options.budget_share * len(space.grid())))
        )
        self._slices: dict[Slice, None] = dict.fromkeys(space.first_slices())

    def coarse(self) -> None:
        """Step 1."""
        half = (len(self.space.dram_gib)) // 2
        most = len(self.space.disk_gib) - 1
        disks = sorted({0, (most + 1) // 2, most})
        points = [
            self.space.at(where, dram, disk)
            for where in self._slices
            for disk in disks
            for dram in sorted({0, min(1, half), half})
        ]
        # One look at the far end of DRAM: caches have cliffs, where nothing is gained until
        # the working set fits, and no step before says so.
        top = len(self.space.dram_gib) - 1
        points += [self.space.at(where, top, 0) for where in self._slices]
        self._add("coarse", points)

    def expand(self) -> None:
        """Step 2: the next steps of DRAM for each line, while the last one gained."""
        top = len(self.space.dram_gib) - 1
        half = len(self.space.dram_gib) // 2
        step = max(1, (top - half + 1) // 2)
        # The line without a disk has its far end already.
        open_lines = [
            (where, disk) for where in self._slices for disk in range(1, len(self.space.disk_gib))
        ]
        while open_lines and not self.found.out_of_budget:
            scale = self._scale()
            going, points = [], []
            for where, disk in open_lines:
                line = self._line(where, disk, along_dram=True)
                if len(line) < 2 or line[-1][0] >= top:
                    continue
                gain = scale(self._vector(line[-2][1])) - scale(self._vector(line[-1][1]))
                if gain.max() < self.options.marginal_gain:
                    continue
                points.append(self.space.at(where, min(top, line[-1][0] + step), disk))
                going.append((where, disk))
            if not self._add("expansion", points):
                return
            open_lines = going

    def refine(self, share: float) -> None:
        """Steps 3 and 4, until nothing is left that could add ``tolerance``."""
        most = math.floor(share * self.found.budget)
        while len(self.found.rows) < most:
            found = self._midpoints(self.options.tolerance)
            chosen = sorted(found, key=lambda m: -m.priority)
            batch = [m.configuration for m in chosen][: min(_BATCH, most - len(self.found.rows))]
            if not self._add("midpoints", batch):
                return
        left = any(True for _ in self._midpoints(self.options.tolerance))
        self.found.out_of_budget = share == 1.0 and left

    def polish(self) -> None:
        """What is left of the budget, on the neighbours of the front, while they add to it.

        Where more room made something slower, the bound of step 4 was too low.
        """
        while len(self.found.rows) < self.found.budget:
            before = self._volume()
            beside = [
                point
                for of in self._front()
                for point in self.space.neighbours(of)
                if point not in self.found.rows and _slice_of(point) in self._slices
            ]
            if not self._add("polish", list(dict.fromkeys(beside))[:_BATCH]):
                return
            if self._volume() - before <= self.options.tolerance:
                return

    def choices(self) -> None:
        """TTLs and policies: on a few points, on the front and the corners if that helped."""
        for name in _CHOICES:
            for value in getattr(self.space, _plural(name))[1:]:
                probes = self._probes(name)
                if not probes:
                    continue
                variants = {where: replace(where, **{name: value}) for where in probes}
                before = self._volume()
                self._add(name, variants.values())
                helped = {
                    _slice_of(variant)
                    for where, variant in variants.items()
                    if variant in self.found.rows
                    and self._gain(where, variant) > self.options.marginal_gain
                }
                if self._volume() - before <= self.options.tolerance and not helped:
                    continue
                front = [replace(c, **{name: value}) for c in self._front() if _applies(name, c)]
                self._slices.update(dict.fromkeys(map(_slice_of, front)))
                self._slices.update(dict.fromkeys(sorted(helped, key=repr)))
                self._add(name, front)

    def _probes(self, name: str) -> list[Configuration]:
        """Where a choice is tried: spread over the front, and where its tier does most.

        The front may hardly use a tier that a better choice would make worth its price.
        """
        front = [c for c in self._front() if _applies(name, c)]
        at = np.linspace(0, len(front) - 1, min(self.options.probes, len(front)))
        chosen = dict.fromkeys(front[round(i)] for i in at)
        for disk in self.space.disks if name in ("ttl", "disk_policy") else ():
            have = [c for c in self.found.rows if c.disk == disk]
            if have:
                most = max(c.disk_gib for c in have)
                drams = sorted(c.dram_gib for c in have if c.disk_gib == most)
                for dram in sorted({drams[0], drams[-1]}):
                    # The first choice of everything else is among them.
                    chosen[next(c for c in have if (c.disk_gib, c.dram_gib) == (most, dram))] = None
        return list(chosen)

    def _gain(self, before: Configuration, after: Configuration) -> float:
        """The most that any objective gained, as a share of its range."""
        scale = self._scale()
        return float((scale(self._vector(before)) - scale(self._vector(after))).max())

    def _add(self, stage: str, points: Iterable[Configuration | None]) -> int:
        """Evaluate what is new of ``points``, within the budget; how many were."""
        new = [p for p in dict.fromkeys(points) if p is not None and p not in self.found.rows]
        room = self.found.budget - len(self.found.rows)
        if len(new) > room:
            self.found.out_of_budget = True
            new = new[:room]
        if not new:
            return 0
        self.found.rows.update(zip(new, self._evaluate(new)))
        self.found.stages[stage] = self.found.stages.get(stage, 0) + len(new)
        if self._progress is not None:
            self._progress(stage, len(self.found.rows))
        return len(new)

    def _midpoints(self, tolerance: float) -> Iterator[_Midpoint]:
        """What lies between evaluated neighbours and could add to the front."""
        dropped: set[Configuration] = set()
        scale = self._scale()
        points = self.objectives.matrix(self.found.rows.values())
        front = points[self.objectives.front(list(self.found.rows.values()))]
        volume = scale.hypervolume(front)
        best: dict[Configuration, _Midpoint] = {}
        for where in self._slices:
            for along_dram, others in (
                (True, range(len(self.space.disk_gib))),
                (False, range(len(self.space.dram_gib))),
            ):
                for other in others:
                    line = self._line(where, other, along_dram)
                    for middle, ends, bend in self._gaps(line, along_dram, other, scale):
                        indices = (middle, other) if along_dram else (other, middle)
                        point = self.space.at(where, *indices)
                        if point is None or point in self.found.rows or point in dropped:
                            continue
                        bound = self._bound(point, ends)
                        gain = scale.hypervolume(np.vstack([front, bound])) - volume
                        if gain <= tolerance * max(volume, 1e-12):
                            dropped.add(point)
                            continue
                        mid = _Midpoint(point, gain, gain * (1 + bend))
                        if point not in best or best[point].priority < mid.priority:
                            best[point] = mid
        self.found.pruned = len(dropped)
        yield from best.values()

    def _gaps(
        self, line: _Line, along_dram: bool, other: int, scale: Scale
    ) -> Iterator[tuple[int, tuple[Configuration, ...], float]]:
        """Middles of the gaps of a line: (index, evaluated ends, how much the line bends there).

        Below its lowest point too, where a choice was tried on large sizes only: a smaller size
        is at best as good as that point, and cheaper.
        """
        if not line:
            return
        bends = _curvature([scale(self._vector(c)) for _, c in line])
        lowest = 1 if along_dram and other else 0
        if line[0][0] > lowest:
            yield (lowest + line[0][0]) // 2, (line[0][1],), 0.0
        for at in range(len(line) - 1):
            (low, left), (high, right) = line[at], line[at + 1]
            if high - low > 1:
                yield (low + high) // 2, (left, right), max(bends[at], bends[at + 1])

    def _bound(self, point: Configuration, ends: Sequence[Configuration]) -> np.ndarray:
        """The best that ``point`` could be, knowing its neighbours and its price."""
        rows = [self.found.rows[end] for end in ends]
        bound = self.objectives.matrix(rows).min(axis=0)
        if self._known is not None:
            certain = self._known(point, rows)
            for at, m in enumerate(self.objectives.metrics):
                if m.key in certain:
                    bound[at] = -certain[m.key] if m.maximise else certain[m.key]
        return bound

    def _line(self, where: Slice, other: int, along_dram: bool) -> _Line:
        """The evaluated points of one line of the lattice, with their indices."""
        count = len(self.space.dram_gib if along_dram else self.space.disk_gib)
        found = []
        for at in range(count):
            point = self.space.at(where, *((at, other) if along_dram else (other, at)))
            if point is not None and point in self.found.rows:
                found.append((at, point))
        return found

    def _vector(self, point: Configuration) -> np.ndarray:
        return self.objectives.vector(self.found.rows[point])

    def _scale(self) -> Scale:
        return Scale.of(self.objectives.matrix(self.found.rows.values()))

    def _front(self) -> list[Configuration]:
        """The non-dominated configurations, by the first objective."""
        points = list(self.found.rows)
        front = self.objectives.front(list(self.found.rows.values()))
        return sorted((points[i] for i in front), key=lambda p: tuple(self._vector(p)))

    def _volume(self) -> float:
        return self._scale().hypervolume(self.objectives.matrix(self.found.rows.values()))


def _plural(name: str) -> str:
    return {"ttl": "ttls"}.get(name, name.replace("policy", "policies"))


def _applies(name: str, point: Configuration) -> bool:
    if name in ("ttl", "disk_policy"):
        return point.disk is not None
    return name != "host_policy" or point.dram_gib > 0


def _slice_of(point: Configuration) -> Slice:
    return Slice(
        point.instances,
        point.disk,
        point.ttl,
        point.device_policy,
        point.host_policy,
        point.disk_policy,
    )


def _curvature(points: Sequence[np.ndarray]) -> list[float]:
    """How much the line of objectives bends at each point, 0 at its ends."""
    bends = [0.0] * len(points)
    for at in range(1, len(points) - 1):
        bends[at] = float(np.abs(points[at - 1] - 2 * points[at] + points[at + 1]).max())
    return bends
