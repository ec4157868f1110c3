"""Allocate a TTL to each group under a budget of bytes on the disk.

Equation 3 and Algorithm 2 of Kareto (arXiv 2603.08739, section 4.3), with two more candidates:

    maximise  sum H_g(t_g)   subject to  sum B_g(t_g) <= budget

with H_g the hits and B_g the mean bytes of group g at TTL t_g. Each group starts from the TTL with
the most hits per byte-second (its best return on investment); all are scaled by one factor to the
budget. SLSQP improves this start and ``floor(sqrt(K))`` perturbed copies on monotone cubics through
the counts. Solutions are rounded to the grid, the rest of the budget is spent by return, and the
solution with the most hits is used.

Two further candidates bound the result from below: one TTL for all groups, and the Lagrangian
solution (each group's best H - price * B), on the concave envelope of the curves, which SLSQP also
tries to improve. All quantities are in tokens; bytes are proportional.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator
from scipy.optimize import minimize

from canopy_lab.group_ttl.histogram import GRID_S, Curves
from sglang_canopy.errors import CanopyError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_PERTURBATION_STEPS = 8.0
"""Standard deviation of a perturbed start, in grid steps: one octave."""
_MAX_SLSQP_STEPS = 60
_SLACK = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class Allocation:
    """A TTL for each group, in the order of the curves, with its hits and tokens."""

    steps: Ints
    """(G,) index into ``GRID_S``."""
    hits: float
    """Total tokens hit."""
    mean_tokens: float
    """Total tokens on the disk."""

    @property
    def ttl_s(self) -> Floats:
        return GRID_S[self.steps]


def allocate(curves: Curves, budget_tokens: float, *, seed: int = 0) -> Allocation:
    """Return the best TTLs found for ``curves`` within ``budget_tokens`` of mean disk content.

    Deterministic given ``seed``. Raises ``CanopyError`` for a budget that is not positive.
    """
    check_budget(budget_tokens)
    if not len(curves):
        raise CanopyError("there is no group to allocate a TTL for")
    solutions = (
        Allocation(steps, *_totals(curves, steps))
        for steps in _solutions(curves, budget_tokens, seed)
    )
    within = (solution for solution in solutions if solution.mean_tokens <= budget_tokens * _SLACK)
    # Break ties by bytes, then by simplicity: the first source is the simplest.
    return max(within, key=lambda solution: (solution.hits, -solution.mean_tokens))


def fixed_ttl_step(curves: Curves, budget_tokens: float) -> int:
    """Return the index into ``GRID_S`` of the largest single TTL within the budget."""
    total = curves.mean_tokens.sum(axis=0)
    return int(np.searchsorted(total, budget_tokens * _SLACK, side="right")) - 1


def budget_price(curves: Curves, budget_tokens: float) -> float:
    """Return the Lagrange multiplier of the budget: marginal hits per token of disk content."""
    low, high = 0.0, 1.0
    while _spent_tokens(curves, high) > budget_tokens:
        low, high = high, high * 4
    for _ in range(60):
        middle = (low + high) / 2
        if _spent_tokens(curves, middle) > budget_tokens:
            low = middle
        else:
            high = middle
    return high


def check_budget(budget_tokens: float) -> None:
    """Raise ``CanopyError`` unless the budget is positive."""
    if not 0 < budget_tokens < math.inf:
        raise CanopyError(
            f"the disk budget must be positive, got {budget_tokens:g} tokens; give more bytes"
        )


def _solutions(curves: Curves, budget: float, seed: int) -> Iterator[Ints]:
    """Yield one TTL for all, then Lagrange's, by the most hits per byte-second, and local optima."""
    groups = len(curves)
    yield np.full(groups, fixed_ttl_step(curves, budget))
    lagrange = _spend_rest(curves, _best_steps(curves, budget_price(curves, budget)), budget)
    yield lagrange
    roi = _scale_to_budget(curves, _roi_steps(curves), budget)
    yield _spend_rest(curves, np.floor(roi).astype(np.int64), budget)
    smooth = _SmoothCurves(curves, budget)
    polished = _scale_to_budget(curves, smooth.improve(lagrange.astype(np.float64)), budget)
    yield _spend_rest(curves, np.floor(polished).astype(np.int64), budget)
    rng = np.random.default_rng(seed)
    for attempt in range(math.isqrt(groups) + 1):
        steps = roi
        if attempt:
            perturbed = roi + rng.normal(0.0, _PERTURBATION_STEPS, groups)
            steps = _scale_to_budget(curves, np.clip(perturbed, 0, len(GRID_S) - 1), budget)
        improved = _scale_to_budget(curves, smooth.improve(steps), budget)
        yield _spend_rest(curves, np.floor(improved).astype(np.int64), budget)


def _totals(curves: Curves, steps: Ints) -> tuple[float, float]:
    groups = np.arange(len(steps))
    return float(curves.hits[groups, steps].sum()), float(curves.mean_tokens[groups, steps].sum())


def _best_steps(curves: Curves, price: float) -> Ints:
    return np.argmax(curves.hits - price * curves.mean_tokens, axis=1)


def _spent_tokens(curves: Curves, price: float) -> float:
    return _totals(curves, _best_steps(curves, price))[1]


def _roi_steps(curves: Curves) -> Floats:
    """Return each group's TTL with the most hits per byte-second; 0 for a group without hits."""
    returns = np.where(
        curves.mean_tokens > 0, curves.hits / np.maximum(curves.mean_tokens, 1e-12), 0.0
    )
    return np.argmax(returns, axis=1).astype(np.float64)


def _scale_to_budget(curves: Curves, steps: Floats, budget: float) -> Floats:
    """Scale all TTLs by the factor that spends the budget (a shift on the logarithmic grid)."""
    groups = np.arange(len(steps))
    has_ttl = steps > 0
    last_step = len(GRID_S) - 1

    def shift_all(shift: float) -> Floats:
        return np.where(has_ttl, np.clip(steps + shift, 1, last_step), 0.0)

    def spent_tokens(shift: float) -> float:
        return float(curves.mean_tokens[groups, np.floor(shift_all(shift)).astype(np.int64)].sum())

    low, high = -float(last_step), float(last_step)
    if spent_tokens(low) > budget:
        return np.zeros(len(steps))
    for _ in range(30):
        middle = (low + high) / 2
        if spent_tokens(middle) > budget:
            high = middle
        else:
            low = middle
    return shift_all(low)


def _spend_rest(curves: Curves, steps: Ints, budget: float) -> Ints:
    """Spend the rest of the budget on the increases with the most hits per token on the disk."""
    steps = steps.copy()
    groups = np.arange(len(steps))
    columns = np.arange(len(GRID_S))
    unspent_tokens = budget - _totals(curves, steps)[1]
    for _ in range(4 * len(steps) + 64):
        gain = curves.hits - curves.hits[groups, steps][:, None]
        cost = curves.mean_tokens - curves.mean_tokens[groups, steps][:, None]
        affordable = (columns > steps[:, None]) & (gain > 0) & (cost <= unspent_tokens)
        if not affordable.any():
            break
        returns = np.where(affordable, gain / np.maximum(cost, 1e-12), -1.0)
        group, step = divmod(int(np.argmax(returns)), len(GRID_S))
        unspent_tokens -= float(cost[group, step])
        steps[group] = step
    return steps


class _SmoothCurves:
    """Objective and constraint as monotone cubics in the grid step, for SLSQP."""

    def __init__(self, curves: Curves, budget: float) -> None:
        grid_steps = np.arange(len(GRID_S), dtype=np.float64)
        self.hits = PchipInterpolator(
            grid_steps, curves.hits / max(curves.hits[:, -1].sum(), 1e-9), axis=1
        ).c
        self.cost = PchipInterpolator(grid_steps, curves.mean_tokens / budget, axis=1).c
        self.groups = np.arange(len(curves))
        self.last_step = len(GRID_S) - 1

    def improve(self, steps: Floats) -> Floats:
        """Return a local optimum from ``steps``, always within the grid."""
        optimum = minimize(
            lambda x: -self._evaluate(self.hits, x)[0],
            steps,
            jac=lambda x: -self._evaluate(self.hits, x)[1],
            method="SLSQP",
            bounds=[(0.0, float(self.last_step))] * len(steps),
            constraints=[
                {
                    "type": "ineq",
                    "fun": lambda x: 1 - self._evaluate(self.cost, x)[0],
                    "jac": lambda x: -self._evaluate(self.cost, x)[1],
                }
            ],
            options={"maxiter": _MAX_SLSQP_STEPS, "ftol": 1e-7},
        )
        return np.clip(np.nan_to_num(optimum.x), 0.0, self.last_step)

    def _evaluate(self, cubics: Floats, steps: Floats) -> tuple[float, Floats]:
        """Return the sum over the groups, and its gradient."""
        steps = np.clip(np.nan_to_num(steps), 0.0, self.last_step)
        interval = np.minimum(steps.astype(np.int64), self.last_step - 1)
        offset = steps - interval
        c3, c2, c1, c0 = cubics[:, interval, self.groups]
        values = ((c3 * offset + c2) * offset + c1) * offset + c0
        return float(values.sum()), (3 * c3 * offset + 2 * c2) * offset + c1
