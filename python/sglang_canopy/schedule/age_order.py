"""Members of a queue by age, of which the cheapest that every older member allows goes next.

Members are in order of arrival. Each has a cost and an allowance: the seconds of younger work that
may still be admitted before it. A member may go next if no older member's allowance is below its
cost; the oldest always may.

Plain NumPy arrays: every call is O(members), which up to thousands of members is faster than a
segment tree (docs/research/tried.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MIN_CAPACITY = 16

Seconds = Sequence[float] | NDArray[np.float64]


class AgeOrder:
    """Members by position, 0 for the oldest; costs and allowances in seconds.

    A member with infinite cost is never chosen; one with infinite allowance restricts no other.
    """

    __slots__ = ("_allowances", "_costs", "members")

    def __init__(self, costs: Seconds = (), allowances: Seconds = ()) -> None:
        self.members = len(costs)
        capacity = max(_MIN_CAPACITY, 2 * self.members)
        self._costs = np.full(capacity, math.inf)
        self._allowances = np.full(capacity, math.inf)
        self._costs[: self.members] = costs
        self._allowances[: self.members] = allowances

    @property
    def is_full(self) -> bool:
        return self.members == len(self._costs)

    def append(self, cost: float, allowance: float) -> int:
        """Append the youngest member and return its position."""
        position = self.members
        self.members += 1
        self._costs[position], self._allowances[position] = cost, allowance
        return position

    def set_cost(self, position: int, cost: float) -> None:
        self._costs[position] = cost

    def allowance(self, position: int) -> float:
        return self._allowances.item(position)

    def set_allowance(self, position: int, allowance: float) -> None:
        self._allowances[position] = allowance

    def least_allowance(self) -> float:
        return float(self._allowances[: self.members].min(initial=math.inf))

    def charge_older(self, position: int, seconds: float) -> None:
        """Charge ``seconds`` to the allowance of every member older than ``position``."""
        self._allowances[:position] -= seconds

    def cheapest(self) -> int:
        """Return the position of the cheapest member that may go next; the older wins a tie.

        Returns -1 if no member may go, which requires that the oldest has infinite cost.
        """
        if not self.members:
            return -1
        costs = self._costs[: self.members]
        least_older = np.empty(self.members)  # least allowance of the older members
        least_older[0] = math.inf
        np.minimum.accumulate(self._allowances[: self.members - 1], out=least_older[1:])
        eligible_costs = np.where(least_older >= costs, costs, math.inf)
        position = int(eligible_costs.argmin())
        return position if eligible_costs.item(position) < math.inf else -1

    def may_overtake(self, position: int) -> bool:
        """Return whether all older members allow the cost of ``position``."""
        least = self._allowances[:position].min(initial=math.inf)
        return bool(least >= self._costs[position])

    def copy(self) -> AgeOrder:
        return AgeOrder(self._costs[: self.members], self._allowances[: self.members])
