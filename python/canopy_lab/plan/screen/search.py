"""A search that predicts every configuration and simulates few of them.

First a grid in equal steps; then every size beside the choice that is told apart, and its other
choices. What cannot be predicted (policies other than LRU, TTLs) is tried in
full on the choice only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import product

from canopy_lab.plan.choice import ChosenConfiguration, Constraint, choose, configuration_of
from canopy_lab.plan.evaluate import Evaluator
from canopy_lab.plan.objective import METRICS, PREDICTED_ROW, Metric, Row
from canopy_lab.plan.screen.confirm import Margins, Screened, confirm
from canopy_lab.plan.screen.predict import PREDICTED, can_predict
from canopy_lab.plan.search import SearchResult
from canopy_lab.plan.sizes import STEPS_AN_OCTAVE, round_size
from canopy_lab.plan.space import Configuration, Space, slice_of
from sglang_canopy.errors import CanopyError

MOST = 1000
"""Configurations of the grid."""
STEPS = ((16, 8), (8, 8), (8, 4), (4, 2))
"""Equal steps of DRAM and disk, the finest that have no more."""
ROUNDS = 2

Predict = Callable[[Sequence[Configuration]], Sequence[Row]]


@dataclass(frozen=True, slots=True)
class Wish:
    """What is chosen by."""

    constraints: tuple[Constraint, ...]
    minimise: Metric


def candidates(space: Space, most: int = MOST) -> list[Configuration]:
    """The grid that is predicted: equal steps of sizes, and every choice that can be."""
    found: list[Configuration] = []
    for steps in STEPS:
        found = [c for c in space.finer(*steps).grid() if can_predict(c)]
        if len(found) <= most:
            return found
    found = [c for c in space.grid() if can_predict(c)]
    if len(found) > most:
        raise CanopyError(
            f"the space has {len(found)} configurations, and screening takes {most}: give fewer "
            "--disks, --instances, --page-size or --prefetch-policy, or --screening off"
        )
    return found


def screened_search(
    space: Space,
    wish: Wish,
    predict: Predict,
    evaluate: Evaluator,
    also: Sequence[Configuration] = (),
    progress: Callable[[str, int], None] | None = None,
) -> tuple[SearchResult, ChosenConfiguration]:
    """Predict, and simulate what could be the choice. ``also`` is simulated in any case.

    The result's rows are all candidates; those that were not simulated say so
    (``PREDICTED_ROW``), and are as predicted, corrected by what was simulated nearby.
    """
    say = progress or (lambda stage, done: None)
    named = list(dict.fromkeys((*candidates(space), *(c for c in also if can_predict(c)))))
    predicted = dict(zip(named, predict(named)))
    say("predicted", 0)
    found = confirm(
        predicted,
        evaluate,
        wish.constraints,
        wish.minimise,
        progress=lambda n: say("confirmed", n),
        also=also,
    )
    for _ in range(ROUNDS):
        chosen = configuration_of(found.choice.row)
        near = [*around(chosen, found.predicted, space), *space.alternatives(chosen)]
        new = [c for c in dict.fromkeys(near) if c not in found.predicted and can_predict(c)]
        new = [c for c in new if _sold(c, evaluate)]
        if not new:
            break
        found = confirm(
            {**found.predicted, **dict(zip(new, predict(new)))},
            evaluate,
            wish.constraints,
            wish.minimise,
            found.rows,
            lambda n: say("neighbours", n),
        )
    others = [
        c
        for c in space.alternatives(configuration_of(found.choice.row))
        if not can_predict(c) and _sold(c, evaluate)
    ]
    if others:
        found.rows.update(zip(others, evaluate(others)))
        found.choice = choose(list(found.rows.values()), wish.constraints, wish.minimise)
    result = SearchResult(budget=len(found.predicted))
    result.rows = corrected(found)
    result.stages = {"predicted": len(found.predicted), "simulated": len(found.rows)}
    return result, found.choice


def around(
    of: Configuration, known: Collection[Configuration], space: Space
) -> list[Configuration]:
    """Every size that is told apart between those of ``known`` beside ``of``, of DRAM and disk."""
    alike = [c for c in known if slice_of(c) == slice_of(of)]
    widths = [
        _between(getattr(of, axis), sorted({getattr(c, axis) for c in alike}), space.least_gib)
        for axis in ("dram_gib", "disk_gib")
    ]
    return [
        c
        for dram, disk in product(*widths)
        if (c := space.at(of, dram, disk, of.disk_mib_s)) is not None and c != of
    ]


def _between(size: float, sizes: Sequence[float], least: float) -> list[float]:
    """``size``, and what lies between it and its neighbours in ``sizes``."""
    at = sizes.index(size)
    low, high = sizes[max(at - 1, 0)], sizes[min(at + 1, len(sizes) - 1)]
    if size <= 0:
        return [size]
    found, step = {size}, max(low, least)
    while step < high:
        if low < step:
            found.add(round_size(step))
        step *= 1 + 1 / STEPS_AN_OCTAVE
    return sorted(s for s in found if low < s < high or s == size)


def corrected(found: Screened) -> dict[Configuration, Row]:
    """All rows: as simulated, else as predicted times what nearby ones were off by."""
    metrics = [m for m in METRICS.values() if m.key in PREDICTED]
    seen = [c for c in found.rows if c in found.predicted]
    bounds = Margins(found.predicted, metrics)(found.rows, seen)
    rows: dict[Configuration, Row] = dict(found.rows)
    for at, (c, row) in enumerate(found.predicted.items()):
        if c in rows:
            continue
        better = {m.key: float(bounds[m.key].middle[at]) for m in metrics}
        rows[c] = {**row, **better, PREDICTED_ROW: True}
    return rows


def _sold(c: Configuration, evaluate: Evaluator) -> bool:
    try:
        evaluate.known(c, [{"makespan_s": 0.0}])
    except CanopyError:
        return False
    return True
