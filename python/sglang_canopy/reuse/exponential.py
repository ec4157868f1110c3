"""The exponential reuse model of the ATC 2025 paper (arXiv 2506.02634, Section 4.2).

For each category ``w`` an exponential is fitted to the reuse gaps of a recent window (Figure 15). A
block last used ``t`` seconds ago has the priority

    ReuseProb_w(t, life) = F_w(t + life) - F_w(t)

the probability that its next use falls within the category's expected lifespan from now on.

The paper leaves open whether the sampled distribution F_w counts blocks that are never used again. Here it
does: F_w(x) = P_w (1 - exp(-x / m_w)), with P_w the share of samples used again and m_w their mean gap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Exponential:
    """One category's fitted exponential. Before a fit every probability is 0, which is LRU."""

    reused_share: float = 0.0
    """F_w at infinity: P_w."""
    mean_gap_s: float = 0.0
    """Mean gap of reused samples, in seconds; 0 before a fit."""
    life_s: float = math.inf
    """Expected seconds from a use to the last use; 0 if never reused (Figure 19)."""

    def rank(self, age_s: float) -> float:
        """Return a block's ReuseProb_w(t, life), ``age_s`` after its last use."""
        if self.mean_gap_s <= 0.0 or self.reused_share <= 0.0:
            return 0.0
        rate_per_s = 1.0 / self.mean_gap_s
        further_use = -math.expm1(-rate_per_s * self.life_s)
        return self.reused_share * math.exp(-rate_per_s * max(0.0, age_s)) * further_use


def fit_exponential(
    reused_count: float, sample_count: float, gap_sum_s: float, life_sum_s: float, life_count: float
) -> Exponential | None:
    """Fit one category. Return ``None`` without a reused sample, since no gap is known. ``reused_count`` of
    ``sample_count`` were used again; their gaps sum to ``gap_sum_s`` seconds. ``life_count`` samples, including
    samples never reused, have lifespans that sum to ``life_sum_s`` seconds. Without known lifespans the
    lifespan is that of one further use."""
    if reused_count <= 0.0 or gap_sum_s <= 0.0:
        return None
    reused_share, mean_gap_s = reused_count / sample_count, gap_sum_s / reused_count
    life_s = life_sum_s / life_count if life_count else reused_share * mean_gap_s
    return Exponential(reused_share, mean_gap_s, life_s)
