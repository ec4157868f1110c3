"""How sure a quantile is, and whether a target is met: bootstrap over windows of a trace.

Requests of a minute share their queue, so that drawing them one by one would call a P99 far surer
than it is. What is drawn instead, with replacement, are stretches of time with all requests in
them: the non-overlapping block bootstrap (Carlstein, Annals of Statistics 14, 1986). Different
days are windows as well: give the times of several simulations one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_canopy.errors import CanopyError

LEAST_WINDOWS = 5
"""Fewer windows say nothing of how they differ."""


@dataclass(frozen=True, slots=True)
class QuantileInterval:
    """A quantile of all values, and where it lies in ``level`` of the resampled traces."""

    value: float
    low: float
    high: float
    level: float
    windows: int
    resampled: np.ndarray
    """The quantile of each resampled trace, sorted."""

    def chance_of_at_most(self, target: float) -> float:
        """Share of the resampled traces whose quantile meets ``target``."""
        return float(np.searchsorted(self.resampled, target, side="right") / len(self.resampled))


def quantile_interval(
    due_s: np.ndarray,
    values: np.ndarray,
    quantile: float = 0.99,
    *,
    window_s: float,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> QuantileInterval:
    """The ``quantile`` of ``values`` of requests due at ``due_s``, drawn again by windows of
    ``window_s`` seconds.

    ``SystemResult.due_s`` and ``ttft_s`` are such arrays. A window ought to be longer than a queue
    lasts. Empty windows are not drawn. Raises ``CanopyError`` for arrays of different lengths, a
    number out of range, or fewer than ``LEAST_WINDOWS`` windows with requests.
    """
    due, values = np.asarray(due_s, dtype=float), np.asarray(values, dtype=float)
    if due.shape != values.shape or due.ndim != 1:
        raise CanopyError(f"one time a value, got {due.shape} times and {values.shape} values")
    for name, number in (("quantile", quantile), ("level", level)):
        if not 0 < number < 1:
            raise CanopyError(f"{name} must be a number between 0 and 1, got {number!r}")
    if not 0 < window_s < float("inf"):
        raise CanopyError(f"window_s must be a number above 0, got {window_s!r}")
    if resamples < 1:
        raise CanopyError(f"resamples must be 1 or more, got {resamples!r}")
    start = due.min() if due.size else 0.0
    _, window = np.unique(((due - start) // window_s).astype(np.int64), return_inverse=True)
    count = int(window.max()) + 1 if due.size else 0
    if count < LEAST_WINDOWS:
        raise CanopyError(
            f"{count} windows of {window_s:g} s have requests, {LEAST_WINDOWS} are needed; give a "
            "longer trace or shorter windows"
        )
    order = np.argsort(values, kind="stable")
    ordered, whose = values[order], window[order]
    draws = np.random.default_rng(seed).integers(count, size=(resamples, count))
    found = np.empty(resamples)
    for number, drawn in enumerate(draws):
        # How often each request was drawn; its quantile without making the resampled trace.
        times = np.bincount(drawn, minlength=count)[whose]
        reached = np.cumsum(times)
        found[number] = ordered[np.searchsorted(reached, quantile * reached[-1])]
    found.sort()
    low, high = np.quantile(found, ((1 - level) / 2, (1 + level) / 2))
    value = ordered[min(int(np.ceil(quantile * len(ordered))), len(ordered)) - 1]
    return QuantileInterval(float(value), float(low), float(high), level, count, found)
