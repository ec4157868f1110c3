"""Hits and mean disk content of each prefix group as functions of its TTL.

An *interval* is the time from a use of a page to its next use. With a TTL of t, an interval of at
most t ends in a hit, and the page stays on disk for min(interval, t). Intervals are counted per
group, in tokens, on one grid of TTLs. After H_k and C_k of Kareto, section 4.3 (arXiv 2603.08739),
which charges each block a whole TTL after its last use; here the window's end limits that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STEPS_PER_OCTAVE = 8
MIN_TTL_S, MAX_TTL_S = 1 / 16, 7 * 24 * 3600.0


def _grid() -> Floats:
    steps = int(np.ceil(np.log2(MAX_TTL_S / MIN_TTL_S) * STEPS_PER_OCTAVE))
    return np.append(0.0, MIN_TTL_S * 2.0 ** (np.arange(steps + 1) / STEPS_PER_OCTAVE))


GRID_S = _grid()
"""TTLs in seconds at which counts are exact: 0, then 1/16 s to a week in steps of 9 %."""


@dataclass(frozen=True, slots=True)
class Histograms:
    """Intervals of G groups over T grid TTLs, in tokens.

    Bin i holds intervals above ``GRID_S[i - 1]`` and up to ``GRID_S[i]``; the last bin also holds
    longer ones.
    """

    reused_tokens: Ints
    """(G, T) tokens of intervals that ended in another use."""
    reused_token_s: Floats
    """(G, T) token-seconds of these intervals."""
    open_tokens: Ints
    """(G, T) tokens of intervals still open at the window's end, by length."""
    open_token_s: Floats
    requests: Ints
    """(G,) requests that used pages of the group."""
    duration_s: float
    """Length of the window."""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def weight(self) -> Ints:
        """(G,) tokens of all intervals."""
        return self.reused_tokens.sum(axis=1) + self.open_tokens.sum(axis=1)

    @property
    def hits(self) -> Ints:
        """(G, T) tokens hit with each TTL of the grid: H_g."""
        return np.cumsum(self.reused_tokens, axis=1)

    @property
    def mean_tokens(self) -> Floats:
        """(G, T) mean tokens on the disk over the window with each TTL: B_g."""
        count = self.reused_tokens + self.open_tokens
        length_s = np.cumsum(self.reused_token_s + self.open_token_s, axis=1)
        longer_tokens = count.sum(axis=1, keepdims=True) - np.cumsum(count, axis=1)
        return (length_s + longer_tokens * GRID_S) / max(self.duration_s, 1e-9)

    def expected_curves(self, prior_requests: float = 0.0) -> Curves:
        """Return expected hits and mean tokens of further traffic, per window duration.

        Open intervals are right-censored, so the survival curve is a Kaplan-Meier estimate. Each
        group is shrunk to the pooled curve with the weight of ``prior_requests`` requests.
        """
        total = self.reused_tokens + self.open_tokens
        weight = total.sum(axis=1, keepdims=True)
        at_risk = weight - np.cumsum(total, axis=1) + total - self.open_tokens / 2
        pooled_risk = at_risk.sum(axis=0)
        pooled = self.reused_tokens.sum(axis=0) / np.maximum(pooled_risk, 1e-9)
        prior = prior_requests * weight / np.maximum(self.requests[:, None], 1)
        # The prior declines with age as the pooled survival does.
        prior = prior * np.cumprod(np.append(1.0, 1 - pooled[:-1]))
        risk = at_risk + prior
        events = self.reused_tokens + prior * pooled
        hazard = np.where(risk > 0, events / np.maximum(risk, 1e-9), 0.0)
        survival = np.cumprod(1 - np.minimum(hazard, 1.0), axis=1)
        hits = weight * (1 - survival)
        survival_before = np.concatenate((np.ones((len(self), 1)), survival[:, :-1]), axis=1)
        bin_width_s = np.diff(GRID_S, prepend=0.0)
        mean_age = np.cumsum((survival_before + survival) / 2 * bin_width_s, axis=1)
        return Curves(hits, weight * mean_age / max(self.duration_s, 1e-9))

    def exact_curves(self) -> Curves:
        """Return hits and mean tokens of the window itself."""
        return Curves(self.hits.astype(np.float64), self.mean_tokens)


@dataclass(frozen=True, slots=True)
class Curves:
    """(G, T) hits and mean tokens on the disk at the TTLs of ``GRID_S``, both non-decreasing."""

    hits: Floats
    mean_tokens: Floats

    def __len__(self) -> int:
        return len(self.hits)


def count_intervals(
    group: Ints,
    request: Ints,
    gaps_s: Floats,
    seconds_to_end: Floats,
    tokens: Ints,
    groups: int,
    duration_s: float,
) -> Histograms:
    """Count intervals by group and length.

    The arrays have one entry per interval: group (0 to ``groups`` - 1), request that begins it,
    seconds to the next use (``inf``: no use in the window), seconds to the window's end, tokens.
    """
    is_reused = np.isfinite(gaps_s)
    length_s = np.where(is_reused, gaps_s, seconds_to_end)
    bins = np.minimum(np.searchsorted(GRID_S, length_s, side="left"), len(GRID_S) - 1)
    cell = group * len(GRID_S) + bins
    cell_count = groups * len(GRID_S)

    def count(mask: NDArray[np.bool_], values: NDArray) -> Floats:
        sums = np.bincount(cell[mask], weights=values[mask], minlength=cell_count)
        return sums.reshape(groups, len(GRID_S)).astype(np.float64)

    token_s = tokens * length_s
    return Histograms(
        # Token counts below 2**53 are exact as floats.
        count(is_reused, tokens).astype(np.int64),
        count(is_reused, token_s),
        count(~is_reused, tokens).astype(np.int64),
        count(~is_reused, token_s),
        np.bincount(np.unique(request * groups + group) % groups, minlength=groups).astype(
            np.int64
        ),
        duration_s,
    )
