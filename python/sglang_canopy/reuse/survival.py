"""Survival curves of cached tips, and the ranks computed from them.

A *tip* is the end of a conversation's cached path. Its survival S(a) is the probability that no
request has continued it at the age of ``a`` seconds. Tips still waiting are censored samples:
dropping them, as if every tip were continued, ruins the ranking.

Bins of ages are spaced by the square root of two: reuse gaps reach from a fraction of a second (an
agent's tool call) to hours (a person returns).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

FIRST_EDGE_S = 0.25
LAST_EDGE_S = 131072.0


def _make_edges() -> tuple[float, ...]:
    edges = [0.0]
    step = 0
    while True:
        # Even steps are exact powers of two: no drift, and equal floats on every machine.
        edge = FIRST_EDGE_S * 2.0 ** (step // 2) * (2.0**0.5 if step % 2 else 1.0)
        edges.append(edge)
        if edge >= LAST_EDGE_S:
            return tuple(edges)
        step += 1


AGE_EDGES_S: tuple[float, ...] = _make_edges()
"""Bin ``i`` holds ages in ``[AGE_EDGES_S[i], AGE_EDGES_S[i + 1])`` seconds; the last is unbounded."""
AGE_BINS = len(AGE_EDGES_S)

TOKEN_EDGES: tuple[float, ...] = (
    0.0,
    *(16.0 * 2.0 ** (step // 2) * (2.0**0.5 if step % 2 else 1.0) for step in range(33)),
)
"""Bin edges of prompt growth, in tokens: 0, then 16 to a million."""
TOKEN_BINS = len(TOKEN_EDGES)
PRIOR_WEIGHT_TIPS = 10.0
"""Weight of the coarser category's curve in a finer one, in tips at risk."""


def age_bin(age_s: float) -> int:
    """Return the bin of an age in seconds; a negative age counts as 0."""
    return bisect_right(AGE_EDGES_S, age_s) - 1 if age_s > 0 else 0


def token_bin(tokens: float) -> int:
    """Return the bin of a number of tokens; a negative number counts as 0."""
    return bisect_right(TOKEN_EDGES, tokens) - 1 if tokens > 0 else 0


_BIN_WIDTHS_S = [high - low for low, high in pairwise(AGE_EDGES_S)]


def survival_curve(
    events: Sequence[float],
    censored: Sequence[float],
    prior: Sequence[float] | None = None,
    prior_weight: float = 0.0,
) -> list[float]:
    """Return the Kaplan-Meier estimate on age bins (the actuarial form: half of a bin's censored
    tips are at risk).

    ``events[i]`` tips were continued at an age in bin ``i``, ``censored[i]`` were last seen waiting
    at such an age. Returns S at each of the ``AGE_BINS`` edges, from S(0) = 1 downwards.

    ``prior`` is the curve of a coarser category: each bin's hazard is shrunk towards its hazard as
    if ``prior_weight`` more tips at risk had followed it. Without ``prior``, these tips are never
    continued, which keeps S above 0 if few samples are left.
    """
    at_risk = float(sum(events) + sum(censored))
    curve = [1.0]
    survival_here = 1.0
    for i in range(AGE_BINS - 1):
        continued, waited = events[i], censored[i]
        exposed_tips = at_risk - 0.5 * waited + prior_weight
        at_risk -= continued + waited
        if prior is not None and prior[i] > 0.0:
            continued += prior_weight * (1.0 - prior[i + 1] / prior[i])
        if exposed_tips > 0.0:
            stay_probability = 1.0 - continued / exposed_tips
            survival_here = survival_here * stay_probability if stay_probability > 0.0 else 0.0
        curve.append(survival_here)
    return curve


def survival(curve: Sequence[float], age_s: float) -> float:
    """Return S at an age in seconds, linear between two bin edges."""
    i = age_bin(age_s)
    if i >= AGE_BINS - 1:
        return curve[AGE_BINS - 1]
    bin_share = (age_s - AGE_EDGES_S[i]) / (AGE_EDGES_S[i + 1] - AGE_EDGES_S[i])
    return curve[i] + bin_share * (curve[i + 1] - curve[i])


def continuation_probability(curve: Sequence[float], age_s: float) -> float:
    """Return the probability that a tip of this age is continued later, (S(a) - S(end)) / S(a); 0
    without a curve."""
    age = min(age_bin(age_s), len(curve) - 1)
    if age < 0 or curve[age] <= 0.0:
        return 0.0
    return (curve[age] - curve[-1]) / curve[age]


def gittins_rank(curve: Sequence[float]) -> list[float]:
    """Return the reuse gained per second of space held, for a tip with an age in each bin.

        G(a) = max over h of [S(a) - S(a+h)] / integral from a to a+h of S(u) du

    evaluated at the bins' lower edges. With the points (integral of S up to an edge, 1 - S there)
    this is the steepest slope from a point to a later one, so one walk from the right over the
    upper hull gives every bin in O(``AGE_BINS``). The unbounded last bin has rank 0.
    """
    ranks = [0.0] * AGE_BINS
    # The unused part of the curve is flat: its first point is the steepest to reach.
    last_bin, last_survival = AGE_BINS - 1, curve[AGE_BINS - 1]
    while last_bin and curve[last_bin - 1] == last_survival:
        last_bin -= 1
    space = 0.0
    space_at_edge = [space]
    for width, survival_before, survival_after in zip(_BIN_WIDTHS_S[:last_bin], curve, curve[1:]):
        space += 0.5 * (survival_before + survival_after) * width
        space_at_edge.append(space)
    hull: list[tuple[float, float]] = [(space, last_survival)]
    # Calls are inlined: a fit ranks many categories, and delays the eviction that triggered it.
    for i in range(last_bin - 1, -1, -1):
        space_here, survival_here = space_at_edge[i], curve[i]
        space_there, survival_there = hull[-1]
        # At S = 0 no tip is left and no space is held: the slope is 0.
        held = space_there - space_here
        slope = (survival_here - survival_there) / held if held > 0.0 else 0.0
        while len(hull) > 1:
            space_there, survival_there = hull[-2]
            held = space_there - space_here
            next_slope = (survival_here - survival_there) / held if held > 0.0 else 0.0
            if next_slope < slope:
                break
            slope = next_slope
            hull.pop()
        if slope > 0.0:
            ranks[i] = slope
        hull.append((space_here, survival_here))
    return ranks


def exceedance(counts: list[float], prior: list[float] | None) -> list[float]:
    """Return P(Q >= ``TOKEN_EDGES[i]``) of a prompt's growth Q in tokens, from counts by bin, and
    ``PRIOR_WEIGHT_TIPS`` samples of ``prior``."""
    prior, weight = ([0.0] * TOKEN_BINS, 0.0) if prior is None else (prior, PRIOR_WEIGHT_TIPS)
    at_least = list(accumulate(reversed(counts)))[::-1]
    total = at_least[0] + weight
    if total <= 0.0:
        return [1.0] * TOKEN_BINS
    return [(count + weight * chance) / total for count, chance in zip(at_least, prior)]
