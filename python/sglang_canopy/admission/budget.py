"""How many tokens the sessions under way may need together: the capacity, and what showed to fit.

Footprints are an estimate on the safe side: they count turns that may come. While sessions wait
and those under way find what their last turn left, nobody is short of memory, and a little more is
let in; what is lost takes that back. Additive increase and multiplicative decrease, as of TCP's
window (Chiu and Jain 1989). The excess is bounded, since a session that was let in stays: without
a bound agents past the cliff collapse again (benchmark/latency/gate.py).
"""

from __future__ import annotations

_UP = 0.05
"""The excess grows by this share of the plan with each turn that found what was left for it."""
_DOWN = 0.5
"""Of the budget, what a turn that found nothing takes; one that found half takes half of it."""
_LOST = 0.1
"""So much may be missing without counting as lost: an answer seldom comes back token by token."""


class Budget:
    """``planned``: tokens that are sure to fit; ``most``: the greatest multiple of them, from 1."""

    def __init__(self, planned: float, most: float) -> None:
        self.planned = planned
        self.most = most
        self._times = 1.0

    @property
    def tokens(self) -> float:
        """What the footprints may add up to."""
        return self.planned * self._times

    def found(self, cached_tokens: int, left_tokens: int, waited_for: bool) -> None:
        """A turn found ``cached_tokens`` of the ``left_tokens`` that the one before it had left;
        ``waited_for``: whether any session waits."""
        lost = 1.0 - cached_tokens / left_tokens
        if lost > _LOST:
            self._times = max(1.0, self._times * (1.0 - _DOWN * lost))
        elif waited_for:
            self._times = min(self.most, self._times + _UP)
