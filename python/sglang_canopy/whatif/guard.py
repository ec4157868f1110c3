"""Whether the running policy hits less than LRU: a test that may be looked at after every request.

A confidence sequence (Robbins' normal mixture; Howard et al., Annals of Statistics 49, 2021,
Section 3.2). With S the sum of the differences between two shadow caches on the same requests and V
the sum of their squares, S leaves the band sqrt((V + r) ln((V + r) / (r a^2))) with a probability of
at most about a, if there is no difference, however long it is watched. Nothing fades: the band grows
more slowly than a steady loss does, so that a small loss is found, too, only later.
"""

from __future__ import annotations

import math

MISTAKEN = 0.001
"""How probable it may be to find a loss where there is none."""
FIRST_DIFFERENCES = 50
"""These say how large differences are here (r); they do not count."""


class Guard:
    """One comparison, in tokens. ``lost`` stays true once it is."""

    __slots__ = ("_differences", "_scale", "_squares", "_sum", "lost")

    def __init__(self) -> None:
        self.lost = False
        """Whether LRU hits more, surely."""
        self._differences = 0
        self._scale = 0.0
        self._sum = self._squares = 0.0

    def compare(self, lru: int, running: int) -> None:
        """Prompt tokens of one request that each of the two had."""
        more = float(lru - running)
        if more and self._differences < FIRST_DIFFERENCES:
            self._differences += 1
            self._scale += more * more
            return
        self._sum += more
        self._squares += more * more
        band = self._band()
        if self._sum > band:
            self.lost = True
        elif self._sum < -band:
            # The running policy is ahead: what it has won must not hide what it loses from now on.
            self._sum = self._squares = 0.0

    def _band(self) -> float:
        scale = max(self._scale, 1.0)
        grown = (self._squares + scale) / scale
        return math.sqrt(grown * scale * (math.log(grown) - 2.0 * math.log(MISTAKEN)))
