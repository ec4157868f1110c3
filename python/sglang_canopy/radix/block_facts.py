"""Facts about blocks of prompts, and the causes of one request's misses."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_canopy.radix.missed import EVICTED, NO_TIER, UNKNOWN, Key, Left, Sums


class Visit:
    """A request that computes blocks."""

    __slots__ = ("running", "written")

    def __init__(self) -> None:
        self.running = True
        self.written = 0
        """Tokens of its path that are in the tree."""


class Misses:
    """Causes of one request's misses, from its admission to its end."""

    __slots__ = ("cached", "evicted", "sums", "visit")

    def __init__(self, cached: int) -> None:
        self.cached = cached
        """Tokens that the request found."""
        self.sums: Sums = {}
        self.evicted: list[tuple[Left, int]] = []
        self.visit = Visit()

    def add(self, key: Key, tokens: int) -> None:
        self.sums[key] = self.sums.get(key, 0) + tokens

    def charge(self, key: Key, fact: Visit | Left | None, tokens: int) -> None:
        """Add tokens of a block whose fact is ``fact``."""
        self.sums[key] = self.sums.get(key, 0) + tokens
        if key[0] == EVICTED and type(fact) is Left:
            if self.evicted and self.evicted[-1][0] is fact:
                tokens += self.evicted.pop()[1]
            self.evicted.append((fact, tokens))


class BlockMap:
    """Bounded map from block hash to latest fact, in two generations; a full one replaces the older."""

    __slots__ = ("_dying", "_new", "_old", "most", "turns")

    def __init__(self, most: int) -> None:
        self.most = most
        self.turns = 0
        """Generations that were replaced."""
        self._new: dict[int, Visit | Left] = {}
        self._old: dict[int, Visit | Left] = {}
        self._dying: dict[int, Visit | Left] = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def get(self, block: int) -> Visit | Left | None:
        found = self._new.get(block)
        return self._old.get(block) if found is None else found

    def put(self, blocks: Sequence[int], fact: Visit | Left) -> None:
        """Set the fact of ``blocks``. A dropped generation is freed bit by bit, not in one pause."""
        self._new.update(dict.fromkeys(blocks, fact))
        dying = self._dying
        for _ in range(min(2 * len(blocks), len(dying))):
            dying.popitem()
        if len(self._new) >= self.most // 2:
            self._dying, self._old, self._new = self._old, self._new, {}
            self.turns += 1


def fitted(sums: Sums, total: int) -> Sums:
    """Return ``sums`` with ``total`` tokens: a request may find less, or more, when it is computed than
    when it was admitted."""
    spare = sum(sums.values()) - total
    if not spare:
        return sums
    found = dict(sums)
    if spare < 0:
        found[UNKNOWN, NO_TIER] = found.get((UNKNOWN, NO_TIER), 0) - spare
        return found
    for key in list(found):
        taken = min(spare, found[key])
        found[key] -= taken
        spare -= taken
    return {key: tokens for key, tokens in found.items() if tokens}
