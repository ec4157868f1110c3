"""Shadow caches have the hits of the real cache, whole or on a sample of the blocks."""

import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Request
from sglang_canopy.whatif.sampled_caches import (
    MAX_BLOCKS,
    SAMPLED_BLOCKS,
    ModelledCache,
    SampledCaches,
    ShadowCache,
    block_number,
    copy_for_shadow,
)

BLOCK_TOKENS = 16


class TimedPath(NamedTuple):
    time: float
    path: tuple
    conversation: int


def timed_paths(seed):
    """Return interleaved conversations, each turn a block or two longer than the last."""
    rng = random.Random(seed)
    paths_in_order, paths = [], {}
    for step in range(240):
        conversation = rng.randrange(40)
        path = paths.setdefault(conversation, [10_000 * conversation])
        path.extend(10_000 * conversation + len(path) + i for i in range(rng.randint(1, 2)))
        paths_in_order.append(TimedPath(10.0 * step, tuple(path), conversation))
    return paths_in_order


def request_of(timed_path):
    tokens = {"block_tokens": BLOCK_TOKENS, "prompt_tokens": len(timed_path.path) * BLOCK_TOKENS}
    time, path, conversation = timed_path
    return Request(time, path=path, conversation=conversation, **tokens)


@pytest.mark.parametrize("name", ["lru", "fifo", "lfu"])
def test_a_shadow_cache_hits_as_a_real_one(name):
    paths_in_order = timed_paths(1)
    shadow = ShadowCache(make_policy(name), 30 * BLOCK_TOKENS, BLOCK_TOKENS)
    tree = RadixTree(make_policy(name), 30, BLOCK_TOKENS)
    for timed_path in paths_in_order:
        ended_request = request_of(timed_path)
        ended_request.label = ended_request.category
        assert shadow.access(ended_request) == tree.access(request_of(timed_path))
    assert 0 < len(shadow) <= 30


def serve_ended(caches, timed_path):
    """Return the result of ``caches`` for an ended request."""
    ended_request = request_of(timed_path)
    ended_request.label = ended_request.category
    sampled = caches.sample_path(ended_request)
    if sampled is None:
        return None
    return caches.serve(copy_for_shadow(ended_request, timed_path.conversation), sampled)


@pytest.mark.parametrize(
    ("capacities_blocks", "sample_stride"),
    [
        ([10], 1),
        ([2 * SAMPLED_BLOCKS - 1], 1),
        ([2 * SAMPLED_BLOCKS], 2),
        ([70 * SAMPLED_BLOCKS], 64),
        ([100, 4 * MAX_BLOCKS], 4),
    ],
)
def test_the_sample_is_fixed_by_the_size_of_the_caches(capacities_blocks, sample_stride):
    caches = SampledCaches()
    for number, capacity_blocks in enumerate(capacities_blocks):
        caches.add(
            number, ModelledCache(lambda: make_policy("lru"), capacity_blocks * BLOCK_TOKENS)
        )
    for step in range(2_000):  # whatever the load
        serve_ended(caches, TimedPath(step * 0.001, (step,), step))
        assert caches.sample_stride == sample_stride


def test_a_smaller_sample_is_a_subset_of_a_larger_one():
    one_in_2, one_in_16 = ({*SampledCaches(n).sampled_blocks(range(1000))} for n in (2, 16))
    assert one_in_16 < one_in_2
    assert 30 < len(one_in_16) < 100


@given(st.lists(st.integers(0, 2**64 - 1)), st.integers(1, 2**20), st.integers(0, 20))
def test_a_path_is_sampled_as_each_of_its_blocks_is(path, sample_stride, power):
    for stride in (sample_stride, 2**power):
        caches = SampledCaches(stride)
        expected_blocks = [block for block in path if block_number(block) % stride == 0]
        assert caches.sampled_blocks(path) == expected_blocks


def test_common_prefixes_are_sampled_like_other_blocks():
    """64 conversations, each of 4 blocks behind 400 shared ones, in memory for 500."""
    caches = SampledCaches(sample_stride=8)
    caches.add("lru", ModelledCache(lambda: make_policy("lru"), 500 * BLOCK_TOKENS))
    result = None
    for step in range(64):
        path = (*range(400), *(1000 * (step + 1) + i for i in range(4)))
        result = serve_ended(caches, TimedPath(float(step), path, step)) or result
    assert caches.count_blocks()["lru"] == 500 // 8
    shared_blocks = len(caches.sampled_blocks(range(400)))
    assert 40 <= shared_blocks <= 60
    # All shared blocks of the sample, from the second request on.
    assert result.hit_blocks["lru"] >= shared_blocks
