"""Find the cheapest member that may overtake all older members.

Members are in order of arrival. Each has a cost and an allowance: the seconds of younger work that
may still be admitted before it. A member may go next if no older member's allowance is below its
cost; the oldest always may.

A segment tree stores the minimum cost and allowance of each range, so queries and updates are
O(log n).
"""

from __future__ import annotations

import math

_INFINITE = math.inf
_MIN_CAPACITY = 16
"""Capacity of the smallest tree."""


class Passing:
    """Members by place, 0 being the oldest; costs and allowances in seconds.

    A member with infinite cost is never chosen; one with infinite allowance restricts no other.
    """

    __slots__ = ("_capacity", "_min_allowance", "_min_cost", "_pending", "members")

    def __init__(self, costs: list[float] | None = None, allowed: list[float] | None = None):
        costs, allowed = costs or [], allowed or []
        self.members = len(costs)
        size = _MIN_CAPACITY
        while size < 2 * self.members:
            size *= 2
        self._capacity = size
        self._min_cost = [_INFINITE] * (2 * size)
        self._min_allowance = [_INFINITE] * (2 * size)
        self._pending = [0.0] * (2 * size)
        """Lazy decrements, not yet applied to the nodes below."""
        self._min_cost[size : size + self.members] = costs
        self._min_allowance[size : size + self.members] = allowed
        for node in range(size - 1, 0, -1):
            self._recompute(node)

    @property
    def full(self) -> bool:
        return self.members == self._capacity

    def append(self, cost: float, allowed: float) -> int:
        """Append the youngest member and return its place."""
        place = self.members
        self.members += 1
        self.set_cost(place, cost)
        self.set_allowance(place, allowed)
        return place

    def cost(self, place: int) -> float:
        return self._min_cost[self._capacity + place]

    def set_cost(self, place: int, cost: float) -> None:
        costs, node = self._min_cost, self._capacity + place
        costs[node] = cost
        while node > 1:
            node //= 2
            costs[node] = min(costs[2 * node], costs[2 * node + 1])

    def allowance(self, place: int) -> float:
        node = self._capacity + place
        found = self._min_allowance[node]
        while node > 1:
            node //= 2
            found -= self._pending[node]
        return found

    def set_allowance(self, place: int, allowed: float) -> None:
        node = self._capacity + place
        above, parent = 0.0, node
        while parent > 1:
            parent //= 2
            above += self._pending[parent]
        self._min_allowance[node] = allowed + above
        self._recompute_ancestors(node)

    def least_allowance(self) -> float:
        return self._min_allowance[1]

    def pass_by(self, place: int, seconds: float) -> None:
        """Charge ``seconds`` to the allowance of every member older than ``place``."""
        left, right, size = self._capacity, self._capacity + place, self._capacity
        if place <= 0:
            return
        first, last = left, right - 1
        while left < right:
            if left & 1:
                self._subtract(left, seconds, size)
                left += 1
            if right & 1:
                right -= 1
                self._subtract(right, seconds, size)
            left //= 2
            right //= 2
        self._recompute_ancestors(first)
        self._recompute_ancestors(last)

    def shortest(self) -> int:
        """Return the place of the cheapest member that may go next; the older wins a tie.

        Returns -1 if no member may go, which requires that the oldest has infinite cost.
        """
        before = self.members
        while True:
            place = self._cheapest(before)
            if place < 0:
                return -1
            short = self._oldest_below(self.cost(place))
            if short >= place:
                return place
            before = short + 1  # younger members cost at least as much, so they are blocked too

    def may_go(self, place: int) -> bool:
        """Return whether all older members allow the cost of ``place``."""
        return self._oldest_below(self.cost(place)) >= place

    def _cheapest(self, before: int) -> int:
        """Return the cheapest place below ``before``, or -1 if all costs there are infinite."""
        best, found = _INFINITE, 0
        left, right = self._capacity, self._capacity + before
        while left < right:
            if left & 1:
                if self._min_cost[left] < best or (
                    self._min_cost[left] == best and self._starts_before(left, found)
                ):
                    best, found = self._min_cost[left], left
                left += 1
            if right & 1:
                right -= 1
                if self._min_cost[right] < best or (
                    self._min_cost[right] == best and self._starts_before(right, found)
                ):
                    best, found = self._min_cost[right], right
            left //= 2
            right //= 2
        if best == _INFINITE:
            return -1
        while found < self._capacity:
            found *= 2
            if self._min_cost[found] != best:
                found += 1
        return found - self._capacity

    def _starts_before(self, one: int, other: int) -> bool:
        """Return whether node ``one`` starts left of ``other``; 0 stands for no node."""
        return other == 0 or self._range_start(one) < self._range_start(other)

    def _range_start(self, node: int) -> int:
        return node << (self._capacity.bit_length() - node.bit_length())

    def _oldest_below(self, cost: float) -> int:
        """Return the oldest place with an allowance below ``cost``, or the tree's capacity."""
        if self._min_allowance[1] >= cost:
            return self._capacity
        node, above = 1, 0.0
        while node < self._capacity:
            above += self._pending[node]
            node *= 2
            if self._min_allowance[node] - above >= cost:
                node += 1
        return node - self._capacity

    def _subtract(self, node: int, seconds: float, size: int) -> None:
        self._min_allowance[node] -= seconds
        if node < size:
            self._pending[node] += seconds

    def _recompute(self, node: int) -> None:
        self._min_cost[node] = min(self._min_cost[2 * node], self._min_cost[2 * node + 1])
        self._min_allowance[node] = (
            min(self._min_allowance[2 * node], self._min_allowance[2 * node + 1])
            - self._pending[node]
        )

    def _recompute_ancestors(self, node: int) -> None:
        least, lower = self._min_allowance, self._pending
        while node > 1:
            node //= 2
            least[node] = min(least[2 * node], least[2 * node + 1]) - lower[node]

    def copy(self) -> Passing:
        other = Passing.__new__(Passing)
        other.members, other._capacity = self.members, self._capacity
        other._min_cost, other._min_allowance, other._pending = (
            self._min_cost[:],
            self._min_allowance[:],
            self._pending[:],
        )
        return other
