"""The exponential reuse model of the ATC 2025 paper (arXiv 2506.02634, Section 4.2).

For each category ``w`` an exponential is fitted to the reuse gaps of a recent window (Figure 15),
and a block last used ``t`` seconds ago has the priority

    ReuseProb_w(t, life) = F_w(t + life) - F_w(t)

the probability that its next use falls within the category's expected lifespan from now on.

Taken as it stands this is a joint probability: it asks how likely it was, when the block was last
used, that the next use comes between t and t + life. A cache knows one thing more: nobody has used
the block until t. Given that, the chance of a use at once, a second, is the hazard

    h_w(t) = f_w(t) / (1 - F_w(t)) = (1 / m_w) P_w exp(-t / m_w) / (1 - P_w + P_w exp(-t / m_w))

``hazard`` ranks by it, and it is the default: a block that will surely return late does not outrank
one that returns soon. The expected lifespan plays no part then. ``formula`` is the text's own.

The text leaves open whether the sampled distribution F_w counts what is never used again.

* Counted: F_w(x) = P_w (1 - exp(-x / m_w)), with P_w the share of the samples that were used again
  and m_w their mean gap. The default.
* Left out: P_w = 1, the distribution of the gaps of what was used again. The hazard is 1 / m_w then,
  whatever t is, since an exponential has no memory.

docs/research/papers/wa.md has the figures of each. Without the regulator (Figure 28's first step)
``life`` is without end, and what is left of the formula is P_w exp(-t / m_w).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CDF_COUNTS = ("all", "reused")
READINGS = ("hazard", "formula")
_MOST_EXPONENT = 600.0


@dataclass(frozen=True, slots=True)
class ExponentialModel:
    """Which reading of the formula is fitted."""

    counts_never_reused: bool = True
    """Whether F_w counts samples that were never used again."""
    life: bool = True
    """Of the formula: whether the expected lifespan bounds the time ahead that counts."""
    hazard: bool = True
    """Whether blocks rank by the hazard; else by the formula."""


@dataclass(slots=True)
class Exponential:
    """One category's fitted exponential. Before a fit every probability is 0, which is LRU."""

    height: float = 0.0
    """F_w at infinity: P_w, or 1 where only what was reused counts."""
    mean_gap_s: float = 0.0
    """Mean gap to the next use, of those that had one, in seconds; 0 while not fitted."""
    life_s: float = math.inf
    """Expected lifespan of a cached block in seconds: from a use to the last one, 0 for what is
    never used again (Figure 19)."""
    hazard: bool = True

    def rank(self, age_s: float) -> float:
        """Of a block that was last used ``age_s`` seconds ago: its hazard in 1/s, or
        ReuseProb_w(t, life)."""
        if self.mean_gap_s <= 0.0 or self.height <= 0.0:
            return 0.0
        rate = 1.0 / self.mean_gap_s
        if self.hazard:
            # Divided by P_w exp(-t / m_w), which may be too small for a float.
            grown = math.exp(min(rate * max(0.0, age_s), _MOST_EXPONENT))
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
    """Fit one category; ``None`` where nothing was ever reused, so that no gap is known.

    ``reused`` of ``samples`` were used again after gaps of ``gap_sum_s`` seconds in sum; ``lives``
    samples, never reused ones included, had lifespans of ``life_sum_s`` seconds in sum. Where no
    lifespan is known it is that of one more use.
    """
    if reused <= 0.0 or gap_sum_s <= 0.0:
        return None
    share, mean_gap_s = reused / samples, gap_sum_s / reused
    life_s = math.inf
    if model.life:
        life_s = life_sum_s / lives if lives else share * mean_gap_s
    height = share if model.counts_never_reused else 1.0
    return Exponential(height, mean_gap_s, life_s, model.hazard)
