"""Search on the busiest part of a long trace, then confirm on the whole.

Every configuration of the search is simulated on a window of consecutive requests. Candidates for
the choice are then simulated on the whole trace (``confirm.py``); only these can be chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from canopy_lab.plan.choice import Constraint
from canopy_lab.plan.confirm import Margins, ScreeningResult, confirm
from canopy_lab.plan.evaluate import Evaluator
from canopy_lab.plan.objective import METRICS, Objectives, PlanMetric, PlanRow
from canopy_lab.plan.search import SearchOptions, SearchResult, search
from canopy_lab.plan.size_series import midpoints_beside
from canopy_lab.plan.space import Configuration, Space
from canopy_lab.sim.compact import CompactTrace

CHOICE_ROUNDS = 2
"""Rounds in which sizes next to the choice are also tried."""

Progress = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class SearchTarget:
    """Objectives of the search, and criteria of the choice."""

    objectives: Objectives
    constraints: tuple[Constraint, ...]
    minimise: PlanMetric
    options: SearchOptions


def busiest_window(trace: CompactTrace, requests: int) -> CompactTrace:
    """Return the ``requests`` consecutive requests with most prompt tokens per s, from time 0."""
    if len(trace) <= requests:
        return trace
    times_s = np.array([r.time_s for r in trace])
    cumulative_tokens = np.concatenate([[0], np.cumsum([r.input_tokens for r in trace])])
    spans_s = np.maximum(times_s[requests - 1 :] - times_s[: len(times_s) - requests + 1], 1e-9)
    start = int(((cumulative_tokens[requests:] - cumulative_tokens[:-requests]) / spans_s).argmax())
    window = (trace[i] for i in range(start, start + requests))
    return CompactTrace(replace(r, time_s=r.time_s - times_s[start]) for r in window)


def sampled_search(
    space: Space,
    target: SearchTarget,
    on_window: Evaluator,
    on_all: Evaluator,
    required: Sequence[Configuration] = (),
    progress: Progress = lambda stage, count: None,
) -> SearchResult:
    """Search on the requests of ``on_window``, and simulate candidates for the choice on all.

    ``required`` is always simulated on all. Result rows that were not simulated on all are marked
    ``predicted``, and corrected by the errors of simulated ones.
    """
    found = search(
        space, target.objectives, on_window, bounds_of=on_window.bounds_of, options=target.options,
        progress=progress,
    )  # fmt: skip
    window_rows = dict(found.rows)
    confirmed = _confirm(window_rows, {}, target, on_all, required, progress)
    for _ in range(CHOICE_ROUNDS):
        chosen = confirmed.choice.row.configuration
        points = [*midpoints_beside(chosen, window_rows, space), *space.alternatives(chosen)]
        batch = [c for c in dict.fromkeys(points) if c not in window_rows and on_window.is_sold(c)]
        if not batch:
            break
        window_rows.update(zip(batch, on_window(batch)))
        confirmed = _confirm(window_rows, confirmed.rows, target, on_all, (), progress)
    result = SearchResult(budget=found.budget, is_out_of_budget=found.is_out_of_budget)
    result.rows = _correct_rows(confirmed)
    result.stages = {"on a part": len(window_rows), "on the whole": len(confirmed.rows)}
    return result


def _confirm(
    window_rows: dict[Configuration, PlanRow],
    rows: dict[Configuration, PlanRow],
    target: SearchTarget,
    on_all: Evaluator,
    required: Sequence[Configuration],
    progress: Progress,
) -> ScreeningResult:
    return confirm(
        window_rows, on_all, target.constraints, target.minimise, rows,
        lambda count: progress("on the whole", count), required,
    )  # fmt: skip


def _correct_rows(confirmed: ScreeningResult) -> dict[Configuration, PlanRow]:
    """Return all rows. Window rows are corrected by the errors of nearby simulated rows."""
    metrics = list(METRICS.values())
    simulated = [c for c in confirmed.rows if c in confirmed.predicted]
    bounds = Margins(confirmed.predicted, metrics).bounds(confirmed.rows, simulated)
    rows: dict[Configuration, PlanRow] = dict(confirmed.rows)
    for index, (c, row) in enumerate(confirmed.predicted.items()):
        if c not in rows:
            corrected = {metric.key: float(bounds[metric.key].middle[index]) for metric in metrics}
            rows[c] = PlanRow(c, {**row.metrics, **corrected}, predicted=True)
    return rows
