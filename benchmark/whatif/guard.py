"""How soon the guard finds a loss, and whether it finds one where there is none.

    python benchmark/whatif/guard.py --data DIR

A trace is served by LRU and by orders that hit less, and by six random orders, which differ by
chance alone, held against a seventh. Prints how many points fewer each one hits of all prompt tokens, and the
request at which the guard is sure of it; a dash where it never is.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from canopy_lab.sim.requests import to_requests

sys.path.insert(0, str(Path(__file__).parent))
from meter import trace

from sglang_canopy.policy.base import Policy, Victim
from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Leaf
from sglang_canopy.whatif.guard import Guard

CELLS = (("conversation", 0.2), ("synthetic", 0.2), ("agentic-60", 0.05))


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


def held_against(
    requests: list[Any], blocks: int, first: Policy, others: Mapping[str, Policy]
) -> Iterator[tuple[str, float, int | None]]:
    """For each of ``others``: points by which it hits less than ``first``, and when that was sure."""
    size = requests[0].block_tokens

    def hits(policy: Policy) -> list[tuple[int, int]]:
        tree = RadixTree(policy, blocks, size)
        return [
            (min(tree.access(one) * size, one.prompt_tokens), one.prompt_tokens)
            for one in to_requests(requests)
        ]

    base = hits(first)
    asked = sum(tokens for _, tokens in base)
    for name, policy in others.items():
        guard, sure, less = Guard(), None, 0
        for number, ((had, _), (has, _)) in enumerate(zip(base, hits(policy))):
            guard.compare(had, has)
            less += had - has
            sure = number if guard.lost and sure is None else sure
        yield name, 100 * less / asked, sure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    args = parser.parse_args()
    make: Callable[[str], Policy] = make_policy
    for name, share in CELLS:
        requests, distinct = trace(args.data, name)
        blocks = int(distinct * share)
        worse = {"wa": make("wa"), "lfu": make("lfu"), "random": Random(3)}
        alike = {f"random {seed}": Random(seed) for seed in range(2, 8)}
        for first, others in ((make("lru"), worse), (Random(1), alike)):
            for other, less, sure in held_against(requests, blocks, first, others):
                when = "-" if sure is None else f"{sure:,}"
                print(f"| {name} | {share:.0%} | {other} | {less:+.2f} | {when} |", flush=True)


if __name__ == "__main__":
    main()
