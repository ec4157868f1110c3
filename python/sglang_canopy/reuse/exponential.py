"""The exponential reuse model of the ATC 2025 paper (arXiv 2506.02634, Section 4.2).

For each category ``w`` an exponential is fitted to the reuse gaps of a recent window (Figure 15). A
block last used ``t`` seconds ago has the priority

    ReuseProb_w(t, life) = F_w(t + life) - F_w(t)

the probability that its next use falls within the category's expected lifespan from now on.

This formula, ``formula``, is a joint probability at the time of the last use: the next use falls
between t and t + life. A cache also observes that the block was not used until t. Given that, the
chance of a use at once, per second, is the hazard

    h_w(t) = f_w(t) / (1 - F_w(t)) = (1 / m_w) P_w exp(-t / m_w) / (1 - P_w + P_w exp(-t / m_w))

The default, ``hazard``, ranks by h_w: a block that returns soon outranks a block that is certain to
return late. The hazard does not use the expected lifespan.

The paper leaves open whether the sampled distribution F_w counts blocks that are never used again.

* Counted (the default): F_w(x) = P_w (1 - exp(-x / m_w)), with P_w the share of samples used again
  and m_w their mean gap.
* Not counted: P_w = 1, the distribution of the gaps of reused samples. The hazard is then 1 / m_w
  at any t, since an exponential has no memory.

docs/research/papers/wa.md has figures for each reading. Without the regulator (Figure 28's first
step) ``life`` is infinite, and the formula reduces to P_w exp(-t / m_w).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CDF_COUNTS = ("all", "reused")
READINGS = ("hazard", "formula")
_MAX_EXPONENT = 600.0


@dataclass(frozen=True, slots=True)
class ExponentialModel:
    """Selects the reading of the formula to fit."""

    counts_never_reused: bool = True
    """Whether F_w counts samples that were never used again."""
    life: bool = True
    """``formula`` only: whether the expected lifespan bounds the time ahead."""
    hazard: bool = True
    """Rank blocks by the hazard; otherwise by the formula."""


@dataclass(slots=True)
class Exponential:
    """One category's fitted exponential. Before a fit every probability is 0, which is LRU."""

    height: float = 0.0
    """F_w at infinity: P_w, or 1 if only reused samples count."""
    mean_gap_s: float = 0.0
    """Mean gap of reused samples, in seconds; 0 before a fit."""
    life_s: float = math.inf
    """Expected seconds from a use to the last use; 0 if never reused (Figure 19)."""
    hazard: bool = True

    def rank(self, age_s: float) -> float:
        """Return a block's hazard (1/s) or ReuseProb_w(t, life), ``age_s`` after its last use."""
        if self.mean_gap_s <= 0.0 or self.height <= 0.0:
            return 0.0
        rate = 1.0 / self.mean_gap_s
        if self.hazard:
            # Numerator and denominator are divided by P_w exp(-t / m_w), which can underflow.
            grown = math.exp(min(rate * max(0.0, age_s), _MAX_EXPONENT))
            return rate / (1.0 + (1.0 / self.height - 1.0) * grown)
        later = -math.expm1(-rate * self.life_s)
        return self.height * math.exp(-rate * max(0.0, age_s)) * later


def fit_exponential(
    model: ExponentialModel,
    reused: float,
    samples: float,
    gap_sum_s: float,
    life_sum_s: float,
    lives: float,
) -> Exponential | None:
    """Fit one category. Return ``None`` without a reused sample, since no gap is known.

    ``reused`` of ``samples`` were used again; their gaps sum to ``gap_sum_s`` seconds. ``lives``
    samples, including samples never reused, have lifespans that sum to ``life_sum_s`` seconds.
    Without known lifespans the lifespan is that of one further use.
    """
    if reused <= 0.0 or gap_sum_s <= 0.0:
        return None
    share, mean_gap_s = reused / samples, gap_sum_s / reused
    life_s = math.inf
    if model.life:
        life_s = life_sum_s / lives if lives else share * mean_gap_s
    height = share if model.counts_never_reused else 1.0
    return Exponential(height, mean_gap_s, life_s, model.hazard)
