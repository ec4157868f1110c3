"""The exponential reuse model of the ATC 2025 paper (arXiv 2506.02634, Section 4.2).

For each category ``w`` an exponential is fitted to the reuse gaps of a recent window (Figure 15),
and a block last used ``t`` seconds ago has the priority

    ReuseProb_w(t, life) = F_w(t + life) - F_w(t)

the probability that its next use falls within the category's expected lifespan from now on.

The text leaves open whether the sampled distribution F_w counts what is never used again.

* Counted: F_w(x) = P_w (1 - exp(-x / m_w)), with P_w the share of the samples that were used again
  and m_w their mean gap; so ReuseProb_w = P_w exp(-t / m_w) (1 - exp(-life / m_w)). The default: it
  is the only reading under which a ten-turn request outranks a one-turn request because more of
  them have a next turn, which is what Section 4.1 wants of the policy (with Figure 11), and
  under which the policy is at least as good as LRU and the life regulator adds hits, as Section 4.3
  and Figure 28 report (docs/research/papers/wa.md has the figures of both).
* Left out: P_w = 1, the distribution of the gaps of what was used again.

Without the regulator (Figure 28's first step) ``life`` is without end, and what is left is
P_w exp(-t / m_w).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CDF_COUNTS = ("all", "reused")


@dataclass(frozen=True, slots=True)
class ExponentialModel:
    """Which reading of the formula is fitted."""

    counts_never_reused: bool = True
    """Whether F_w counts samples that were never used again."""
    life: bool = True
    """Whether the expected lifespan bounds the time ahead that counts."""


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

    def probability(self, age_s: float) -> float:
        """ReuseProb_w(t, life) for a block that was last used ``age_s`` seconds ago.

        It is not conditioned on "not used until t": an exponential has no memory, so that would
        cancel t.
        """
        if self.mean_gap_s <= 0.0:
            return 0.0
        rate = 1.0 / self.mean_gap_s
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
    lifespan is known (a restored profile has none) it is that of one more use.
    """
    if reused <= 0.0 or gap_sum_s <= 0.0:
        return None
    share, mean_gap_s = reused / samples, gap_sum_s / reused
    life_s = math.inf
    if model.life:
        life_s = life_sum_s / lives if lives else share * mean_gap_s
    return Exponential(share if model.counts_never_reused else 1.0, mean_gap_s, life_s)
