"""A policy's choices do not depend on the time of a leaf's admission.

SGLang's tree collects evictable nodes and admits them at the next eviction; the simulator's tree
admits at once. The victims must be equal, even if a leaf was used, split or extended in between.
"""

import random

import pytest

from canopy_lab.sim.requests import to_requests
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.policy.registry import make_policy, policy_names
from support.radix_cases import BLOCK_TOKENS


class Late(Policy):
    """``policy`` in a tree that admits leaves at the next victim, and again after a split."""

    def __init__(self, policy):
        self.policy = policy
        self.pending = {}
        self.arrive, self.finish, self.evicted = policy.arrive, policy.finish, policy.evicted

    def admit(self, leaf, now):
        self.pending[leaf] = None

    def drop(self, leaf):
        if leaf in self.pending:
            del self.pending[leaf]
        else:
            self.policy.drop(leaf)

    def victim(self, now):
        for leaf in self.pending:
            self.policy.admit(leaf, now)
        self.pending.clear()
        return self.policy.victim(now)

    def split(self, leaf, head):
        if leaf in self.policy.leaves():
            self.policy.drop(leaf)
            self.pending[leaf] = None
        self.policy.split(leaf, head)


def random_paths(seed, requests=120):
    """Paths of a small random tree: shared prefixes, splits, returns."""

    draw = random.Random(seed)
    ids = {}
    for _ in range(requests):
        picks = [draw.choice((0, 0, 1, 2)) for _ in range(draw.randint(1, 7))]
        yield tuple(ids.setdefault(tuple(picks[: i + 1]), len(ids)) for i in range(len(picks)))


def cuts(policy, capacity, paths):
    went = []
    tree = RadixTree(policy, capacity, BLOCK_TOKENS, on_evict=lambda c: went.append(c.blocks))
    trace = [
        TraceRequest(
            time_s=7.0 * at,
            input_tokens=len(path) * BLOCK_TOKENS,
            output_tokens=1,
            blocks=path,
            block_tokens=BLOCK_TOKENS,
            turn=len(path),
            stop=("tool", "end")[len(path) % 2],
        )
        for at, path in enumerate(paths)
    ]
    for request in to_requests(trace):
        tree.access(request)
    return went


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 25), marks=pytest.mark.long)])
@pytest.mark.parametrize("name", policy_names())
def test_victims_are_the_same_when_leaves_are_admitted_late(name, seeds):
    for seed in seeds:
        paths = list(random_paths(seed))
        for capacity in (5, 9, 20):
            at_once = cuts(make_policy(name), capacity, paths)
            late = cuts(Late(make_policy(name)), capacity, paths)
            assert at_once == late, f"seed {seed}, capacity {capacity}"
