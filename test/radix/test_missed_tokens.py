"""Every missed token has a cause, and the causes always sum to the misses."""

import json
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sglang_canopy.radix.missed import (
    MAX_BLOCKS,
    MIN_BLOCKS,
    BlockMap,
    RequestMisses,
    scale_to_total,
)
from sglang_canopy.storage.page_table import PAGES
from support.disk_tree import DiskTree
from support.live_tree import LiveTree
from support.missed_runs import TreeRequest, missed_tokens, tokens_by_cause

CONFIG = {"quantum_tokens": 1, "block_tokens": 4}
PROMPT = list(range(16))


def tree_of(tokens=64, **options):
    return LiveTree(tokens, "canopy-lru", CONFIG, **options)


def serve(tree, tokens, time, **fields):
    return TreeRequest(tree, tokens, time, **fields).admit().end()


def new_causes(tree, before):
    """Return the causes since ``before``."""
    tokens = tokens_by_cause(tree)
    return {key: n - before.get(key, 0) for key, n in tokens.items() if n != before.get(key)}


@pytest.fixture
def tree():
    return tree_of()


def test_a_first_prompt_was_never_seen_and_its_repeat_misses_the_last_token(tree):
    serve(tree, PROMPT, 1.0)
    assert tokens_by_cause(tree) == {("never_seen", "none"): 16}
    serve(tree, PROMPT, 2.0)
    assert tokens_by_cause(tree) == {("never_seen", "none"): 16, ("partial_page", "none"): 1}


def test_an_evicted_prompt_has_a_time_and_a_cause(tree):
    serve(tree, PROMPT, 1.0, category="chat")
    serve(tree, list(range(100, 160)), 3.0, category="batch")
    before = tokens_by_cause(tree)
    serve(tree, PROMPT, 11.0, category="chat")
    assert new_causes(tree, before) == {("evicted", "device"): 12}
    stats = tree.core.missed.stats()
    assert stats["hits_with_memory"]["x2"] == 12
    assert stats["hits_with_memory"]["x1.25"] == 12


def test_a_prompt_that_another_request_computes_is_in_flight(tree):
    first, second = TreeRequest(tree, PROMPT, 1.0).admit(), TreeRequest(tree, PROMPT, 2.0).admit()
    first.end()
    second.end()
    assert tokens_by_cause(tree) == {("never_seen", "none"): 16, ("in_flight", "none"): 16}


def flush(tree):
    tree.cache.reset()
    tree.allocator.clear()


EVENTS = {
    "flushed": (0, 1, flush, 0, {("flushed", "none"): 16}),
    "evicted without a copy": (128, 100, lambda tree: tree.evict(64), 0, {("not_written", "host"): 16}),
    "on the host, and not loaded": (128, 1, lambda tree: tree.evict(64), 16, {("late", "host"): 16}),
}  # fmt: skip
"""Tokens of the host, uses before a copy, the event, tokens that are loaded too late, the causes."""


@pytest.mark.parametrize("case", EVENTS)
def test_a_miss_has_the_cause_of_its_event(case):
    host_tokens, copies, event, unloaded_host_tokens, expected = EVENTS[case]
    tree = tree_of(host_tokens=host_tokens)
    tree.cache.write_through_threshold = copies
    serve(tree, PROMPT, 1.0)
    event(tree)
    before = tokens_by_cause(tree)
    TreeRequest(tree, PROMPT, 2.0).admit(unloaded_host_tokens=unloaded_host_tokens).end()
    assert new_causes(tree, before) == expected


def test_a_request_that_ended_without_kv_wrote_nothing(tree):
    TreeRequest(tree, PROMPT, 1.0).admit().abort()
    before = tokens_by_cause(tree)
    serve(tree, PROMPT, 2.0)
    assert new_causes(tree, before)["not_written", "device"] >= 8


def test_tokens_that_left_the_host_were_evicted_there():
    tree = tree_of(64, host_tokens=64)
    serve(tree, PROMPT, 1.0)
    for number in range(1, 5):
        serve(tree, list(range(100 * number, 100 * number + 60)), 1.0 + number)
    before = tokens_by_cause(tree)
    serve(tree, PROMPT, 20.0)
    (key,) = new_causes(tree, before)
    assert key in (("evicted", "host"), ("not_written", "host"))


@pytest.fixture
def disk_tree(tmp_path):
    tree = DiskTree(tmp_path / "disk", policy="canopy-lru", config=CONFIG)
    yield tree
    tree.close()
    PAGES.clear()


def fill_cache(tree, time):
    for number in range(1, 8):
        serve(tree, list(range(100 * number, 100 * number + 28)), time + number)


def test_unread_tokens_on_disk_are_late_and_others_evicted_there(disk_tree):
    serve(disk_tree, PROMPT, 1.0)
    disk_tree.settle()
    fill_cache(disk_tree, 1.0)
    assert disk_tree.disk_tokens(PROMPT) >= 14
    before = tokens_by_cause(disk_tree)
    serve(disk_tree, PROMPT, 20.0)
    assert set(new_causes(disk_tree, before)) <= {("late", "disk"), ("partial_page", "none")}
    fill_cache(disk_tree, 20.0)
    disk_tree.store.clear()
    before = tokens_by_cause(disk_tree)
    serve(disk_tree, PROMPT, 60.0)
    assert ("evicted", "disk") in new_causes(disk_tree, before)


def test_the_map_of_blocks_is_bounded_and_keeps_the_latest():
    blocks = BlockMap(100)
    for number in range(10_000):
        blocks.put([number], RequestMisses())
        assert len(blocks) <= 100
    assert blocks.get(9_999) is not None
    assert blocks.get(9_950) is not None
    assert blocks.get(0) is None


def serve_many(seed, one_in=1):
    """Serve a mix of prompts; return the tree."""
    rng, tree = random.Random(seed), tree_of(256)
    tree.core.missed.sample_stride = one_in
    time = 0.0
    for _ in range(250):
        time += rng.random() * 10
        run = [rng.randrange(4) for _ in range(rng.randrange(1, 6))]
        tokens = [100 * depth + name * 20 + i for depth, name in enumerate(run) for i in range(12)]
        serve(tree, [*tokens, 9999], time, category=rng.choice(["chat", "batch"]))
    return tree


@pytest.mark.parametrize("one_in", [1, 4])
def test_two_ranks_have_equal_counts(one_in):
    first, second = serve_many(3, one_in), serve_many(3, one_in)
    assert first.core.missed.stats() == second.core.missed.stats()
    json.dumps(first.core.missed.stats())


def test_sampled_blocks_have_nearly_the_same_causes():
    exact, sampled = tokens_by_cause(serve_many(5)), tokens_by_cause(serve_many(5, one_in=2))
    total = sum(exact.values())
    assert sum(sampled.values()) == total
    for key in {*exact, *sampled}:
        assert abs(exact.get(key, 0) - sampled.get(key, 0)) < 0.15 * total, key


@pytest.mark.parametrize(("blocks", "one_in"), [(4096, 1), (8192, 8), (1 << 17, 8), (1 << 18, 16)])
def test_a_sample_is_fixed_by_the_size_of_the_cache(tree, blocks, one_in):
    missed = tree.core.missed
    tree.core.live.device_tokens = 4 * blocks
    serve(tree, PROMPT, 1.0)
    tree.core.live.device_tokens = 4
    serve(tree, list(range(100, 160)), 3.0)
    assert missed.sample_stride == one_in
    assert MIN_BLOCKS <= missed._blocks.limit <= MAX_BLOCKS
    assert sum(tokens_by_cause(tree).values()) == missed_tokens(tree)


def test_causes_are_scaled_to_the_counted_misses():
    sums = {("evicted", "device"): 10, ("never_seen", "none"): 6}
    assert scale_to_total(sums, 16) == sums
    assert scale_to_total(sums, 4) == {("never_seen", "none"): 4}
    assert sum(scale_to_total(sums, 20).values()) == 20


# ---- random operations ----

RUNS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


class MissesMachine(RuleBasedStateMachine):
    """Requests begin, overlap, end or are aborted; nodes are evicted; the cache is flushed."""

    @initialize(
        page=st.sampled_from([1, 2, 8]),
        host_tokens=st.sampled_from([0, 64, 160]),
        copies=st.sampled_from([1, 100]),
        one_in=st.sampled_from([1, 2]),
    )
    def start(self, page, host_tokens, copies, one_in) -> None:
        self.tree = tree_of(96, page_size=page, host_tokens=host_tokens)
        if host_tokens:
            self.tree.cache.write_through_threshold = copies
        self.tree.core.missed.sample_stride = one_in
        self.time, self.running = 0.0, []

    @rule(
        run=RUNS,
        extra_tokens=st.integers(0, 3),
        tenant=st.sampled_from([None, None, "a", "b"]),
        pause_s=st.sampled_from([0.5, 70.0]),
    )
    def begin(self, run, extra_tokens, tenant, pause_s) -> None:
        if len(self.running) > 2:
            return
        self.time += pause_s
        tokens = [100 * depth + 10 * name + i for depth, name in enumerate(run) for i in range(6)]
        prompt = [*tokens, *range(9000, 9000 + extra_tokens)]
        request = TreeRequest(self.tree, prompt, self.time, cache_salt=tenant)
        if self.tree.cache.cache_controller is not None and tenant is None:
            self.tree.load_back(request.tokens[:-1])
        self.running.append(request.admit())

    @rule(index=st.integers(0, 2), output=st.integers(0, 5))
    def end(self, index, output) -> None:
        if index < len(self.running):
            self.running.pop(index).end(output)

    @rule(index=st.integers(0, 2))
    def abort(self, index) -> None:
        if index < len(self.running):
            self.running.pop(index).abort()

    @rule(tokens=st.integers(1, 60))
    def evict(self, tokens) -> None:
        self.tree.evict(tokens)
        self.tree.settle()

    @rule()
    def flush(self) -> None:
        if not self.running:
            self.tree.settle()
            flush(self.tree)

    @invariant()
    def causes_sum_to_the_misses(self) -> None:
        if hasattr(self, "tree"):
            tokens = tokens_by_cause(self.tree)
            assert all(n > 0 for n in tokens.values())
            assert self.tree.core.missed.corrected_tokens == 0

    @invariant()
    def unknown_is_rare(self) -> None:
        if hasattr(self, "tree"):
            tokens = tokens_by_cause(self.tree)
            assert tokens.get(("unknown", "none"), 0) <= 0.25 * max(sum(tokens.values()), 100)


TestMisses = MissesMachine.TestCase
TestMisses.settings = settings(stateful_step_count=25, suppress_health_check=list(HealthCheck))
