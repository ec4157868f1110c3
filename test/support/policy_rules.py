"""Rules of every state machine over a live tree: the order changes and leaves are re-admitted."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from sglang_canopy.policy.floored import Floored
from support.readmission import Readmission


class PolicyRules(RuleBasedStateMachine):
    """``tree`` is set by the machine that derives from this one."""

    tree: Any

    @rule(lru=st.booleans())
    def rank_by(self, lru: bool) -> None:
        live = self.tree.core.live
        for policy in (live.device_policy, live.host_policy):
            if isinstance(policy, Floored):
                policy.rank_by(lru)

    @rule(seed=st.integers(0, 99))
    def readmit(self, seed: int) -> None:
        Readmission(self.tree.core, seed, seed)()
