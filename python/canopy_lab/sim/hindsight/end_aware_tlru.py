"""``end-aware-tlru``: T-LRU that knows which conversations are over (arXiv 2510.15152).

As defined here, the policy knows of each path whether any prompt will use it again, but not the
time or the length. It first evicts blocks without a next use, together with blocks that T-LRU calls
safe: beyond the budget history + next prompt - threshold, with a constant growth of the next
prompt. Otherwise it is LRU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from canopy_lab.sim.hindsight.future import NEVER, HindsightPolicy
from sglang_canopy import declared
from sglang_canopy.declared import declare_key
from sglang_canopy.records import Leaf


@dataclass(frozen=True, slots=True)
class Config(declared.Checked):
    threshold_tokens: float = declare_key(
        0.0, "Uncached tokens a request may have without excess.", low=0
    )
    next_prompt_tokens: float | None = declare_key(
        None, "What the next prompt adds to the history; by default the trace's own mean.", low=0
    )


class EndAwareTLRU(HindsightPolicy):
    """``canopy-tlru`` with the ends of conversations, for the gain that they would bring."""

    name: ClassVar[str] = "end-aware-tlru"
    Config: ClassVar[type] = Config
    takes_tail_target: ClassVar[bool] = True

    # victim = safe or finished blocks of the least recent leaf that has any, else the least recent
    # leaf
    def rank_and_kept_blocks(self, leaf: Leaf) -> tuple[Any, int]:
        block_tokens = self.future.block_tokens
        run = self.future.last_run(leaf)
        end_block = (leaf.offset + leaf.length) // block_tokens
        growth_tokens = self.config.next_prompt_tokens
        if growth_tokens is None:
            growth_tokens = self.future.mean_growth_tokens
        budget_tokens = leaf.history + growth_tokens - self.config.threshold_tokens
        first_safe_block = max(0, -int(-budget_tokens // block_tokens))
        if run.next_use == NEVER:
            first_safe_block = min(first_safe_block, run.start)
        if first_safe_block < end_block:
            return (0, leaf.last_access), first_safe_block
        return (1, leaf.last_access), 0
