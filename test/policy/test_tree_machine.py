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
STEPS = st.lists(st.integers(0, 2), min_size=1, max_size=7)


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
        self.cuts = []
        self.tree = RadixTree(
            make_policy(self.policy),
            CAPACITY_BLOCKS,
            BLOCK_TOKENS,
            quantum_tokens=self.quantum_tokens,
            on_evict=self.cuts.append,
        )
        self.id_by_steps = {}
        self.cached_blocks = set()
        self.held_locks = []
        self.time = 0.0

    def path(self, steps):
        return tuple(
            self.id_by_steps.setdefault(tuple(steps[: depth + 1]), len(self.id_by_steps))
            for depth in range(len(steps))
        )

    @rule(steps=STEPS, pause_s=st.sampled_from([1, 40]), stop=st.sampled_from([None, "tool"]))
    def serve(self, steps, pause_s, stop):
        self.time += pause_s
        path = self.path(steps)
        request = Request(
            time=self.time,
            path=path,
            block_tokens=BLOCK_TOKENS,
            prompt_tokens=len(path) * BLOCK_TOKENS,
            turn=len(steps),
            stop=stop,
        )
        missed_positions = (i for i, block in enumerate(path) if block not in self.cached_blocks)
        hit_blocks = next(missed_positions, len(path))
        locked_blocks = {block for lock in self.held_locks for block in lock.blocks}
        assert self.tree.access(request) == hit_blocks
        free_blocks = CAPACITY_BLOCKS - len(locked_blocks - set(path))
        self.forget_evicted()
        self.cached_blocks |= set(path[: max(hit_blocks, min(len(path), free_blocks))])
        assert not locked_blocks - self.cached_blocks, "a locked block was evicted"

    @rule(target=locks, steps=STEPS)
    def lock(self, steps):
        node, hit_blocks = self.tree.match(self.path(steps))
        self.tree.lock(node)
        lock = Lock(node, self.path(steps)[:hit_blocks])
        self.held_locks.append(lock)
        return lock

    @rule(lock=locks)
    def unlock(self, lock):
        if any(lock is other for other in self.held_locks):
            self.held_locks = [other for other in self.held_locks if other is not lock]
            self.tree.unlock(lock.node)

    @rule(needed_blocks=st.integers(1, 5))
    def evict(self, needed_blocks):
        blocks_before = self.tree.used_blocks
        freed_blocks = self.tree.evict(needed_blocks)
        self.forget_evicted()
        locked_blocks = {block for lock in self.held_locks for block in lock.blocks}
        assert blocks_before - self.tree.used_blocks == freed_blocks
        assert freed_blocks >= min(needed_blocks, blocks_before - len(locked_blocks))

    @invariant()
    def counts_agree(self):
        recount(self.tree)
        assert {block for node in self.tree.nodes() for block in node.blocks} == self.cached_blocks

    @invariant()
    def asking_for_the_victim_changes_nothing(self):
        victim = self.tree.policy.victim(self.tree.now)
        assert victim == self.tree.policy.victim(self.tree.now)

    def forget_evicted(self):
        for cut in self.cuts:
            self.cached_blocks -= set(cut.blocks)
        self.cuts.clear()


@pytest.mark.parametrize("quantum_tokens", [1, 25])
@pytest.mark.parametrize("policy", policy_names())
def test_tree_and_policy_stay_consistent(policy, quantum_tokens):
    machine = type("Machine", (TreeMachine,), {"policy": policy, "quantum_tokens": quantum_tokens})
    test_case = machine.TestCase
    examples = settings.default.max_examples // 4
    test_case.settings = settings(max_examples=examples, stateful_step_count=30, deadline=None)
    test_case("runTest").runTest()
