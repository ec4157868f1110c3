"""Hypothesis rules of every state machine over a live tree: change the order, re-admit leaves."""

import random
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from sglang_canopy.policy.floored import FlooredPolicy


class Readmission:
    """Re-admits leaves of a live tree and shuffles the pending ones. The order must change no
    eviction: ranks of one replica may admit leaves in different orders, and must evict alike.

    ``leaf_seed`` chooses the leaves, ``order_seed`` their order: trees with equal ``leaf_seed`` and
    different ``order_seed`` re-admit the same leaves in different orders."""

    def __init__(self, core: Any, leaf_seed: int, order_seed: int) -> None:
        self.core = core
        self._leaf_rng, self._order_rng = random.Random(leaf_seed), random.Random(order_seed)
        self.readmitted = 0

    def __call__(self) -> None:
        for leaves in (self.core.evictable_device_leaves, self.core.evictable_host_leaves):
            nodes = sorted(leaves, key=lambda node: node.id)
            chosen_nodes = [node for node in nodes if self._leaf_rng.random() < 0.5]
            self._order_rng.shuffle(chosen_nodes)
            for node in chosen_nodes:
                self.core.readmit(node)
            self.readmitted += len(chosen_nodes)
            pending = list(leaves.pending.items())
            self._order_rng.shuffle(pending)
            leaves.pending = dict(pending)


class PolicyRules(RuleBasedStateMachine):
    """``tree`` is set by the machine that derives from this one."""

    tree: Any

    @rule(lru=st.booleans())
    def rank_by(self, lru: bool) -> None:
        live = self.tree.core.live
        for policy in (live.device_policy, live.host_policy):
            if isinstance(policy, FlooredPolicy):
                policy.rank_by(lru)

    @rule(seed=st.integers(0, 99))
    def readmit(self, seed: int) -> None:
        Readmission(self.tree.core, seed, seed)()
