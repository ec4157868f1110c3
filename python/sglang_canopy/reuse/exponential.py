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

    height: float = 0.0
    """F_w at infinity: P_w."""
    mean_gap_s: float = 0.0
    """Mean gap of reused samples, in seconds; 0 before a fit."""
    life_s: float = math.inf
    """Expected seconds from a use to the last use; 0 if never reused (Figure 19)."""

    def rank(self, age_s: float) -> float:
        """Return a block's ReuseProb_w(t, life), ``age_s`` after its last use."""
        if self.mean_gap_s <= 0.0 or self.height <= 0.0:
            return 0.0
        rate = 1.0 / self.mean_gap_s
        later = -math.expm1(-rate * self.life_s)
        return self.height * math.exp(-rate * max(0.0, age_s)) * later


def fit_exponential(
    reused: float, samples: float, gap_sum_s: float, life_sum_s: float, lives: float
) -> Exponential | None:
    """Fit one category. Return ``None`` without a reused sample, since no gap is known. ``reused`` of
    ``samples`` were used again; their gaps sum to ``gap_sum_s`` seconds. ``lives`` samples, including
    samples never reused, have lifespans that sum to ``life_sum_s`` seconds. Without known lifespans the
    lifespan is that of one further use."""
    if reused <= 0.0 or gap_sum_s <= 0.0:
        return None
    share, mean_gap_s = reused / samples, gap_sum_s / reused
    return Exponential(share, mean_gap_s, life_sum_s / lives if lives else share * mean_gap_s)
