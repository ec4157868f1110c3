"""The walk by offsets against SGLang's own: the same results and the same tree, step by step."""

import dataclasses
from array import array
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from sglang_canopy import releases
from sglang_canopy.radix import offset_walk
from sglang_canopy.radix.offset_walk import CappedKey, KeyCursor, OffsetWalkCore
from support.live_tree import LiveTree

POOL_TOKENS = 4096
register_tree_core_backend("offset-walk", OffsetWalkCore)


class Scope(NamedTuple):
    """Fields that separate equal tokens of two requests."""

    extra_key: str | None = None
    salt: str | None = None


# Few blocks, so that paths meet, part and end inside one another's nodes.
SCOPES = st.builds(Scope, st.sampled_from([None, "adapter"]), st.sampled_from([None, "tenant"]))
PROMPT = (st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(0, 9), SCOPES)
"""Blocks, tokens after them, scope."""
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), *PROMPT, st.integers(0, 60), st.integers(0, 2)),
        st.tuples(st.just("match"), *PROMPT, st.booleans()),
        st.tuples(st.just("evict"), st.integers(1, 120)),
        st.tuples(st.just("lock"), *PROMPT),
        st.tuples(st.just("unlock")),
    ),
    min_size=1,
    max_size=25,
)


def path(path_blocks: list[int], tail_tokens: int) -> array:
    """Blocks of 20 tokens that share their first ten with the next, and a tail."""
    tokens = []
    for block in path_blocks:
        tokens += [block // 2] * 10 + [10 + block] * 10
    return array("q", tokens + [7] * tail_tokens)


class TreeDriver:
    """A tree and its operations; ``visible_state`` returns what tests compare."""

    def __init__(self, core: str, page_tokens: int, host_tokens, write_policy, is_bigram) -> None:
        tiers = {"host_tokens": host_tokens, "write_policy": write_policy}
        self.tree = LiveTree(POOL_TOKENS, "lru", page_size=page_tokens, sglang_core=core, **tiers)
        self.core, self.cache, self.page_tokens = self.tree.core, self.tree.cache, page_tokens
        self.core.is_eagle = is_bigram
        self.locks: list[Any] = []
        self.root_id = self.core.root_node.id

    def apply(self, operation: str, *arguments: Any) -> Any:
        result = getattr(self, operation)(*arguments)
        self.tree.settle()
        return result

    def insert(self, path_blocks, tail_tokens, scope, owned_tokens, priority) -> Any:
        key = RadixKey(path(path_blocks, tail_tokens), scope.extra_key, cache_salt=scope.salt)
        aligned_tokens = len(key) // self.page_tokens * self.page_tokens
        free_slots = self.tree.allocator.available_size()
        if not aligned_tokens or free_slots < aligned_tokens + self.page_tokens:
            return None
        match = self.find(self.key(path_blocks, tail_tokens, scope))
        cached_slots = self.core.collect_full_device_indices(match.last_device_node, self.root_id)
        owned_tokens = min(owned_tokens, len(cached_slots)) // self.page_tokens * self.page_tokens
        new_slots = self.tree.allocator.alloc(aligned_tokens - owned_tokens)
        inserted_slots = torch.cat([cached_slots[:owned_tokens], new_slots])
        result = self.cache.insert(
            InsertParams(
                key=key,
                value=inserted_slots,
                prev_prefix_len=owned_tokens,
                inserted_len=owned_tokens,
                priority=priority,
                track_adopted_ranges=True,
            )
        )
        return dataclasses.replace(result, last_device_node=self.path_of(result.last_device_node))

    def key(self, path_blocks, tail_tokens, scope, capped=False) -> RadixKey:
        tokens = path(path_blocks, tail_tokens)
        limit = max(len(tokens) - 1, 0) if capped else None
        return RadixKey(tokens, scope.extra_key, limit=limit, cache_salt=scope.salt)

    def find(self, key: RadixKey) -> MatchResult:
        return self.cache.match_prefix(MatchPrefixParams(key=key))

    def match(self, path_blocks, tail_tokens, scope, capped) -> Any:
        match = self.find(self.key(path_blocks, tail_tokens, scope, capped))
        nodes = {
            field: self.path_of(getattr(match, field))
            for field in ("last_device_node", "last_host_node", "best_match_node")
        }
        for field in releases.existing_fields(MatchResult, "last_visited_node_id"):
            node_id = getattr(match, field)
            nodes[field] = node_id and self.path_of(node_id)
        return match._replace(**nodes)

    def evict(self, tokens) -> None:
        self.cache.evict(EvictParams(num_tokens=tokens))

    def lock(self, path_blocks, tail_tokens, scope) -> None:
        match = self.find(self.key(path_blocks, tail_tokens, scope))
        self.locks.append(self.cache.lock(match.last_device_node))

    def unlock(self) -> None:
        if self.locks:
            self.cache.unlock(self.locks.pop())

    def path_of(self, node_id: int) -> tuple:
        """Return the keys from the root to a node: two trees number equal nodes differently."""
        node, parts = self.core.node_by_id(node_id), []
        while node is not self.core.root_node:
            parts.append(tuple(node.key.raw_token_ids()))
            node = node.parent
        return tuple(reversed(parts))

    def visible_state(self) -> Any:
        nodes = sorted(self.core._node_arena.values(), key=lambda node: node.last_access_time)
        return [
            (
                self.path_of(node.id),
                (node.key.extra_key, node.key.cache_salt, node.key.is_bigram, len(node.key)),
                list(node.children),
                node.priority,
                node.hit_count,
                None if not node.id or node is self.core.root_node else self.slots(node, "value"),
                self.slots(node, "host_value"),
                node.component_data[BASE_COMPONENT_TYPE].lock_ref,
            )
            for node in nodes
        ], sorted(self.tree.allocator.free_pages.tolist())

    def slots(self, node: Any, tier: str) -> Any:
        slots = getattr(node.component_data[BASE_COMPONENT_TYPE], tier)
        return None if slots is None else list(slots)


def check_equal(steps: list, *driver_settings: Any, writes_at_hit: int = 1) -> None:
    """Compare two trees after each step. ``driver_settings``: of ``TreeDriver``."""
    drivers = [TreeDriver(core, *driver_settings) for core in ("python", "offset-walk")]
    for driver in drivers:
        driver.core.write_through_threshold = writes_at_hit
    for step in steps:
        results = [driver.apply(*step) for driver in drivers]
        assert repr(results[0]) == repr(results[1]), step
        states = [driver.visible_state() for driver in drivers]
        assert states[0] == states[1], step
    for driver in drivers:
        driver.cache.sanity_check()


@pytest.mark.parametrize("host_tokens", [0, POOL_TOKENS])
@pytest.mark.parametrize("page_tokens", [1, 4])
@settings(max_examples=settings.default.max_examples // 2, suppress_health_check=list(HealthCheck))
@given(steps=OPERATIONS, write_policy=st.sampled_from(["write_through", "write_back"]))
def test_results_and_tree_equal_sglangs_walk(page_tokens, host_tokens, write_policy, steps) -> None:
    check_equal(steps, page_tokens, host_tokens, write_policy, False)


def test_a_walk_continues_after_each_node_it_writes_to_the_host() -> None:
    inserts = [[0, 1], [0, 3], [0, 1, 0], [0, 1, 0, 2], [0, 1, 0, 2, 3]]
    steps = [("insert", blocks, 0, Scope(), 0, 0) for blocks in inserts]
    check_equal(steps, 1, POOL_TOKENS, "write_through", False, writes_at_hit=3)


@pytest.mark.parametrize("page_tokens", [1, 4])
@settings(max_examples=settings.default.max_examples // 2, suppress_health_check=list(HealthCheck))
@given(steps=OPERATIONS)
def test_results_and_tree_equal_sglangs_walk_with_token_pairs(page_tokens, steps) -> None:
    check_equal(steps, page_tokens, 0, "write_through", True)


@settings(max_examples=100)
@given(
    st.tuples(st.integers(1, 8), st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1))),
    st.sampled_from([1, 3]),
    st.booleans(),
    st.integers(0, 4),
)
def test_a_cursor_advances_as_far_as_sglangs_match(case, page_tokens, is_bigram, start) -> None:
    compared_at_once, stored_tokens, key_tokens = case
    stored = RadixKey(array("q", stored_tokens), None, is_bigram=is_bigram).page_aligned(
        page_tokens
    )
    node = type("Node", (), {"key": stored})()
    key = RadixKey(array("q", [5] * start + key_tokens), None, is_bigram=is_bigram)
    key = CappedKey.share_tokens(key).page_aligned(page_tokens)
    assume(len(key) > start and len(stored))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offset_walk, "_COMPARED_IDS", compared_at_once)
        cursor = KeyCursor(key, page_tokens)
        cursor.offset = start
        assert cursor.advance(node) == stored.match_at(key, start, page_tokens)


def test_a_walked_array_can_grow_again() -> None:
    """The scheduler appends output to the array that a key shares with its request."""
    driver = TreeDriver("offset-walk", 4, 0, "write_through", False)
    tokens = path([1, 2], 0)
    slots = driver.tree.allocator.alloc(40)
    driver.cache.insert(InsertParams(key=RadixKey(tokens, None), value=slots))
    tokens.append(0)
    assert {len(node.key) for node in driver.core._node_arena.values()} == {0, 40}
    tokens.pop()
    driver.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, None, limit=39)))
    tokens.extend([1] * 1000)
    assert driver.tree.match(list(tokens)) == 40
    assert {len(node.key.token_ids) for node in driver.core._node_arena.values()} == {0, 40 - 4, 4}


def test_duplicate_slots_are_freed_even_if_the_insert_raises(monkeypatch) -> None:
    def free_slots(core: str) -> int:
        tree = LiveTree(POOL_TOKENS, "lru", page_size=4, sglang_core=core)
        tokens = array("q", range(80))
        first_half = InsertParams(key=RadixKey(tokens[:40], None), value=tree.allocator.alloc(40))
        tree.cache.insert(first_half)

        def raise_error(*_: Any, **__: Any) -> None:
            raise RuntimeError("no room")

        monkeypatch.setattr(tree.core, "_add_new_node", raise_error)
        both_halves = InsertParams(key=RadixKey(tokens, None), value=tree.allocator.alloc(80))
        with pytest.raises(RuntimeError, match="no room"):
            tree.cache.insert(both_halves)
        assert not tree.core.has_ongoing_insert()
        return tree.allocator.available_size()

    assert free_slots("offset-walk") == free_slots("python") == POOL_TOKENS - 80


def test_other_components_keep_sglangs_walk() -> None:
    core = OffsetWalkCore.__new__(OffsetWalkCore)
    core.components = (object(), object())
    assert not core._can_walk(RadixKey(array("q", [1]), None))
    assert issubclass(OffsetWalkCore, UnifiedTreeCore)
