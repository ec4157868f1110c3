"""Shadow caches have the hits of the real cache, whole or on a sample of the blocks."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Request
from sglang_canopy.whatif.sampled_caches import (
    LEARN_FROM_ALL_PER_S,
    MAX_BLOCKS,
    MIN_BLOCKS,
    OBSERVE_WORK,
    PASS_WORK,
    WORK_PER_BLOCK,
    Arm,
    SampledCaches,
)
from sglang_canopy.whatif.shadow_cache import ShadowCache, as_sampled

BLOCK = 16


def turns(seed, conversations=40, turns=6, gap_s=10.0):
    """Requests of interleaved conversations, each turn a block or two longer than the last."""
    draw = random.Random(seed)
    requests, paths = [], {}
    for step in range(conversations * turns):
        who = draw.randrange(conversations)
        path = paths.setdefault(who, [10_000 * who])
        path.extend(10_000 * who + len(path) + i for i in range(draw.randint(1, 2)))
        requests.append((gap_s * step, tuple(path), who))
    return requests


def loop(conversations=30, rounds=20, blocks=4):
    """All conversations in turn, again and again: below their size LRU hits nothing at all."""
    paths = [tuple(range(1000 * who, 1000 * who + blocks)) for who in range(conversations)]
    return [
        (float(step), paths[step % conversations], step % conversations)
        for step in range(conversations * rounds)
    ]


def request(time, path, who=None):
    return Request(
        time=time, path=path, block_tokens=BLOCK, prompt_tokens=len(path) * BLOCK, conversation=who
    )


def serve(policy, given, blocks, verify=False):
    tree, saved = RadixTree(policy, blocks, BLOCK), 0
    for entry in given:
        saved += tree.access(request(*entry)) * BLOCK
        if verify:
            tree.verify()
    return saved


@pytest.mark.parametrize("name", ["lru", "fifo", "lfu"])
def test_a_shadow_cache_hits_as_a_real_one(name):
    given = turns(1)
    shadow = ShadowCache(make_policy(name), 30 * BLOCK, BLOCK)
    tree = RadixTree(make_policy(name), 30, BLOCK)
    for entry in given:
        ended = request(*entry)
        ended.label = ended.category
        assert shadow.access(ended) == tree.access(request(*entry))
    assert 0 < len(shadow) <= 30


def served(caches, entry):
    """Return the result of ``caches`` for an ended request."""
    ended = request(*entry)
    ended.label = ended.category
    picked = caches.pick(ended)
    return None if picked is None else caches.serve(as_sampled(ended, entry[-1]), picked)


def test_dense_traffic_is_thinned_out_and_smaller_samples_are_parts_of_larger():
    caches = SampledCaches(most_work_per_s=1.0)
    caches.add("lru", Arm(lambda: make_policy("lru"), 30_000 * BLOCK))
    before = {block for block in range(1000) if caches.samples(block)}
    assert len(before) == 1000
    for step in range(40_000):
        served(caches, (step * 0.01, (step % 1000,), step % 1000))
    # 100 requests per second and a budget of 12: one in 16 gives 6.25, one in 8 gives 12.5.
    assert caches.one_in == 16
    after = {block for block in range(1000) if caches.samples(block)}
    assert after < before
    assert 30 < len(after) < 100


@given(st.lists(st.integers(0, 2**64 - 1)), st.integers(1, 2**20), st.integers(0, 20))
def test_a_path_is_sampled_as_each_of_its_blocks_is(path, one_in, power):
    for n in (one_in, 2**power):
        caches = SampledCaches(n)
        assert caches.sampled(path) == [block for block in path if caches.samples(block)]


def test_the_shadow_caches_of_a_sample_hold_as_much_less():
    caches = SampledCaches(one_in=8)
    caches.add("lru", Arm(lambda: make_policy("lru"), 64 * BLOCK))
    for step in range(300):
        served(caches, (float(step), (step,), step))
    assert caches.blocks() == {"lru": 8}


def test_common_prefixes_are_sampled_like_other_blocks():
    """64 conversations, each of 4 blocks behind 400 shared ones, in room for 500."""
    caches = SampledCaches(one_in=8)
    caches.add("lru", Arm(lambda: make_policy("lru"), 500 * BLOCK))
    last = None
    for step in range(64):
        path = (*range(400), *(1000 * (step + 1) + i for i in range(4)))
        last = served(caches, (float(step), path, step)) or last
    assert caches.blocks()["lru"] == 500 // 8
    shared = sum(map(caches.samples, range(400)))
    assert 40 <= shared <= 60
    # All shared blocks of the sample, from the second request on.
    assert last.hit_blocks["lru"] >= shared


@given(st.integers(0, 10_000), st.integers(2, 9), st.sampled_from(["lru", "wa", "s3fifo", "gdfs"]))
def test_thinning_out_keeps_the_sampled_blocks_in_their_order(seed, one_in, name):
    shadow = ShadowCache(make_policy(name), 1000 * BLOCK, BLOCK)
    sampler = SampledCaches(one_in)
    for entry in turns(seed, conversations=12):
        ended = request(*entry)
        ended.label = ended.category
        shadow.access(ended)
    before = {block: node for node in shadow.tree.nodes() for block in node.blocks}
    shadow.thin_out(make_policy(name), one_in, sampler.samples)
    tree = shadow.tree
    tree.verify()
    after = {block: node for node in tree.nodes() for block in node.blocks}
    assert set(after) == {block for block in before if sampler.samples(block)}
    for block, node in after.items():
        assert node.last_access == before[block].last_access
        assert node.hits == before[block].hits
    for entry in turns(seed, conversations=12)[:5]:  # still found, each by the rest of its path
        path = tuple(block for block in entry[1] if sampler.samples(block))
        assert tree.match(path)[1] == len(path)
    tree.verify()


def test_thinning_out_evicts_the_oldest_blocks_first():
    shadow = ShadowCache(make_policy("lru"), 64 * BLOCK, BLOCK)
    for step in range(50):
        shadow.access(request(step / 10, (step,)))
    shadow.thin_out(make_policy("lru"), 2, lambda block: block % 5 != 0)  # 40 stay, 32 fit
    assert len(shadow) == 32
    assert {node.blocks[0] for node in shadow.tree.nodes()} == {
        block for block in range(10, 50) if block % 5
    }


def test_caches_too_large_to_shadow_are_sampled_from_the_start():
    caches = SampledCaches()
    caches.add("lru", Arm(lambda: make_policy("lru"), 10**9))
    for step in range(20):
        served(caches, (float(step), (step,), step))
    assert caches.one_in * MAX_BLOCKS * BLOCK >= 10**9


@pytest.mark.parametrize(
    ("per_s", "blocks", "exact"),
    [(LEARN_FROM_ALL_PER_S / 2, 40, 31.0), (8 * LEARN_FROM_ALL_PER_S, 4, 134.4)],
)
def test_the_required_sample_is_the_power_of_two_below_the_exact_one(per_s, blocks, exact):
    """Up to a rate policies learn from all requests, above it from the sampled ones alone."""
    arms, learns_from_all = 3, per_s <= LEARN_FROM_ALL_PER_S
    every = PASS_WORK + WORK_PER_BLOCK * blocks + OBSERVE_WORK * learns_from_all

    def work(one_in):
        served_share = 1.0 - (1.0 - 1.0 / one_in) ** blocks
        return (every + served_share * (arms + OBSERVE_WORK * (not learns_from_all))) * per_s

    limit = work(exact)
    caches = SampledCaches(most_work_per_s=limit)
    for number in range(arms):
        caches.add(number, Arm(lambda: make_policy("lru"), 1_000 * BLOCK))
    seconds = 20
    caches._window_start, caches._requests = 100.0, int(per_s * seconds)
    caches._request_blocks = caches._requests * blocks
    found = caches._required_interval(100.0 + seconds)
    assert math.log2(found).is_integer()
    assert work(2 * found) < limit < work(found)


def test_caches_too_large_to_shadow_do_not_pause_the_sampling_of_small_ones():
    caches = SampledCaches()
    caches.add("large", Arm(lambda: make_policy("lru"), 10**9))
    caches.add("small", Arm(lambda: make_policy("lru"), 100 * BLOCK))
    for step in range(20):
        served(caches, (float(step), (step,), step))
    assert not caches.paused


def test_the_smallest_cache_decides_when_a_sample_is_too_small():
    caches = SampledCaches(most_work_per_s=1.0)
    caches.add("large", Arm(lambda: make_policy("lru"), 100_000 * BLOCK))
    caches.add("small", Arm(lambda: make_policy("lru"), 2 * MIN_BLOCKS * BLOCK))
    for step in range(10_000):
        served(caches, (step * 0.01, tuple(range(20 * step, 20 * step + 20)), step))
    assert caches.paused


def test_a_request_thins_out_one_cache_at_most(monkeypatch):
    """All caches in one call took 163 ms."""
    caches, thinned, whole = SampledCaches(most_work_per_s=20.0), [], ShadowCache.thin_out
    for size in (10_000, 20_000):
        for name in ("lru", "wa"):
            arm = Arm(lambda name=name: make_policy(name), size * BLOCK)
            caches.add((name, size), arm)
    monkeypatch.setattr(
        ShadowCache, "thin_out", lambda *given: (thinned.append(given), whole(*given))
    )
    for step in range(2_000):
        before = len(thinned)
        picked = served(caches, (step * 0.05, tuple(range(20 * step, 20 * step + 20)), step))
        assert len(thinned) - before <= 1
        if len(thinned) > before:
            assert picked is None
        assert {cache.tree.block_tokens for cache in caches._caches.values()} == {
            BLOCK * caches.one_in
        } or caches.skips
    assert caches.one_in > 1
    assert len(thinned) >= 4
