"""The simulator's tree on cases checked by hand, and against a block-by-block model."""

from typing import NamedTuple

import pytest

from canopy_lab.sim.driver import simulate
from canopy_lab.sim.requests import to_requests
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.block_tree import RadixTree, TreeCut
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Request
from support.trace_samples import random_trace, record
from support.tree_recount import recount


class LRURun(NamedTuple):
    victims: list[TreeCut]
    tree: RadixTree


def run(trace, capacity):
    """Serve a trace under LRU."""
    victims = []
    tree = RadixTree(make_policy("lru"), capacity, 10, on_evict=victims.append, quantum_tokens=1)
    for request in to_requests(trace):
        tree.access(request)
        recount(tree)
    return LRURun(victims, tree)


def parent_blocks(tree):
    """Return the blocks of each node's parent, by those of the node."""
    return {node.blocks: node.parent.blocks for node in tree.nodes()}


def test_a_shared_prefix_becomes_one_node():
    _, tree = run([record(0, [1, 2, 3]), record(1, [1, 2, 4, 5])], 100)
    assert parent_blocks(tree) == {(1, 2): (), (3,): (1, 2), (4, 5): (1, 2)}


def test_a_request_that_ends_inside_a_node_marks_only_its_own_part_used():
    _, tree = run([record(0, [1, 2, 3]), record(5, [1, 2])], 100)
    assert {node.blocks: (node.last_access, node.hits) for node in tree.nodes()} == {
        (1, 2): (5.0, 2),
        (3,): (0.0, 1),
    }


def test_an_expired_leaf_frees_its_blocks():
    _, tree = run([record(0, [1, 2, 3]), record(1, [1, 2, 4, 5])], 100)
    leaf = next(node for node in tree.nodes() if node.blocks == (4, 5))
    tree.remove(leaf)
    recount(tree)
    assert tree.used_blocks == 3
    assert parent_blocks(tree) == {(1, 2): (), (3,): (1, 2)}


def test_cuts_the_victims_tail_only_as_far_as_needed():
    trace = [record(0, [1, 2, 3, 4]), record(1, [5, 6]), record(2, [7, 8, 9])]
    victims, tree = run(trace, 7)
    assert [(cut.offset, cut.tokens, cut.blocks) for cut in victims] == [(20, 20, (3, 4))]
    assert (1, 2) in parent_blocks(tree)
    assert tree.used_blocks == 7


def test_the_token_hit_of_a_partial_last_block_is_exact():
    trace = [record(0, [1, 2], missing_tokens=4), record(1, [1, 2], missing_tokens=4)]
    result = simulate(trace, make_policy("lru"), 10)
    assert (result.block_hits, result.token_hits, result.tokens) == (2, 16, 32)
    assert list(result.uncached_tokens) == [16, 0]


def test_tail_excess_latency_sums_the_excess_over_the_threshold():
    trace = [record(t, [10 * t + i for i in range(blocks)]) for t, blocks in enumerate((1, 3, 5))]
    result = simulate(trace, make_policy("lru"), 100, threshold_tokens=25)
    assert (result.tel_tokens, result.slo_violations) == (30.0, 2)


class BlockLRU:
    """LRU block by block, without nodes: the least recent block without a child is evicted."""

    def __init__(self, capacity):
        self.capacity, self.last_use = capacity, {}

    def access(self, path, access_index):
        hit_blocks = 0
        while hit_blocks < len(path) and path[hit_blocks] in self.last_use:
            hit_blocks += 1
        stored_blocks = path[: self.capacity]
        for depth, block in enumerate(stored_blocks):
            self.last_use[block] = (access_index, -depth)
        excess_blocks = max(0, len(self.last_use) - self.capacity)
        for block in sorted(self.last_use, key=self.last_use.get)[:excess_blocks]:
            del self.last_use[block]
        return hit_blocks


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 8, 13, 40])
@pytest.mark.parametrize("seed", range(15))
def test_lru_on_the_tree_is_lru_over_blocks(seed, capacity):
    trace = random_trace(seed)
    tree = RadixTree(make_policy("lru"), capacity, 10)
    model = BlockLRU(capacity)
    for index, request in enumerate(to_requests(trace)):
        assert tree.access(request) == model.access(request.path, index)
        recount(tree)
    assert {block for node in tree.nodes() for block in node.blocks} == set(model.last_use)


def test_bad_sizes_are_the_users_mistake():
    with pytest.raises(CanopyError, match="at least 1 block"):
        RadixTree(make_policy("lru"), 0, 10)
    with pytest.raises(CanopyError, match="quantum"):
        RadixTree(make_policy("lru"), 1, 10, quantum_tokens=0)
    with pytest.raises(CanopyError, match="no requests"):
        simulate([], make_policy("lru"), 1)
    mixed = [record(0, [1]), record(1, [2], block_tokens=20)]
    with pytest.raises(CanopyError, match="blocks of 20 tokens"):
        simulate(mixed, make_policy("lru"), 5)


def test_labels_of_the_request_reach_every_node_of_its_path():
    tree = RadixTree(make_policy("lru"), 10, 10)
    tree.access(Request(time=1.0, category="chat", path=(1, 2), block_tokens=10, prompt_tokens=20))
    tree.access(Request(2.0, "code", (1, 3), block_tokens=10, prompt_tokens=20, turn=4))
    assert {node.blocks: (node.category, node.turn) for node in tree.nodes()} == {
        (1,): ("code", 4),
        (2,): ("chat", 1),
        (3,): ("code", 4),
    }
