"""Any sequence of requests, locks and evictions keeps the tree and the policy consistent."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.policy.registry import make_policy, policy_names
from sglang_canopy.records import Request
from support.tree_recount import recount

BLOCK_TOKENS = 10
CAPACITY_BLOCKS = 12
choices = st.lists(st.integers(0, 2), min_size=1, max_size=7)


class TreeMachine(RuleBasedStateMachine):
    """A tree of 12 blocks under ``policy``, and the set of blocks that should be in it."""

    policy = "lru"
    quantum = 1
    locks = Bundle("locks")

    def __init__(self):
        super().__init__()
        self.cuts = []
        self.tree = RadixTree(
            make_policy(self.policy),
            CAPACITY_BLOCKS,
            BLOCK_TOKENS,
            quantum_tokens=self.quantum,
            on_evict=self.cuts.append,
        )
        self.ids = {}
        self.cached = set()
        self.locked = []
        self.time = 0.0

    def path(self, picks):
        return tuple(
            self.ids.setdefault(tuple(picks[: depth + 1]), len(self.ids))
            for depth in range(len(picks))
        )

    @rule(picks=choices, gap=st.sampled_from([1.0, 40.0]), stop=st.sampled_from([None, "tool"]))
    def serve(self, picks, gap, stop):
        self.time += gap
        path = self.path(picks)
        request = Request(
            time=self.time,
            path=path,
            block_tokens=BLOCK_TOKENS,
            prompt_tokens=len(path) * BLOCK_TOKENS,
            turn=len(picks),
            stop=stop,
        )
        leading = next((i for i, b in enumerate(path) if b not in self.cached), len(path))
        locked = {block for lock in self.locked for block in lock[1]}
        assert self.tree.access(request) == leading
        free_blocks = CAPACITY_BLOCKS - len(locked - set(path))
        self.drop_evicted()
        self.cached |= set(path[: max(leading, min(len(path), free_blocks))])
        assert not locked - self.cached, "a locked block was evicted"

    @rule(target=locks, picks=choices)
    def lock(self, picks):
        node, hit = self.tree.match(self.path(picks))
        self.tree.lock(node)
        lock = (node, self.path(picks)[:hit])
        self.locked.append(lock)
        return lock

    @rule(lock=locks)
    def unlock(self, lock):
        if any(lock is other for other in self.locked):
            self.locked = [other for other in self.locked if other is not lock]
            self.tree.unlock(lock[0])

    @rule(need=st.integers(1, 5))
    def evict(self, need):
        blocks_before = self.tree.used_blocks
        freed = self.tree.evict(need)
        self.drop_evicted()
        locked = {block for lock in self.locked for block in lock[1]}
        assert blocks_before - self.tree.used_blocks == freed
        assert freed >= min(need, blocks_before - len(locked))

    @invariant()
    def counts_agree(self):
        recount(self.tree)
        assert {b for node in self.tree.nodes() for b in node.blocks} == self.cached

    @invariant()
    def victim_is_a_pure_read(self):
        victim = self.tree.policy.victim(self.tree.now)
        assert victim == self.tree.policy.victim(self.tree.now)

    def drop_evicted(self):
        for cut in self.cuts:
            self.cached -= set(cut.blocks)
        self.cuts.clear()


@pytest.mark.parametrize("quantum", [1, 25])
@pytest.mark.parametrize("policy", policy_names())
def test_tree_and_policy_stay_consistent(policy, quantum):
    machine = type("Machine", (TreeMachine,), {"policy": policy, "quantum": quantum})
    case = machine.TestCase
    case.settings = settings(
        max_examples=settings.default.max_examples // 4, stateful_step_count=30, deadline=None
    )
    case("runTest").runTest()
