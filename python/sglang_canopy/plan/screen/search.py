"""A search that predicts every configuration and simulates few of them.

First a grid in equal steps; then the sizes beside the choice, halved until they are no longer told
apart, and its other choices. What cannot be predicted (policies other than LRU, TTLs) is tried in
full on the choice only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_canopy.errors import CanopyError
from sglang_canopy.plan.choice import ChosenConfiguration, Constraint, configuration_of
from sglang_canopy.plan.evaluate import Evaluator
from sglang_canopy.plan.lines import beside
from sglang_canopy.plan.objective import METRICS, Metric, Row
from sglang_canopy.plan.screen.confirm import Margins, Screened, confirm
from sglang_canopy.plan.screen.predict import PREDICTED, can_predict
from sglang_canopy.plan.search import SearchResult
from sglang_canopy.plan.space import Configuration, Space

MOST = 1000
"""Configurations of the grid."""
STEPS = ((16, 8), (8, 8), (8, 4), (4, 2))
"""Equal steps of DRAM and disk, the finest that have no more."""
ROUNDS = 8
PREDICTED_ROW = "predicted"
"""Key of a row that was not simulated."""

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
    rows: Sequence[Row] = (),
    progress: Callable[[str, int], None] | None = None,
) -> tuple[SearchResult, ChosenConfiguration]:
    """Predict, and simulate what could be the choice. ``rows`` were simulated already.

    The result's rows are all candidates; those that were not simulated say so
    (``PREDICTED_ROW``), and are as predicted, corrected by what was simulated nearby.
    """
    say = progress or (lambda stage, done: None)
    named = candidates(space)
    predicted = dict(zip(named, predict(named)))
    say("predicted", 0)
    full = {configuration_of(row): row for row in rows if configuration_of(row) in predicted}
    found = confirm(
        predicted, evaluate, wish.constraints, wish.minimise, full, lambda n: say("confirmed", n)
    )
    for _ in range(ROUNDS):
        chosen = configuration_of(found.choice.row)
        near = [*beside(chosen, _by_row(found), space), *space.alternatives(chosen)]
        new = [c for c in dict.fromkeys(near) if c not in found.rows and _sold(c, evaluate)]
        guessed = [c for c in new if can_predict(c) and c not in found.predicted]
        whole = [c for c in new if not can_predict(c)]
        if not guessed and not whole:
            break
        others = dict(zip(whole, evaluate(whole))) if whole else {}
        found.rows.update(others)
        found = confirm(
            {**found.predicted, **dict(zip(guessed, predict(guessed)))},
            evaluate,
            wish.constraints,
            wish.minimise,
            found.rows,
            lambda n: say("neighbours", n),
        )
    result = SearchResult(budget=len(found.predicted))
    result.rows = corrected(found)
    result.stages = {"predicted": len(found.predicted), "simulated": len(found.rows)}
    return result, found.choice


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


def _by_row(found: Screened) -> dict[Configuration, Row]:
    return {**found.predicted, **found.rows}


def _sold(c: Configuration, evaluate: Evaluator) -> bool:
    try:
        evaluate.known(c, [{"makespan_s": 0.0}])
    except CanopyError:
        return False
    return True
