"""The highest load that a system sustains.

A load is sustained while throughput equals the arrival rate and the queue does not grow. In a trace
of finite length both conditions are equivalent: if requests arrive ``a`` times as fast as they are
served, a request at ``t`` waits ``(a - 1) t``. A rate is above saturation if the wait grows by more
than ``TOLERANCE`` seconds per second over the run (``LatencyReport.growth``). Bisection over the rate
finds the saturation.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang_canopy.errors import CanopyError

TOLERANCE = 0.01
"""Largest growth of the wait, s/s, of a sustained load: throughput within 1 % of arrivals."""
SESSION_TOLERANCE = 0.05
"""For sessions of many turns: without a queue, waits still add up to a prefill per turn."""
RESOLUTION = 0.01
"""Relative width at which a bisection ends."""
_BRACKET_STEPS = 12


def saturation(
    growth_at: Callable[[float], float], guess: float, *, tolerance: float = TOLERANCE
) -> float:
    """Return the highest rate at which the wait does not grow, within ``RESOLUTION`` from below.

    ``growth_at`` runs the system at a rate and returns the growth of the wait in seconds per
    second. ``guess`` is any initial rate above 0. Raises ``CanopyError`` if doubling or halving it
    a dozen times finds no limit.
    """

    def keeps_up(rate: float) -> bool:
        return growth_at(rate) <= tolerance

    low = high = guess
    if keeps_up(guess):
        for _ in range(_BRACKET_STEPS):
            high *= 2
            if not keeps_up(high):
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
            if keeps_up(low):
                break
            high = low
        else:
            raise CanopyError(
                f"the queue grows even at {low:g} times the trace's rate; give the system more "
                "memory or a faster profile"
            )
    while high / low > 1 + RESOLUTION:
        middle = (low * high) ** 0.5
        if keeps_up(middle):
            low = middle
        else:
            high = middle
    return low
