"""SGLang's T-LRU by nodes; ``test/radix/test_sglangs_own_tlru.py`` compares it with SGLang's own code."""

from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Leaf, Request


def leaf_of(policy, history, length, offset=0, time=0.0):
    leaf = Leaf(offset, length)
    leaf.history, leaf.last_access = history, time
    policy.admit(leaf, time)
    return leaf


def test_a_node_is_evicted_first_only_if_wholly_beyond_the_budget():
    policy = make_policy("sglang-tlru", {"threshold_tokens": 60, "next_prompt_tokens": 20})
    old = leaf_of(policy, history=100, length=90, offset=10, time=1.0)
    free = leaf_of(policy, history=100, length=40, offset=60, time=9.0)
    assert policy.victim(10.0) == (free, 0)
    policy.drop(free)
    assert policy.victim(10.0) == (old, 0)


def test_a_split_may_put_the_rest_beyond_the_budget():
    policy = make_policy("sglang-tlru", {"threshold_tokens": 5})
    tree = RadixTree(policy, 13, 1)

    def serve(time, *path):
        tree.access(Request(time=time, path=path, prompt_tokens=len(path)))

    serve(0.0, 9, 8, 7)  # the oldest; 3 - 5 < 0: all of it is free
    serve(1.0, *range(20, 30))
    serve(2.0, *range(20, 25))  # splits it at 5: 10 - 5 tokens are needed, the rest is free
    assert [policy.rank(leaf) for leaf in policy.leaves()] == [False, False]
    tree.verify()
