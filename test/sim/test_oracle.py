"""Flat traces against libCacheSim, an independent simulator, and against Belady: equal miss counts.

Single-block requests make the tree an ordinary cache. libCacheSim's LFU breaks ties among the least
frequent by when each reached its frequency, that is by last access, as ours does."""

import random
from itertools import chain, islice

import pytest
from overlays import overlay

from canopy_lab.sim.driver import simulate
from canopy_lab.sim.hindsight import make_hindsight
from canopy_lab.sim.hindsight.future import Future
from sglang_canopy.policy.registry import make_policy
from support.trace_samples import data_folder, mooncake, single_block_trace

libcachesim = pytest.importorskip("libcachesim")

ACCESSES = 4_000
CAPACITY_FRACTIONS = (0.002, 0.01, 0.05, 0.2, 0.6)


def zipf_blocks():
    rng = random.Random(0)
    weights = [1 / (rank + 1) for rank in range(1000)]
    return rng.choices(range(1000), weights, k=ACCESSES)


def mooncake_blocks():
    return list(islice(chain.from_iterable(sent.blocks for sent in mooncake(limit=1000)), ACCESSES))


def agentic_blocks():
    archive = data_folder() / "agentic_coding" / "traces_500.tar.xz"
    overlaid_trace = overlay(archive, 12, 600.0, seed=0)
    # Every 16th block: prompts are so long that few of them would be the whole trace.
    blocks = chain.from_iterable(sent.blocks[::16] for sent in overlaid_trace)
    return list(islice(blocks, ACCESSES))


@pytest.fixture(scope="module", params=[zipf_blocks, mooncake_blocks, agentic_blocks])
def block_ids(request):
    return request.param()


def count_oracle_misses(policy_name, block_ids, capacity):
    cache = getattr(libcachesim, policy_name)(cache_size=capacity, hashpower=16)
    request = libcachesim.Request()
    misses = 0
    for clock, block in enumerate(block_ids):
        request.clock_time, request.obj_id, request.obj_size = clock, block, 1
        misses += not cache.get(request)
    return misses


@pytest.mark.parametrize("policy_name", ["LRU", "FIFO", "LFU"])
def test_misses_equal_the_oracles_at_every_size(policy_name, block_ids):
    trace = single_block_trace(block_ids)
    for fraction in CAPACITY_FRACTIONS:
        capacity = max(1, int(fraction * len(set(block_ids))))
        result = simulate(trace, make_policy(policy_name.lower()), capacity)
        misses = result.blocks - result.block_hits
        assert misses == count_oracle_misses(policy_name, block_ids, capacity), capacity


def test_misses_of_belady_equal_a_direct_implementation(block_ids):
    trace = single_block_trace(block_ids)
    future = Future(trace)
    next_index, next_uses = {}, [0] * len(block_ids)
    for index in range(len(block_ids) - 1, -1, -1):
        next_uses[index] = next_index.get(block_ids[index], len(block_ids))
        next_index[block_ids[index]] = index
    for fraction in CAPACITY_FRACTIONS:
        capacity = max(1, int(fraction * len(set(block_ids))))
        result = simulate(trace, make_hindsight("belady", future), capacity)
        misses = result.blocks - result.block_hits
        assert misses == count_min_misses(block_ids, next_uses, capacity), capacity


def count_min_misses(block_ids, next_uses, capacity):
    """Count the misses of Belady: drop the cached id with the latest next use, or without one."""
    next_use_by_block, misses = {}, 0
    for block, next_use in zip(block_ids, next_uses):
        if block not in next_use_by_block:
            misses += 1
            if len(next_use_by_block) >= capacity:
                del next_use_by_block[max(next_use_by_block, key=next_use_by_block.get)]
        next_use_by_block[block] = next_use
    return misses
