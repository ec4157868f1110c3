"""The neighbourhood of a choice: ever closer sizes, and every other choice.

If one size meets a limit and the next smaller one misses it, the gap is halved down to the
resolution of sizes: the plan names the smallest size that meets the limit.
"""

from __future__ import annotations

from collections.abc import Sequence

from canopy_lab.plan.choice import ChosenConfiguration, Constraint, choose
from canopy_lab.plan.evaluate import Evaluator
from canopy_lab.plan.objective import PlanMetric, PlanRow
from canopy_lab.plan.size_series import midpoints_beside
from canopy_lab.plan.space import Configuration, Space

MAX_ROUNDS = 24
"""Maximum rounds. Each halves the gaps next to the choice."""


def settle(
    choice: ChosenConfiguration,
    rows: Sequence[PlanRow],
    constraints: Sequence[Constraint],
    minimise: PlanMetric,
    space: Space,
    evaluate: Evaluator,
) -> tuple[ChosenConfiguration, dict[Configuration, PlanRow]]:
    """Move to a better neighbour while there is one. Returns the choice and all rows."""
    known_rows: dict[Configuration, PlanRow] = {row.configuration: row for row in rows}
    for _ in range(MAX_ROUNDS):
        chosen = choice.row.configuration
        midpoints = midpoints_beside(chosen, known_rows, space)
        sizes = [c for c in midpoints if _may_win(c, choice, minimise, evaluate)]
        choices = [c for c in space.alternatives(chosen) if evaluate.is_sold(c)]
        batch = [c for c in dict.fromkeys((*sizes, *choices)) if c not in known_rows]
        if not batch:
            break
        known_rows.update(zip(batch, evaluate(batch)))
        choice = choose(list(known_rows.values()), constraints, minimise)
    return choice, known_rows


def _may_win(
    point: Configuration, choice: ChosenConfiguration, minimise: PlanMetric, evaluate: Evaluator
) -> bool:
    """Return whether a neighbouring size could be better, given the lower bound of its cost."""
    if not evaluate.is_sold(point):
        return False
    min_cost = evaluate.bounds_of(point, [choice.row]).get(minimise.key)
    return not choice.is_feasible or min_cost is None or min_cost < choice.row[minimise.key]
