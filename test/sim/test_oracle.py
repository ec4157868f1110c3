"""Flat traces against libCacheSim, an independent simulator, and against Belady: equal miss counts.

Single-block requests make the tree an ordinary cache. libCacheSim's LFU breaks ties among the
least frequent by when each reached its frequency, that is by last access, as ours does.
"""

import random
from itertools import chain, islice

import pytest
from overlays import overlay

from canopy_lab.sim.driver import simulate
from canopy_lab.sim.hindsight import make_hindsight
from canopy_lab.sim.hindsight.future import Future
from sglang_canopy.policy.registry import make_policy
from support.trace_samples import data_folder, flat, mooncake

libcachesim = pytest.importorskip("libcachesim")

ACCESSES = 4_000
FRACTIONS = (0.002, 0.01, 0.05, 0.2, 0.6)


def zipf():
    draw = random.Random(0)
    weights = [1 / (rank + 1) for rank in range(1000)]
    return draw.choices(range(1000), weights, k=ACCESSES)


def mooncake_blocks():
    return list(islice(chain.from_iterable(r.blocks for r in mooncake(limit=1000)), ACCESSES))


def agentic_blocks():
    archive = data_folder() / "agentic_coding" / "traces_500.tar.xz"
    merged = overlay(archive, 12, 600.0, seed=0)
    # Every 16th block: prompts are so long that few of them would be the whole trace.
    blocks = chain.from_iterable(r.blocks[::16] for r in merged)
    return list(islice(blocks, ACCESSES))


@pytest.fixture(scope="module", params=[zipf, mooncake_blocks, agentic_blocks])
def ids(request):
    return request.param()


def oracle_misses(kind, ids, size):
    cache = getattr(libcachesim, kind)(cache_size=size, hashpower=16)
    request = libcachesim.Request()
    misses = 0
    for clock, block in enumerate(ids):
        request.clock_time, request.obj_id, request.obj_size = clock, block, 1
        misses += not cache.get(request)
    return misses


@pytest.mark.parametrize("kind", ["LRU", "FIFO", "LFU"])
def test_misses_equal_the_oracles_at_every_size(kind, ids):
    trace = flat(ids)
    for fraction in FRACTIONS:
        size = max(1, int(fraction * len(set(ids))))
        result = simulate(trace, make_policy(kind.lower()), size)
        assert result.blocks - result.block_hits == oracle_misses(kind, ids, size), f"size {size}"


def test_misses_of_belady_equal_a_direct_implementation(ids):
    trace = flat(ids)
    future = Future(trace)
    next_index, next_uses = {}, [0] * len(ids)
    for index in range(len(ids) - 1, -1, -1):
        next_uses[index] = next_index.get(ids[index], len(ids))
        next_index[ids[index]] = index
    for fraction in FRACTIONS:
        size = max(1, int(fraction * len(set(ids))))
        result = simulate(trace, make_hindsight("belady", future), size)
        assert result.blocks - result.block_hits == min_misses(ids, next_uses, size), f"size {size}"


def min_misses(ids, next_uses, size):
    """Belady: drop the cached id with the latest next use, or without one."""
    cached, misses = {}, 0
    for block, next_use in zip(ids, next_uses):
        if block not in cached:
            misses += 1
            if len(cached) >= size:
                del cached[max(cached, key=cached.get)]
        cached[block] = next_use
    return misses
