"""Any sequence of requests, locks and evictions keeps the tree and the policy consistent."""

from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from sglang_canopy.policy.block_tree import Node, RadixTree
from sglang_canopy.policy.registry import make_policy, policy_names
from sglang_canopy.records import Request
from support.tree_recount import recount

BLOCK_TOKENS = 10
CAPACITY_BLOCKS = 12
step_lists = st.lists(st.integers(0, 2), min_size=1, max_size=7)


class Lock(NamedTuple):
    node: Node
    blocks: tuple[int, ...]


class TreeMachine(RuleBasedStateMachine):
    """A tree of 12 blocks under ``policy``, and the set of blocks that should be in it."""

    policy = "lru"
    quantum_tokens = 1
    locks = Bundle("locks")

    def __init__(self):
        super().__init__()
        self.evicted = []
        self.tree = RadixTree(
            make_policy(self.policy),
            CAPACITY_BLOCKS,
            BLOCK_TOKENS,
            quantum_tokens=self.quantum_tokens,
            on_evict=self.evicted.append,
        )
        self.ids = {}
        self.cached = set()
        self.locked = []
        self.time = 0.0

    def path(self, steps):
        return tuple(
            self.ids.setdefault(tuple(steps[: depth + 1]), len(self.ids))
            for depth in range(len(steps))
        )

    @rule(steps=step_lists, gap_s=st.sampled_from([1, 40]), stop=st.sampled_from([None, "tool"]))
    def serve(self, steps, gap_s, stop):
        self.time += gap_s
        path = self.path(steps)
        request = Request(
            time=self.time,
            path=path,
            block_tokens=BLOCK_TOKENS,
            prompt_tokens=len(path) * BLOCK_TOKENS,
            turn=len(steps),
            stop=stop,
        )
        hit_blocks = next((i for i, b in enumerate(path) if b not in self.cached), len(path))
        locked = {block for lock in self.locked for block in lock.blocks}
        assert self.tree.access(request) == hit_blocks
        free_blocks = CAPACITY_BLOCKS - len(locked - set(path))
        self.drop_evicted()
        self.cached |= set(path[: max(hit_blocks, min(len(path), free_blocks))])
        assert not locked - self.cached, "a locked block was evicted"

    @rule(target=locks, steps=step_lists)
    def lock(self, steps):
        node, hit = self.tree.match(self.path(steps))
        self.tree.lock(node)
        lock = Lock(node, self.path(steps)[:hit])
        self.locked.append(lock)
        return lock

    @rule(lock=locks)
    def unlock(self, lock):
        if any(lock is other for other in self.locked):
            self.locked = [other for other in self.locked if other is not lock]
            self.tree.unlock(lock.node)

    @rule(needed_blocks=st.integers(1, 5))
    def evict(self, needed_blocks):
        blocks_before = self.tree.used_blocks
        freed = self.tree.evict(needed_blocks)
        self.drop_evicted()
        locked = {block for lock in self.locked for block in lock.blocks}
        assert blocks_before - self.tree.used_blocks == freed
        assert freed >= min(needed_blocks, blocks_before - len(locked))

    @invariant()
    def counts_agree(self):
        recount(self.tree)
        assert {b for node in self.tree.nodes() for b in node.blocks} == self.cached

    @invariant()
    def victim_is_a_pure_read(self):
        victim = self.tree.policy.victim(self.tree.now)
        assert victim == self.tree.policy.victim(self.tree.now)

    def drop_evicted(self):
        for cut in self.evicted:
            self.cached -= set(cut.blocks)
        self.evicted.clear()


@pytest.mark.parametrize("quantum_tokens", [1, 25])
@pytest.mark.parametrize("policy", policy_names())
def test_tree_and_policy_stay_consistent(policy, quantum_tokens):
    machine = type("Machine", (TreeMachine,), {"policy": policy, "quantum_tokens": quantum_tokens})
    case = machine.TestCase
    examples = settings.default.max_examples // 4
    case.settings = settings(max_examples=examples, stateful_step_count=30, deadline=None)
    case("runTest").runTest()
