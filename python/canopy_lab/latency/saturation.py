"""The highest load that a system follows, and the highest that meets a target.

A load is followed as long as throughput is that of the arrivals and the queue does not grow. In a
trace of finite length both are one: if requests come ``a`` times as fast as they are served, the
wait of what comes at ``t`` is ``(a - 1) t``. So a rate is above saturation when the wait grows by
more than ``TOLERANCE`` seconds a second over the run (``report.growth``), and the saturation is
found by bisection over the rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sglang_canopy.errors import CanopyError

TOLERANCE = 0.01
"""Growth of the wait, in seconds a second, up to which a load counts as followed: throughput
stays within 1 % of the arrivals."""
SESSION_TOLERANCE = 0.05
"""The same for sessions of many turns, whose waits without a queue, a prefill a turn, add up."""
RESOLUTION = 0.01
"""Relative width at which a bisection ends."""
_BRACKET_STEPS = 12


def saturation(
    growth_at: Callable[[float], float],
    guess: float,
    *,
    tolerance: float = TOLERANCE,
    resolution: float = RESOLUTION,
) -> float:
    """The highest rate at which the wait does not grow, within ``resolution`` from below.

    ``growth_at`` runs the system at a rate and says by how many seconds a second the wait grows;
    ``guess`` is any rate above 0 to begin with. Raises ``CanopyError`` where doubling or halving
    it a dozen times meets no limit.
    """

    def followed(rate: float) -> bool:
        return growth_at(rate) <= tolerance

    low = high = guess
    if followed(guess):
        for _ in range(_BRACKET_STEPS):
            high *= 2
            if not followed(high):
                break
            low = high
        else:
            raise CanopyError(
                f"the system follows even {low:g} times the trace's rate: it has no saturation "
                "there; give a longer trace"
            )
    else:
        for _ in range(_BRACKET_STEPS):
            low /= 2
            if followed(low):
                break
            high = low
        else:
            raise CanopyError(
                f"the queue grows even at {low:g} times the trace's rate; give the system more "
                "memory or a faster profile"
            )
    return bisect(followed, low, high, resolution)


def bisect(
    good: Callable[[float], bool], low: float, high: float, resolution: float = RESOLUTION
) -> float:
    """The largest value found good between ``low``, which is, and ``high``, which is not."""
    while high / low > 1 + resolution:
        middle = (low * high) ** 0.5
        if good(middle):
            low = middle
        else:
            high = middle
    return low


def goodput(
    met: Callable[[float], bool], loads: Iterable[float], resolution: float = RESOLUTION
) -> float:
    """The highest load that meets a target, searched between the loads that were run.

    ``met`` runs a load and says so. Between the highest of ``loads`` below which all meet it and
    the next, the limit is found by bisection. 0 if the lowest misses it already; the highest if
    all meet it, which says no more than that the limit is not below.
    """
    best = 0.0
    for load in sorted(loads):
        if met(load):
            best = load
        else:
            return bisect(met, best, load, resolution) if best else 0.0
    return best
