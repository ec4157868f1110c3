"""``tail-belady``: Tail-Optimized Belady, the bound on tail excess latency (arXiv 2510.15152).

A request with a prompt of n blocks and a threshold of x has as excess its misses among the first
n - x blocks; the last x may be missing at no cost. A block whose next use is among those last x, or
that has no next use, is *safe* to evict: evicting it adds no excess, and that use caches it again.
Safe blocks are evicted first, then the blocks needed furthest in the future. ``length-aware-tlru``
evicts safe blocks first too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from canopy_lab.sim.hindsight.future import NEVER, Future, HindsightPolicy, NextUseRun
from sglang_canopy import declared
from sglang_canopy.declared import declare_key
from sglang_canopy.records import Leaf


@dataclass(frozen=True, slots=True)
class Config(declared.Checked):
    threshold_tokens: float = declare_key(
        0.0, "Uncached tokens a request may have without excess; 0 makes this ``belady``.", low=0
    )


class TailBelady(HindsightPolicy):
    """The bound on tail excess, if prompts and threshold are whole blocks and paths only grow.

    That is the paper's model. A partial last block weighs less than its room. If a shorter prompt
    arrives between two longer ones on a path, a safe block may be above a needed block. In both
    cases this is a good policy but no bound (``test/sim`` shows the difference).
    """

    name: ClassVar[str] = "tail-belady"
    Config: ClassVar[type] = Config
    takes_tail_target: ClassVar[bool] = True

    # victim = safe blocks, else the blocks needed furthest in the future
    def rank_and_kept_blocks(self, leaf: Leaf) -> tuple[Any, int]:
        run = self.future.last_run(leaf)
        return self._safe_first(leaf, run, -run.next_use, run.start)

    def _safe_first(
        self, leaf: Leaf, run: NextUseRun, rank: float, kept_blocks: int
    ) -> tuple[Any, int]:
        """Rank the leaf by its safe blocks, or, without any, its blocks from ``kept_blocks`` on."""
        safe_block = first_safe_block(self.future, run, self.config.threshold_tokens)
        end_block = (leaf.offset + leaf.length) // self.future.block_tokens
        return ((0, rank), safe_block) if safe_block < end_block else ((1, rank), kept_blocks)


class LengthAwareTLRU(TailBelady):
    """``canopy-tlru`` with exact lengths, for the gain that they would bring.

    As defined here, the policy knows of each path the length of the next prompt through it, and so
    whether there is a next prompt. It first evicts safe blocks. Otherwise it is LRU: it does not know
    *when* the next prompt arrives.
    """

    name: ClassVar[str] = "length-aware-tlru"

    # victim = safe blocks of the least recent leaf that has any, else the least recent leaf
    def rank_and_kept_blocks(self, leaf: Leaf) -> tuple[Any, int]:
        return self._safe_first(leaf, self.future.last_run(leaf), leaf.last_access, 0)


def first_safe_block(future: Future, run: NextUseRun, threshold_tokens: float) -> int:
    """Return the first depth (blocks) at which ``run`` may be missing without excess."""
    if run.next_use == NEVER:
        return run.start
    return max(run.start, future.needed_blocks(run.next_use, threshold_tokens))
