"""Cost of the floor under a policy that wins, and its savings under a policy that loses.

    python benchmark/whatif/floor.py --data DIR

Each trace is served under LRU, under a policy, and under that policy with the floor of
``--canopy-whatif``: LRU takes its place in the same cache while it is behind. Policies that lose
(least frequently used, a random order) test the floor. Prints each policy's hits over LRU, in points of
all prompt tokens, and the requests at which the order changed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from canopy_lab.sim.requests import to_requests

sys.path.insert(0, str(Path(__file__).parent))
from meter import trace

from sglang_canopy.policy.base import Policy, Victim
from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Leaf, Request
from sglang_canopy.whatif.floor import Floor

TRACES = ("conversation", "synthetic", "agentic-60", "agentic-40")
SHARES = (0.02, 0.05, 0.1, 0.2, 0.3)


class Random(Policy):
    """Any leaf, as likely as another."""

    def __init__(self, seed: int) -> None:
        super().__init__(None)
        self._draw = random.Random(seed)
        self._leaves: list[Leaf] = []

    def admit(self, leaf: Leaf, now: float) -> None:
        leaf.slot = len(self._leaves)
        self._leaves.append(leaf)

    def drop(self, leaf: Leaf) -> None:
        if leaf.slot is None:
            return
        last = self._leaves.pop()
        if last is not leaf:
            self._leaves[leaf.slot], last.slot = last, leaf.slot
        leaf.slot = None

    def victim(self, now: float) -> Victim | None:
        return Victim(self._draw.choice(self._leaves)) if self._leaves else None

    def leaves(self) -> Iterator[Leaf]:
        return iter(self._leaves)


class Exchanged(Policy):
    """One policy learns; it or LRU ranks."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(None)
        self.ranker = self.wanted = policy
        self.lru = make_policy("lru")
        self._held: dict[int, Leaf] = {}

    def arrive(self, request: Request) -> str:
        return self.wanted.arrive(request)

    def finish(self, request: Request) -> str:
        return self.wanted.finish(request)

    def admit(self, leaf: Leaf, now: float) -> None:
        self._held[id(leaf)] = leaf
        self.ranker.admit(leaf, now)

    def drop(self, leaf: Leaf) -> None:
        self._held.pop(id(leaf), None)
        self.ranker.drop(leaf)

    def victim(self, now: float) -> Victim | None:
        return self.ranker.victim(now)

    def split(self, leaf: Leaf, head: Leaf) -> None:
        self.ranker.split(leaf, head)

    def rank_by(self, ranker: Policy, now: float) -> None:
        """Rank the cached leaves by another policy."""
        for leaf in self._held.values():
            self.ranker.drop(leaf)
        self.ranker = ranker
        for leaf in self._held.values():
            ranker.admit(leaf, now)


class Row(NamedTuple):
    """Shares of the prompt tokens, in points, and when the order changed."""

    lru: float
    policy: float
    floored: float
    changes: list[int]


def served(requests: list[Any], blocks: int, make: Callable[[], Policy]) -> Row:
    """One trace under LRU, under a policy, and under it with the floor."""
    size = requests[0].block_tokens
    exchanged = Exchanged(make())
    trees = [RadixTree(p, blocks, size) for p in (make_policy("lru"), make(), exchanged)]
    floor, hits, asked, changes = Floor(blocks * size), [0, 0, 0], 0, []
    for number, same in enumerate(zip(*(to_requests(requests) for _ in trees))):
        had = [min(t.access(r) * size, r.prompt_tokens) for t, r in zip(trees, same)]
        hits = [a + b for a, b in zip(hits, had)]
        asked += same[0].prompt_tokens
        floor.compare(had[1], had[0], same[0].prompt_tokens)
        ranker = exchanged.lru if floor.behind else exchanged.wanted
        if ranker is not exchanged.ranker:
            changes.append(number)
            exchanged.rank_by(ranker, trees[2].now)
    lru, policy, floored = (100.0 * one / asked for one in hits)
    return Row(lru, policy - lru, floored - lru, changes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    args = parser.parse_args()
    policies: dict[str, Callable[[], Policy]] = {
        "wa": lambda: make_policy("wa"),
        "lfu": lambda: make_policy("lfu"),
        "random": lambda: Random(3),
    }
    for name in TRACES:
        requests, distinct = trace(args.data, name)
        for share, policy in itertools.product(SHARES, policies):
            row = served(requests, int(distinct * share), policies[policy])
            when = ", ".join(f"{n:,}" for n in row.changes) or "-"
            print(
                f"| {name} | {share:.0%} | {row.lru:.2f} | {policy} | {row.policy:+.2f} "
                f"| {row.floored:+.2f} | {when} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
