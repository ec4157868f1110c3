"""``belady``: evict what is used furthest in the future, leaves only (Belady, 1966).

On a tree the constraint costs nothing: a block is never used before the blocks above it, so of
all cached blocks the one used last is at the end of a leaf. Every request must be cached whole
(its KV is in memory when it ends), and under that rule, which holds for the live cache and for
every policy here, this is optimal in blocks hit. Where a request need not be cached
(``RadixTree(optional_caching=True)``) the same rule is optimal among all policies that may decline
one, and hits more; ``test/sim`` compares both with all choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from canopy_lab.sim.hindsight.future import HindsightPolicy
from sglang_canopy.records import Leaf


@dataclass(frozen=True, slots=True)
class Config:
    """No options."""


class Belady(HindsightPolicy):
    """The bound on the block hit ratio."""

    name: ClassVar[str] = "belady"
    Config: ClassVar[type] = Config

    # victim = the blocks used last, of all
    def judge(self, leaf: Leaf) -> tuple[Any, int]:
        run = self.future.last_run(leaf)
        return -run.next_use, run.start


POLICY = Belady
