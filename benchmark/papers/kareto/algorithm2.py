"""Algorithm 2 of the paper to the letter: a TTL for each of the top K subtrees and for the rest.

Section 4.3. Groups are the K subtrees below initial prefixes with the most reuse, and one of all
others. With D_k the times between two uses of a block of group k:

    H_k(t) = |{d in D_k: d <= t}|        C_k(t) = |B_k| t + sum over D_k of min(t, d)

and the TTLs maximise the sum of H_k within a budget B of the sum of C_k (equation 3). Each group
starts from the t with the largest H_k / C_k; all are scaled by B / sum C_k; ``floor(sqrt(K)) + 1``
perturbed copies are tried; SLSQP improves each. Counts are in tokens. H_k is a step function, which
SLSQP cannot climb: here it is interpolated between its steps (the paper does not specify it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from canopy_lab.group_ttl.paths import Paths, PathSegments, segments_of
from sglang_canopy.ttl.table import TRACE_HASH, Group, TTLTable

CURVE_POINTS = 256
"""Points of a curve, at quantiles of its intervals."""
PERTURBATION_SIGMA = 0.3
"""Standard deviation of a perturbed start's logarithm; the text gives none."""
UNIT_S, MAX_TTL_S = 60.0, 1e5
"""SLSQP is given minutes. In logarithms of the TTLs it stops near where it begins."""


@dataclass(frozen=True, slots=True)
class GroupCurve:
    """H_k and C_k of one group at ascending TTLs in seconds; tokens, and token-seconds."""

    ttl_s: np.ndarray
    hits: np.ndarray
    cost: np.ndarray


def group_ttls(log: Paths, budget: float, group_count: int = 64, seed: int = 0) -> TTLTable:
    """Return TTLs by group that keep within ``budget`` token-seconds over the length of ``log``."""
    segments = segments_of(log)
    roots = _top_subtrees(segments, group_count)
    curves = _group_curves(segments, roots)
    ttls_s = _allocate(curves, budget, np.random.default_rng(seed))
    groups_with_ttl = tuple(Group(int(r), float(t)) for r, t in zip(roots, ttls_s))
    return TTLTable(groups_with_ttl, float(ttls_s[-1]), log.block_tokens, TRACE_HASH)


def _top_subtrees(segments: PathSegments, group_count: int) -> np.ndarray:
    """Ids of the first blocks of the subtrees with the most reused tokens."""
    reuses = (np.bincount(segments.use_segment, minlength=len(segments)) - 1) * segments.tokens
    reused = segments.subtree_sum(reuses)
    tops = np.flatnonzero((segments.parent < 0) & (reused > 0))
    return segments.first[tops[np.argsort(-reused[tops], kind="stable")[:group_count]]]


def _group_curves(segments: PathSegments, roots: np.ndarray) -> list[GroupCurve]:
    group_of_segment = segments.deepest_roots([int(r) for r in roots])
    group_of_segment = np.where(group_of_segment < 0, len(roots), group_of_segment)
    group_tokens = np.bincount(group_of_segment, weights=segments.tokens, minlength=len(roots) + 1)
    group_of_use, gaps_s = group_of_segment[segments.use_segment], segments.gaps_s
    use_tokens = segments.tokens[segments.use_segment].astype(np.float64)
    reused = np.isfinite(gaps_s)
    curves = []
    for k in range(len(roots) + 1):
        in_group = reused & (group_of_use == k)
        order = np.argsort(gaps_s[in_group], kind="stable")
        intervals_s, tokens = gaps_s[in_group][order], use_tokens[in_group][order]
        if not len(intervals_s):
            cost = np.array([0.0, group_tokens[k]])
            curves.append(GroupCurve(np.array([0.0, 1.0]), np.zeros(2), cost))
            continue
        points = np.linspace(0, len(intervals_s) - 1, CURVE_POINTS)
        point_index = np.unique(np.round(points).astype(int))
        tie_break_s = 1e-6 * np.arange(1, len(point_index) + 1)
        ttl_s = np.maximum.accumulate(np.append(0.0, intervals_s[point_index] + tie_break_s))
        hits = np.append(0.0, np.cumsum(tokens)[point_index])
        short_cost = np.append(0.0, np.cumsum(tokens * intervals_s)[point_index])
        cost = group_tokens[k] * ttl_s + short_cost + (tokens.sum() - hits) * ttl_s
        curves.append(GroupCurve(ttl_s, hits, cost))
    return curves


def _allocate(curves: list[GroupCurve], budget: float, rng: np.random.Generator) -> np.ndarray:
    start_ttls_s = np.array([_best_ttl(curve) for curve in curves])
    start_cost = sum(_cost_and_slope(curve, ttl_s)[0] for curve, ttl_s in zip(curves, start_ttls_s))
    scaled_ttls_s = start_ttls_s * budget / max(start_cost, 1e-9)
    starts = [scaled_ttls_s]
    for _ in range(math.isqrt(len(curves) - 1) + 1):
        factors = np.exp(rng.normal(0, PERTURBATION_SIGMA, len(curves)))
        starts.append(np.maximum(scaled_ttls_s * factors, 0))
    all_hits = max(sum(curve.hits[-1] for curve in curves), 1.0)
    best_ttls_s, most_hits = np.zeros(len(curves)), -1.0
    for perturbed in starts:
        ttls_s = _refine_ttls(curves, perturbed, budget, all_hits)
        hits = sum(_hits_and_slope(curve, ttl_s)[0] for curve, ttl_s in zip(curves, ttls_s))
        cost = sum(_cost_and_slope(curve, ttl_s)[0] for curve, ttl_s in zip(curves, ttls_s))
        if hits > most_hits and cost <= budget * 1.001:
            best_ttls_s, most_hits = ttls_s, hits
    return best_ttls_s


def _best_ttl(curve: GroupCurve) -> float:
    """Return the TTL with the most hits per cost, in seconds; 0 if the group has no hits."""
    if len(curve.ttl_s) < 2 or curve.hits[-1] <= 0:
        return 0.0
    return float(curve.ttl_s[1:][np.argmax(curve.hits[1:] / np.maximum(curve.cost[1:], 1e-9))])


def _refine_ttls(
    curves: list[GroupCurve], start_ttls_s: np.ndarray, budget: float, all_hits: float
) -> np.ndarray:
    """Improve TTLs by SLSQP; ``all_hits`` scales the objective to at most 1."""

    def total_and_slopes(ttls_min: np.ndarray, value_and_slope) -> tuple[float, np.ndarray]:
        ttls_s = np.maximum(ttls_min, 0.0) * UNIT_S
        values, slopes = zip(*(value_and_slope(curve, ttl) for curve, ttl in zip(curves, ttls_s)))
        return sum(values), np.array(slopes) * UNIT_S

    solution = minimize(
        lambda ttls_min: -total_and_slopes(ttls_min, _hits_and_slope)[0] / all_hits,
        np.clip(start_ttls_s, 1e-2, MAX_TTL_S) / UNIT_S,
        jac=lambda ttls_min: -total_and_slopes(ttls_min, _hits_and_slope)[1] / all_hits,
        method="SLSQP",
        bounds=[(0.0, MAX_TTL_S / UNIT_S)] * len(curves),
        constraints=[
            {
                "type": "ineq",
                "fun": lambda ttls_min: 1 - total_and_slopes(ttls_min, _cost_and_slope)[0] / budget,
                "jac": lambda ttls_min: -total_and_slopes(ttls_min, _cost_and_slope)[1] / budget,
            }
        ],
        options={"maxiter": 60, "ftol": 1e-7},
    )
    return np.maximum(np.nan_to_num(solution.x), 0.0) * UNIT_S


def _hits_and_slope(curve: GroupCurve, ttl_s: float) -> tuple[float, float]:
    return _line_at(curve.ttl_s, curve.hits, ttl_s, 0.0)


def _cost_and_slope(curve: GroupCurve, ttl_s: float) -> tuple[float, float]:
    last_slope = (curve.cost[-1] - curve.cost[-2]) / max(curve.ttl_s[-1] - curve.ttl_s[-2], 1e-9)
    return _line_at(curve.ttl_s, curve.cost, ttl_s, max(last_slope, 0.0))


def _line_at(x: np.ndarray, y: np.ndarray, at_x: float, last_slope: float) -> tuple[float, float]:
    """Return value and slope at ``at_x`` of the line through the points; ``last_slope``: the slope after them."""
    i = int(np.searchsorted(x, at_x, side="right"))
    if i >= len(x):
        return float(y[-1] + (at_x - x[-1]) * last_slope), last_slope
    i = max(i, 1)
    slope = (y[i] - y[i - 1]) / max(x[i] - x[i - 1], 1e-9)
    return float(y[i - 1] + (at_x - x[i - 1]) * slope), float(slope)
