"""``length-aware-tlru``: T-LRU that knows the next prompt's length (arXiv 2510.15152).

As defined here, the policy knows of each path the length of the next prompt through it, and so
whether there is a next prompt. It first evicts blocks that may be missing from that prompt without
excess (``safe``, as in ``tail-belady``). Otherwise it is LRU: it does not know *when* the next
prompt arrives.
"""

from __future__ import annotations

from typing import Any, ClassVar

from canopy_lab.sim.hindsight.future import HindsightPolicy
from canopy_lab.sim.hindsight.tail_belady import Config, safe_start
from sglang_canopy.records import Leaf


class LengthAwareTLRU(HindsightPolicy):
    """The gain of ``canopy-tlru`` if it knew exact lengths."""

    name: ClassVar[str] = "length-aware-tlru"
    Config: ClassVar[type] = Config
    takes_tail_target: ClassVar[bool] = True

    # victim = safe blocks of the least recent leaf that has any, else the least recent leaf
    def judge(self, leaf: Leaf) -> tuple[Any, int]:
        run = self.future.last_run(leaf)
        safe_from = safe_start(self.future, run, self.config.threshold_tokens)
        end = (leaf.offset + leaf.length) // self.future.block_tokens
        if safe_from < end:
            return (0, leaf.last_access), safe_from
        return (1, leaf.last_access), 0


POLICY = LengthAwareTLRU
