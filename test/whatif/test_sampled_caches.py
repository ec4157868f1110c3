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
    CacheSpec,
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


def conversation_entries(seed):
    """Return interleaved conversations, each turn a block or two longer than the last."""
    draw = random.Random(seed)
    entries, paths = [], {}
    for step in range(240):
        conversation = draw.randrange(40)
        path = paths.setdefault(conversation, [10_000 * conversation])
        path.extend(10_000 * conversation + len(path) + i for i in range(draw.randint(1, 2)))
        entries.append(TimedPath(10.0 * step, tuple(path), conversation))
    return entries


def request_of(entry):
    tokens = {"block_tokens": BLOCK_TOKENS, "prompt_tokens": len(entry.path) * BLOCK_TOKENS}
    return Request(entry.time, path=entry.path, conversation=entry.conversation, **tokens)


@pytest.mark.parametrize("name", ["lru", "fifo", "lfu"])
def test_a_shadow_cache_hits_as_a_real_one(name):
    entries = conversation_entries(1)
    shadow = ShadowCache(make_policy(name), 30 * BLOCK_TOKENS, BLOCK_TOKENS)
    tree = RadixTree(make_policy(name), 30, BLOCK_TOKENS)
    for entry in entries:
        ended_request = request_of(entry)
        ended_request.label = ended_request.category
        assert shadow.access(ended_request) == tree.access(request_of(entry))
    assert 0 < len(shadow) <= 30


def serve_ended(caches, entry):
    """Return the result of ``caches`` for an ended request."""
    ended_request = request_of(entry)
    ended_request.label = ended_request.category
    sampled = caches.sample_path(ended_request)
    if sampled is None:
        return None
    return caches.serve(copy_for_shadow(ended_request, entry.conversation), sampled)


@pytest.mark.parametrize(
    ("sizes_blocks", "one_in"),
    [
        ([10], 1),
        ([2 * SAMPLED_BLOCKS - 1], 1),
        ([2 * SAMPLED_BLOCKS], 2),
        ([70 * SAMPLED_BLOCKS], 64),
        ([100, 4 * MAX_BLOCKS], 4),
    ],
)
def test_the_sample_is_fixed_by_the_size_of_the_caches(sizes_blocks, one_in):
    caches = SampledCaches()
    for number, size in enumerate(sizes_blocks):
        caches.add(number, CacheSpec(lambda: make_policy("lru"), size * BLOCK_TOKENS))
    for step in range(2_000):  # whatever the load
        serve_ended(caches, TimedPath(step * 0.001, (step,), step))
        assert caches.sample_stride == one_in


def test_a_smaller_sample_is_a_subset_of_a_larger_one():
    one_in_2, one_in_16 = (set(SampledCaches(n).sampled_blocks(range(1000))) for n in (2, 16))
    assert one_in_16 < one_in_2
    assert 30 < len(one_in_16) < 100


@given(st.lists(st.integers(0, 2**64 - 1)), st.integers(1, 2**20), st.integers(0, 20))
def test_a_path_is_sampled_as_each_of_its_blocks_is(path, one_in, power):
    for n in (one_in, 2**power):
        caches = SampledCaches(n)
        assert caches.sampled_blocks(path) == [b for b in path if block_number(b) % n == 0]


def test_common_prefixes_are_sampled_like_other_blocks():
    """64 conversations, each of 4 blocks behind 400 shared ones, in memory for 500."""
    caches = SampledCaches(sample_stride=8)
    caches.add("lru", CacheSpec(lambda: make_policy("lru"), 500 * BLOCK_TOKENS))
    result = None
    for step in range(64):
        path = (*range(400), *(1000 * (step + 1) + i for i in range(4)))
        result = serve_ended(caches, TimedPath(float(step), path, step)) or result
    assert caches.count_blocks()["lru"] == 500 // 8
    shared_blocks = len(caches.sampled_blocks(range(400)))
    assert 40 <= shared_blocks <= 60
    # All shared blocks of the sample, from the second request on.
    assert result.hit_blocks["lru"] >= shared_blocks
