"""Who is the shortest that may go next, where everyone may be passed for so much work and no more.

Members stand in order of arrival. Each has a cost and an allowance: how much work of younger ones
may still be let in before it. A member may go next if the allowance of everyone older is at least
its cost. The oldest always may.

A segment tree over the members keeps the least cost and the least allowance of each range, so that
a choice and a change take O(log n).
"""

from __future__ import annotations

import math

_NONE = math.inf
_FEWEST = 16
"""Places of the smallest tree."""


class Passing:
    """Members by place, 0 the oldest; costs and allowances in seconds.

    A member with an infinite cost is never chosen; one with an infinite allowance holds up nobody.
    """

    __slots__ = ("_cost", "_least", "_lower", "_size", "members")

    def __init__(self, costs: list[float] | None = None, allowed: list[float] | None = None):
        costs, allowed = costs or [], allowed or []
        self.members = len(costs)
        size = _FEWEST
        while size < 2 * self.members:
            size *= 2
        self._size = size
        self._cost = [_NONE] * (2 * size)
        self._least = [_NONE] * (2 * size)
        self._lower = [0.0] * (2 * size)
        """What is still to be taken off the allowances of a range."""
        self._cost[size : size + self.members] = costs
        self._least[size : size + self.members] = allowed
        for node in range(size - 1, 0, -1):
            self._pull(node)

    @property
    def full(self) -> bool:
        """Whether there is no place for another member."""
        return self.members == self._size

    def append(self, cost: float, allowed: float) -> int:
        """The youngest member comes; returns its place."""
        place = self.members
        self.members += 1
        self.set_cost(place, cost)
        self.set_allowance(place, allowed)
        return place

    def cost(self, place: int) -> float:
        return self._cost[self._size + place]

    def set_cost(self, place: int, cost: float) -> None:
        costs, node = self._cost, self._size + place
        costs[node] = cost
        while node > 1:
            node //= 2
            costs[node] = min(costs[2 * node], costs[2 * node + 1])

    def allowance(self, place: int) -> float:
        node = self._size + place
        found = self._least[node]
        while node > 1:
            node //= 2
            found -= self._lower[node]
        return found

    def set_allowance(self, place: int, allowed: float) -> None:
        node = self._size + place
        above, parent = 0.0, node
        while parent > 1:
            parent //= 2
            above += self._lower[parent]
        self._least[node] = allowed + above
        self._pull_up(node)

    def least_allowance(self) -> float:
        """Of all members."""
        return self._least[1]

    def pass_by(self, place: int, seconds: float) -> None:
        """So much work is let in before everyone older than ``place``."""
        left, right, size = self._size, self._size + place, self._size
        if place <= 0:
            return
        first, last = left, right - 1
        while left < right:
            if left & 1:
                self._take(left, seconds, size)
                left += 1
            if right & 1:
                right -= 1
                self._take(right, seconds, size)
            left //= 2
            right //= 2
        self._pull_up(first)
        self._pull_up(last)

    def shortest(self) -> int:
        """The place of the cheapest member that may go next, the older of equals; -1 if nobody may,
        which is so only where the oldest has no cost."""
        before = self.members
        while True:
            place = self._cheapest(before)
            if place < 0:
                return -1
            short = self._first_below(self.cost(place))
            if short >= place:
                return place
            before = short + 1  # everyone younger costs as much, and is held up there too

    def may_go(self, place: int) -> bool:
        """Whether the allowance of everyone older is at least the cost of ``place``."""
        return self._first_below(self.cost(place)) >= place

    def _cheapest(self, before: int) -> int:
        """The place below ``before`` with the least cost; -1 if there is none with a finite one."""
        best, found = _NONE, 0
        left, right = self._size, self._size + before
        while left < right:
            if left & 1:
                if self._cost[left] < best or (
                    self._cost[left] == best and self._left_of(left, found)
                ):
                    best, found = self._cost[left], left
                left += 1
            if right & 1:
                right -= 1
                if self._cost[right] < best or (
                    self._cost[right] == best and self._left_of(right, found)
                ):
                    best, found = self._cost[right], right
            left //= 2
            right //= 2
        if best == _NONE:
            return -1
        while found < self._size:
            found *= 2
            if self._cost[found] != best:
                found += 1
        return found - self._size

    def _left_of(self, one: int, other: int) -> bool:
        """Whether the range of a node begins before that of another; 0 is none."""
        return other == 0 or self._begin(one) < self._begin(other)

    def _begin(self, node: int) -> int:
        return node << (self._size.bit_length() - node.bit_length())

    def _first_below(self, cost: float) -> int:
        """The place of the oldest whose allowance is below ``cost``; the number of places if there
        is none."""
        if self._least[1] >= cost:
            return self._size
        node, above = 1, 0.0
        while node < self._size:
            above += self._lower[node]
            node *= 2
            if self._least[node] - above >= cost:
                node += 1
        return node - self._size

    def _take(self, node: int, seconds: float, size: int) -> None:
        self._least[node] -= seconds
        if node < size:
            self._lower[node] += seconds

    def _pull(self, node: int) -> None:
        self._cost[node] = min(self._cost[2 * node], self._cost[2 * node + 1])
        self._least[node] = (
            min(self._least[2 * node], self._least[2 * node + 1]) - self._lower[node]
        )

    def _pull_up(self, node: int) -> None:
        least, lower = self._least, self._lower
        while node > 1:
            node //= 2
            least[node] = min(least[2 * node], least[2 * node + 1]) - lower[node]

    def copy(self) -> Passing:
        """Another one, to try choices on."""
        other = Passing.__new__(Passing)
        other.members, other._size = self.members, self._size
        other._cost, other._least, other._lower = self._cost[:], self._least[:], self._lower[:]
        return other
