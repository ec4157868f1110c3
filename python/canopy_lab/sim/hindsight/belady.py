"""``belady``: evict the leaf blocks with the furthest next use (Belady, 1966).

On a tree the restriction to leaves costs nothing: a block is never used before its ancestors, so
the cached block with the furthest next use is at the end of a leaf. Every request must be cached
whole, because its KV is in memory when it ends. Under that rule, which holds for the live cache and
for every policy here, ``belady`` is optimal in blocks hit. If a request need not be cached
(``RadixTree(optional_caching=True)``), it is optimal among all policies that may decline a request,
and hits more. ``test/sim`` compares both with all choices.
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

    # victim = the blocks with the furthest next use
    def rank_and_kept_blocks(self, leaf: Leaf) -> tuple[Any, int]:
        run = self.future.last_run(leaf)
        return -run.next_use, run.start
