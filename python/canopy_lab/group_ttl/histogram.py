"""What a group's reuse says of a TTL: hits won, and bytes it keeps on the disk for them.

A use of a page and the time until its next use make one *interval*. With a TTL of t, an interval
of at most t ends in a hit, and the page lies on the disk for min(interval, t). Counted per group,
in tokens, on one grid of TTLs. After H_k and C_k of Kareto, section 4.3 (arXiv 2603.08739), which
charges each block a whole TTL after its last use; here the window's end cuts that off.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STEPS_AN_OCTAVE = 8
FIRST_S, LAST_S = 1 / 16, 7 * 24 * 3600.0


def _grid() -> Floats:
    steps = int(np.ceil(np.log2(LAST_S / FIRST_S) * STEPS_AN_OCTAVE))
    return np.append(0.0, FIRST_S * 2.0 ** (np.arange(steps + 1) / STEPS_AN_OCTAVE))


GRID_S = _grid()
"""TTLs that counts are exact at, in seconds: 0, then 1/16 s to a week, 9 % apart."""


@dataclass(frozen=True, slots=True)
class Histograms:
    """Intervals of G groups over T grid TTLs, in tokens. Bin i holds what lasted more than
    ``GRID_S[i - 1]`` and at most ``GRID_S[i]``; longer ones are in the last."""

    reused: Ints
    """(G, T) tokens of intervals that ended in another use."""
    reused_token_s: Floats
    """(G, T) token-seconds of the same."""
    ended: Ints
    """(G, T) tokens of intervals that the window's end cut off, by their length so far."""
    ended_token_s: Floats
    requests: Ints
    """(G,) requests that used pages of the group: pages of one request are one observation."""
    duration_s: float
    """Of the window."""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def weight(self) -> Ints:
        """(G,) tokens of all intervals."""
        return self.reused.sum(axis=1) + self.ended.sum(axis=1)

    @property
    def hits(self) -> Ints:
        """(G, T) tokens hit with each TTL of the grid: H_g."""
        return np.cumsum(self.reused, axis=1)

    @property
    def mean_tokens(self) -> Floats:
        """(G, T) tokens on the disk, averaged over the window, with each TTL: B_g.

        Exact for the window itself: nothing is charged for what happens after its end.
        """
        count = self.reused + self.ended
        lasted = np.cumsum(self.reused_token_s + self.ended_token_s, axis=1)
        longer = count.sum(axis=1, keepdims=True) - np.cumsum(count, axis=1)
        return (lasted + longer * GRID_S) / max(self.duration_s, 1e-9)

    def expected(self, prior_requests: float = 0.0) -> Curves:
        """Hits and mean tokens of a longer run of the same traffic, per window's duration.

        A cut-off interval says that it lasted at least so long, not that it ended: the survival
        curve is Kaplan and Meier's. Groups of few requests lean on the curve of all, as if
        they had seen ``prior_requests`` more of it.
        """
        total = self.reused + self.ended
        weight = total.sum(axis=1, keepdims=True)
        at_risk = weight - np.cumsum(total, axis=1) + total - self.ended / 2
        pooled_risk = at_risk.sum(axis=0)
        pooled = self.reused.sum(axis=0) / np.maximum(pooled_risk, 1e-9)
        prior = prior_requests * weight / np.maximum(self.requests[:, None], 1)
        # The prior wears off with age as the group's own intervals would.
        left = np.cumprod(np.append(1.0, 1 - pooled[:-1]))
        prior = prior * left
        risk = at_risk + prior
        hazard = np.where(risk > 0, (self.reused + prior * pooled) / np.maximum(risk, 1e-9), 0.0)
        survival = np.cumprod(1 - np.minimum(hazard, 1.0), axis=1)
        hits = weight * (1 - survival)
        before = np.concatenate((np.ones((len(self), 1)), survival[:, :-1]), axis=1)
        width = np.diff(GRID_S, prepend=0.0)
        mean_age = np.cumsum((before + survival) / 2 * width, axis=1)
        return Curves(hits, weight * mean_age / max(self.duration_s, 1e-9))

    def exact(self) -> Curves:
        """Hits and mean tokens of this very window."""
        return Curves(self.hits.astype(np.float64), self.mean_tokens)


@dataclass(frozen=True, slots=True)
class Curves:
    """(G, T) hits and mean tokens on the disk at the TTLs of ``GRID_S``; neither ever falls."""

    hits: Floats
    mean_tokens: Floats

    def __len__(self) -> int:
        return len(self.hits)


def histograms(
    group: Ints,
    request: Ints,
    gaps_s: Floats,
    cut_s: Floats,
    tokens: Ints,
    groups: int,
    duration_s: float,
) -> Histograms:
    """Count intervals. Arrays of one entry an interval: its group (0 to ``groups`` - 1), the
    request whose use begins it, seconds until the next use (``inf``: none in the window),
    seconds until the window's end, tokens."""
    is_reused = np.isfinite(gaps_s)
    lasted = np.where(is_reused, gaps_s, cut_s)
    bins = np.minimum(np.searchsorted(GRID_S, lasted, side="left"), len(GRID_S) - 1)
    flat = group * len(GRID_S) + bins
    size = groups * len(GRID_S)

    def count(which: NDArray[np.bool_], values: NDArray) -> Floats:
        found = np.bincount(flat[which], weights=values[which], minlength=size)
        return found.reshape(groups, len(GRID_S)).astype(np.float64)

    token_s = tokens * lasted
    return Histograms(
        # Exact: token counts stay below 2**53.
        count(is_reused, tokens).astype(np.int64),
        count(is_reused, token_s),
        count(~is_reused, tokens).astype(np.int64),
        count(~is_reused, token_s),
        np.bincount(np.unique(request * groups + group) % groups, minlength=groups).astype(
            np.int64
        ),
        duration_s,
    )
