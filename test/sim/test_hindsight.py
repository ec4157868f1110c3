"""The hindsight policies, compared with the best of all possible choices and with the online policies."""

import random
from functools import cache
from itertools import combinations

import pytest

from canopy_lab.sim.driver import simulate
from canopy_lab.sim.hindsight import hindsight_class, hindsight_names, make_hindsight
from canopy_lab.sim.hindsight.future import NEVER, Future, NextUseRun
from canopy_lab.sim.requests import to_requests
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.policy.registry import make_policy, policy_names
from support.trace_samples import random_trace, record
from support.tree_recount import recount_each_access


@pytest.fixture(autouse=True)
def recount_trees(monkeypatch):
    recount_each_access(monkeypatch)


def least_cost(paths, capacity, cost, is_optional=False):
    """Return the least total cost of serving ``paths`` (tuples of chained block ids) from an empty cache.

    ``cost(index, hit)``: cost of request ``index`` with ``hit`` leading blocks cached. The rules are
    the tree's: a request is cached whole, or its first ``capacity`` blocks; only ends of paths are
    evicted; a request cannot evict its own blocks. If caching ``is_optional``, any subset of its blocks and
    the cached blocks may stay after a request.
    """
    parent = {}
    for path in paths:
        for block_before, block in zip((None, *path), path):
            assert parent.setdefault(block, block_before) == block_before, f"{block} is not chained"

    def is_prefix_closed(blocks):
        return all(parent[block] is None or parent[block] in blocks for block in blocks)

    @cache
    def serve(index, cached):
        if index == len(paths):
            return 0
        path = paths[index]
        hit = 0
        while hit < len(path) and path[hit] in cached:
            hit += 1
        own_blocks = frozenset() if is_optional else frozenset(path[:capacity])
        evictable = (cached | frozenset(path) if is_optional else cached) - own_blocks
        free_blocks = min(capacity - len(own_blocks), len(evictable))
        next_caches = (
            own_blocks | frozenset(others)
            for count in range(free_blocks + 1)
            for others in combinations(sorted(evictable), count)
        )
        return cost(index, hit) + min(
            serve(index + 1, blocks) for blocks in next_caches if is_prefix_closed(blocks)
        )

    return serve(0, frozenset())


SEEDS = range(40)


def growing_conversations(seed, requests=9, conversations=3):
    """Return a trace of the paper's model: a conversation's prompt contains the one before it."""
    rng = random.Random(seed)
    ids = iter(range(1000))
    paths = [[] for _ in range(conversations)]
    trace = []
    for time_s in range(requests):
        path = paths[rng.randrange(conversations)]
        path += [next(ids) for _ in range(rng.randint(1, 2))]
        trace.append(record(time_s, path))
    return trace


def branching_prompts(seed):
    """Return a trace of random prefixes of a small tree's paths, in whole blocks."""
    return [record(r.time_s, r.blocks) for r in random_trace(seed, 9, branching=2, depth=5)]


def tail_excess(trace, threshold_tokens):
    def cost(index, hit):
        uncached_tokens = trace[index].input_tokens - hit * trace[index].block_tokens
        return max(0, uncached_tokens - threshold_tokens)

    return cost


def hindsight(name, trace, capacity, threshold_tokens=None, **settings):
    """Simulate the hindsight policy ``name`` with a cache of ``capacity`` blocks."""
    config = {}
    if hindsight_class(name).takes_tail_target:
        config = {"threshold_tokens": float(threshold_tokens)}
    policy = make_hindsight(name, Future(trace), config)
    return simulate(trace, policy, capacity, threshold_tokens=threshold_tokens, **settings)


def test_the_future_has_the_next_use_of_every_block():
    trace = [record(0, [1, 2, 3]), record(1, [1, 2, 4]), record(2, [1])]
    future = Future(trace)
    tree = RadixTree(make_policy("lru"), 10, 10)
    requests = list(to_requests(trace))
    tree.access(requests[0])
    (node,) = tree.nodes()
    assert future.last_run(node) == NextUseRun(2, NEVER)
    node.length = 20
    assert future.last_run(node) == NextUseRun(0, 1)
    assert future.needed_blocks(0, threshold_tokens=15) == 2
    assert future.needed_blocks(2, threshold_tokens=15) == 0


@pytest.mark.parametrize("capacity", [1, 2, 3, 5])
@pytest.mark.parametrize("make_trace", [growing_conversations, branching_prompts])
@pytest.mark.parametrize("is_optional", [False, True])
def test_belady_hits_as_many_blocks_as_any_choice(make_trace, capacity, is_optional):
    extra_hits = 0
    for seed in range(20) if is_optional else SEEDS:
        trace = make_trace(seed)[: 7 if is_optional else None]
        paths = [request.blocks for request in trace]
        optimum = -least_cost(paths, capacity, lambda _, hit: -hit, is_optional=is_optional)
        block_hits = hindsight("belady", trace, capacity, optional_caching=is_optional).block_hits
        assert block_hits == optimum, f"seed {seed}"
        extra_hits += block_hits - hindsight("belady", trace, capacity).block_hits
    assert (extra_hits > 0) == is_optional or capacity == 5


@pytest.mark.parametrize("capacity", [2, 3, 5])
@pytest.mark.parametrize("make_trace", [growing_conversations, branching_prompts])
def test_tail_belady_has_the_least_excess_of_all_choices(make_trace, capacity):
    for seed in SEEDS:
        trace = make_trace(seed)
        paths = [request.blocks for request in trace]
        for threshold_tokens in (0, 10, 20, 30):
            optimum = least_cost(paths, capacity, tail_excess(trace, threshold_tokens))
            tel_tokens = hindsight("tail-belady", trace, capacity, threshold_tokens).tel_tokens
            assert tel_tokens == optimum, f"seed {seed}, threshold {threshold_tokens}"


def test_tail_belady_is_no_bound_if_a_shorter_prompt_intervenes():
    # At (5, 6, 0) two blocks must be evicted. 3 and 4 are needed last, at 10 tokens of
    # excess each. Evicting 2 with 1 above it costs 10 in all: (1,) caches 1 again at no cost.
    paths = [(1, 2), (3,), (4,), (5, 6, 0), (1,), (1, 2, 7), (3, 8), (4, 9)]
    trace = [record(time_s, path) for time_s, path in enumerate(paths)]
    assert hindsight("tail-belady", trace, 5, 10).tel_tokens == 50
    assert least_cost(paths, 5, tail_excess(trace, 10)) == 40


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_tail_belady_has_the_least_excess_with_optional_caching(capacity):
    # arXiv 2510.15152, Theorem 1, with the constraints it is stated for.
    for seed in range(20):
        trace = growing_conversations(seed, requests=7)
        for threshold in (10, 20):
            excess = tail_excess(trace, threshold)
            optimum = least_cost([r.blocks for r in trace], capacity, excess, is_optional=True)
            result = hindsight("tail-belady", trace, capacity, threshold, optional_caching=True)
            assert result.tel_tokens == optimum, f"seed {seed}, threshold {threshold}"


@pytest.mark.parametrize("make_trace", [growing_conversations, branching_prompts])
def test_no_online_policy_beats_the_bounds(make_trace):
    for seed in SEEDS:
        trace = make_trace(seed)
        for capacity in (2, 4):
            max_hits = hindsight("belady", trace, capacity).block_hits
            min_excess = hindsight("tail-belady", trace, capacity, 10).tel_tokens
            for name in policy_names():
                online = simulate(trace, make_policy(name), capacity, threshold_tokens=10)
                assert online.block_hits <= max_hits, f"{name}, seed {seed}"
                assert online.tel_tokens >= min_excess, f"{name}, seed {seed}"


def test_known_ends_are_evicted_first():
    # 1 is least recent but returns; 2 never does.
    paths = [(1,), (2,), (3,), (1,)]
    trace = [record(time_s, path) for time_s, path in enumerate(paths)]
    for name in ("end-aware-tlru", "length-aware-tlru"):
        assert hindsight(name, trace, 2, 0).block_hits == 1
    assert simulate(trace, make_policy("lru"), 2).block_hits == 0


def test_known_lengths_free_the_tail_that_the_next_prompt_can_do_without():
    # (1, 2, 3) returns as it is: with 20 tokens allowed uncached, 2 and 3 may be evicted and
    # the least recent conversation, 9, stays.
    paths = [(9,), (1, 2, 3), (7, 8), (9, 10, 11), (1, 2, 3)]
    trace = [record(time_s, path) for time_s, path in enumerate(paths)]
    result = hindsight("length-aware-tlru", trace, 4, 20)
    assert result.tel_tokens == 10  # the first (1, 2, 3) and nothing after it
    lru = simulate(trace, make_policy("lru"), 4, threshold_tokens=20)
    assert lru.tel_tokens == 30


def test_ends_alone_leave_the_budget_to_the_mean_growth():
    # Conversation 1 grows by two blocks a turn: L + growth - threshold = 20 + 20 - 30 = 10
    # tokens have to stay, so block 2 may be evicted and 1 may not.
    paths = [(1, 2), (9,), (8,), (1, 2, 3, 4), (9,)]
    trace = [record(time_s, path, output_tokens=0) for time_s, path in enumerate(paths)]
    config = {"threshold_tokens": 30.0, "next_prompt_tokens": 20.0}
    evicted_blocks = []
    policy = make_hindsight("end-aware-tlru", Future(trace), config)
    simulate(trace, policy, 3, on_evict=lambda victim: evicted_blocks.append(victim.blocks))
    assert evicted_blocks[0] == (2,)


def test_names_and_options_are_checked():
    trace = [record(0, [1])]
    with pytest.raises(CanopyError, match="belady, tail-belady"):
        make_hindsight("oracle", Future(trace))
    with pytest.raises(CanopyError, match="threshold_tokens"):
        make_hindsight("tail-belady", Future(trace), {"threshold_tokens": -1.0})
    assert hindsight_names()[0] == "belady"
