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
    """The gain of ``canopy-tlru`` if it knew the ends of conversations."""

    name: ClassVar[str] = "end-aware-tlru"
    Config: ClassVar[type] = Config
    takes_tail_target: ClassVar[bool] = True

    # victim = safe or finished blocks of the least recent leaf that has any, else the least recent
    # leaf
    def rank_and_keep(self, leaf: Leaf) -> tuple[Any, int]:
        tokens = self.future.block_tokens
        run = self.future.last_run(leaf)
        end = (leaf.offset + leaf.length) // tokens
        growth = self.config.next_prompt_tokens
        if growth is None:
            growth = self.future.mean_growth_tokens
        budget = leaf.history + growth - self.config.threshold_tokens
        safe_from = max(0, -int(-budget // tokens))
        if run.next_use == NEVER:
            safe_from = min(safe_from, run.start)
        if safe_from < end:
            return (0, leaf.last_access), safe_from
        return (1, leaf.last_access), 0
