"""``sglang-tlru``: the rule of SGLang's own ``--radix-eviction-policy tlru``, as a baseline.

SGLang 0.5.23 (``mem_cache/evict_policy.py``, ``TLRUStrategy``) applies T-LRU (arXiv 2510.15152) to
nodes: a node is free if all of it is beyond the budget L + Q - xi, with L the deepest length of its
branch and Q a constant. Free nodes are evicted first, oldest first, then plain LRU. ``canopy-tlru``
adds cuts inside a node, a Q learnt by category, and a target in milliseconds. With ``whole_nodes``
this policy evicts the same nodes as SGLang's (``test/radix/test_sglangs_own_tlru.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sglang_canopy import declared
from sglang_canopy.declared import declare_key
from sglang_canopy.policy.ranked import RankedPolicy
from sglang_canopy.records import Leaf


@dataclass(frozen=True, slots=True)
class Config(declared.Checked):
    threshold_tokens: float = declare_key(
        0.0, "SGLang's ``threshold``: tokens that may be left to prefill.", low=0
    )
    next_prompt_tokens: float = declare_key(
        0.0, "SGLang's ``next_prompt_estimate``: what the next prompt adds to the history.", low=0
    )


class SGLangTLRU(RankedPolicy):
    """Evicts nodes wholly beyond the budget by age, then all others by age. O(log n)."""

    name: ClassVar[str] = "sglang-tlru"
    Config: ClassVar[type] = Config
    reads_labels: ClassVar[bool] = False
    takes_tail_target: ClassVar[bool] = True

    # victim = the leaf with the least (offset < history + next prompt - threshold, last_access)
    def rank(self, leaf: Leaf) -> bool:
        budget = leaf.history + self.config.next_prompt_tokens - self.config.threshold_tokens
        return leaf.offset < max(budget, 0.0)

    def split(self, leaf: Leaf, head: Leaf) -> None:
        # The rest begins deeper, and may now be beyond the budget.
        if leaf in self._heap:
            self.drop(leaf)
            self.admit(leaf, leaf.last_access)


POLICY = SGLangTLRU
