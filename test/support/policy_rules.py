"""Rules of every state machine over a live tree: policies are exchanged and leaves re-admitted."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from sglang_canopy.config.policy_change import PolicyChange
from sglang_canopy.config.tiers import PolicyChoice
from sglang_canopy.policy.registry import live_names
from support.readmission import Readmission


class PolicyRules(RuleBasedStateMachine):
    """``tree`` is set by the machine that derives from this one."""

    tree: Any

    @rule(device=st.sampled_from(live_names()), host=st.sampled_from([None, *live_names()]))
    def change_policy(self, device: str, host: str | None) -> None:
        change = PolicyChange(PolicyChoice(device), None if host is None else PolicyChoice(host))
        self.tree.core.exchange.apply(change, "test")

    @rule(seed=st.integers(0, 99))
    def readmit(self, seed: int) -> None:
        Readmission(self.tree.core, seed, seed)()
