"""Test SGLang's tree under Canopy when a scheduler builds its cache, by behaviour.

Two small caches on the CPU, one with SGLang's own core and one with Canopy's, do the same operations and
must stay equal. Canopy's then evicts, and its leaves and slots are counted. What decides which KV is freed
is tested here, since another release of SGLang may change it without another signature.
"""

from __future__ import annotations

import contextlib
import logging
import random
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE, ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_canopy import releases
from sglang_canopy.errors import CanopyError
from sglang_canopy.radix.counters import DEVICE, TIERS
from sglang_canopy.radix.live import LivePolicies

POOL_PAGES = 96
"""Size of each pool, in pages."""
STEP_COUNT = 24
"""Operations on each of the two caches."""
PATH_COUNT = 12
"""Paths from which the operations choose."""
CANOPY_POLICY = "canopy-lru"
MakeCache = Callable[[CacheInitParams], UnifiedRadixCache]


def check_device_tier(make_cache: MakeCache, page_size: int) -> None:
    """Raise ``CanopyError`` with the failed step. ``make_cache`` builds Canopy's cache."""
    try:
        with silence_sglangs_log():
            reference = SmallTree(page_size, "lru", UnifiedRadixCache)
            canopy_tree = SmallTree(page_size, CANOPY_POLICY, make_cache)
        steps = zip([*_operate(reference)], [*_operate(canopy_tree)])
        for number, ((name, *expected), (_, *actual)) in enumerate(steps, 1):
            for aspect, sglang, canopy in zip(("result", "sizes", "nodes"), expected, actual):
                if sglang != canopy:
                    raise AssertionError(
                        f"{aspect} of step {number} ({name}): {canopy}, SGLang {sglang}"
                    )
        _evict(canopy_tree)
    except Exception as error:
        raise difference_error("tree", error) from error


def difference_error(part: str, error: Exception) -> CanopyError:
    """Return the error with which a server does not start: ``part`` of SGLang differs."""
    reason = str(error) if isinstance(error, AssertionError) else repr(error)
    return CanopyError(
        f"this SGLang's {part} differs from the tested ones ({releases.RELEASE_RANGE}): {reason[:300]}; "
        "Canopy decides which KV is freed, so it does not start. Install a tested SGLang "
        "(docs/guide/serving.md), or use --radix-eviction lru"
    )


@contextlib.contextmanager
def silence_sglangs_log() -> Iterator[None]:
    """Omit the lines of the small pools from the log, where they would look like the server's."""
    log = logging.getLogger("sglang.srt.mem_cache")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


class SmallTree:
    """A cache with small pools, and the calls of a scheduler that fill it."""

    def __init__(
        self,
        page_size: int,
        policy: str,
        make_cache: MakeCache,
        device: str = "cpu",
        head_dim: int = 1,
    ) -> None:
        """``device``: of the pool; ``head_dim``: values of a token's key, and of its value."""
        pool_tokens, dtype = POOL_PAGES * page_size, torch.float16
        self.kv_pool = MHATokenToKVPool(
            size=pool_tokens,
            page_size=page_size,
            dtype=dtype,
            head_num=1,
            head_dim=head_dim,
            layer_num=1,
            device=device,
            enable_memory_saver=False,
        )
        options = {"dtype": dtype, "device": device, "kvcache": self.kv_pool, "need_sort": False}
        self.allocator = (
            TokenToKVPoolAllocator(pool_tokens, **options)
            if page_size == 1
            else PagedTokenToKVPoolAllocator(pool_tokens, page_size, **options)
        )
        self.page_size = page_size
        self.params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(
                size=1, max_context_len=pool_tokens, device=device, enable_memory_saver=False
            ),
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
            tree_components=(ComponentType.FULL,),
            eviction_policy=policy,
            tree_core_backend="python",
        )
        self.cache = make_cache(self.params)
        self.core = self.cache.tree_core
        self.live: LivePolicies | None = getattr(self.core, "live", None)
        self._numbers: dict[int, int] = {self.core.root_node.id: 0}

    def node_number(self, node_id: Any) -> Any:
        """Number a node by its first appearance, since node ids are not equal in two caches."""
        return None if node_id is None else self._numbers.setdefault(node_id, len(self._numbers))

    def match(self, path: list[int]) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=self._key(path)))

    def insert(self, path: list[int]) -> int:
        """Insert a path as computed KV. Return the tokens that were cached before."""
        key = self._key(path)
        match = self.match(path)
        lock = self.cache.lock(match.last_device_node)
        new_slots = self.allocator.alloc(len(key) - match.device_prefix_len)
        cached_slots = self.device_slots(match)
        self.compute(new_slots, path[match.device_prefix_len : len(key)])
        slots = torch.cat([cached_slots, new_slots]) if len(new_slots) else cached_slots
        result = self.cache.insert(
            InsertParams(key=key, value=slots, prev_prefix_len=match.device_prefix_len)
        )
        self.cache.unlock(lock)
        return int(result.prefix_len)

    def device_slots(self, match: Any) -> torch.Tensor:
        """Return the device slots of a match."""
        slots: torch.Tensor = self.core.collect_full_device_indices(
            match.last_device_node, self.core.root_node.id
        )
        return slots

    def compute(self, slots: torch.Tensor, tokens: list[int]) -> None:
        """Write the tokens' KV. Without effect here, since nothing reads it."""

    def describe_nodes(self) -> list[tuple[Any, ...]]:
        """Return every node without its numbers of slots."""
        nodes = []
        for node in self.core._node_arena.values():
            if node is self.core.root_node:
                continue
            kv = node.component_data[BASE_COMPONENT_TYPE]
            nodes.append(
                (
                    self.node_number(node.id),
                    self.node_number(node.parent.id),
                    len(node.key),
                    node.hit_count,
                    kv.lock_ref,
                    kv.value is not None,
                    kv.host_value is not None,
                )
            )
        return sorted(nodes)

    def check(self) -> None:
        """Compare the evictable leaves with SGLang's rule, and count the slots."""
        core = self.core
        rules = (
            ("device", core._is_device_leaf, core.evictable_device_leaves),
            ("host", core._is_host_leaf, core.evictable_host_leaves),
        )
        for tier, rule, leaves in rules:
            expected = {node.id for node in core._node_arena.values() if rule(node)}
            differing = expected ^ {node.id for node in leaves}
            if differing:
                raise AssertionError(f"{len(differing)} evictable leaves of the {tier} differ")
        self.check_slots(DEVICE, "value", self.allocator)

    def check_slots(self, tier: int, field: str, pool: Any) -> None:
        """Compare the slots of a tier's nodes with its pool, and with what SGLang recorded."""
        nodes = [node for node in self.core._node_arena.values() if node is not self.core.root_node]
        slots = [getattr(node.component_data[BASE_COMPONENT_TYPE], field) for node in nodes]
        tree_slots = sum(len(node_slots) for node_slots in slots if node_slots is not None)
        free_slots = pool.available_size()
        if tree_slots + free_slots != pool.size:
            raise AssertionError(
                f"{tree_slots} slots of the {TIERS[tier]} in the tree and {free_slots} free of {pool.size}"
            )
        if self.live is not None:
            tiers = [counts.tiers[tier] for counts in self.live.counters.all_counts()]
            counted_tokens = sum(own.entered_tokens - sum(own.evicted_tokens) for own in tiers)
            if counted_tokens != tree_slots:
                raise AssertionError(
                    f"SGLang recorded {counted_tokens} tokens of {tree_slots} on the {TIERS[tier]}"
                )

    def _key(self, path: list[int]) -> RadixKey:
        return RadixKey(array("q", path), None).page_aligned(self.page_size)


def draw_paths(rng: random.Random, page_tokens: int) -> list[list[int]]:
    """Return paths that share prefixes, some with a part of a page at their end."""
    common_prefix = [rng.randrange(1, 9) for _ in range(4 * page_tokens)]
    return [
        common_prefix[: rng.randrange(5) * page_tokens]
        + [
            100 * number + i
            for i in range(rng.randrange(1, 5) * page_tokens + rng.randrange(page_tokens))
        ]
        for number in range(1, PATH_COUNT + 1)
    ]


def _operate(tree: SmallTree) -> Iterator[tuple[Any, ...]]:
    """Yield name, result, sizes and nodes of each step; the same steps for every tree."""
    rng = random.Random(1)
    paths = draw_paths(rng, tree.page_size)
    locks: list[Any] = []
    for _ in range(STEP_COUNT):
        name = rng.choice(("insert", "insert", "match", "lock", "unlock"))
        path = rng.choice(paths)
        result: Any = None
        if name == "insert":
            result = tree.insert(path)
        elif name == "match":
            match = tree.match(path)._asdict()
            result = {
                field: tree.node_number(value) if field.endswith(("_node", "_node_id")) else value
                for field, value in match.items()
                if isinstance(value, (int, type(None)))
            }
        elif name == "lock" and len(locks) < 3:
            locks.append(tree.cache.lock(tree.match(path).last_device_node))
        elif name == "unlock" and locks:
            tree.cache.unlock(locks.pop())
        sizes = (tree.cache.evictable_size(), tree.cache.protected_size())
        yield name, result, sizes, tree.describe_nodes()
        tree.check()
    for lock in locks:
        tree.cache.unlock(lock)
    tree.check()


def _evict(tree: SmallTree) -> None:
    """Evict less than a leaf, some leaves and everything."""
    page_tokens = tree.page_size
    for path in draw_paths(random.Random(2), page_tokens)[:8]:
        tree.insert(path)
        tree.check()
    for pages in (1, 2, 5):
        free_before_tokens = tree.allocator.available_size()
        tree.cache.evict(EvictParams(num_tokens=pages * page_tokens))
        tree.check()
        freed_tokens = tree.allocator.available_size() - free_before_tokens
        if freed_tokens < pages * page_tokens:
            raise AssertionError(f"{freed_tokens} tokens freed, not {pages * page_tokens}")
    for is_everything in (False, True):
        wanted_tokens = tree.cache.evictable_size() if is_everything else page_tokens
        expected_free_tokens = tree.allocator.available_size() + wanted_tokens
        tree.cache.evict_for_alloc(EvictParams(num_tokens=wanted_tokens))
        tree.check()
        if tree.allocator.available_size() < expected_free_tokens:
            raise AssertionError(f"an allocation of {wanted_tokens} tokens found no room")
    if tree.cache.evictable_size() or tree.allocator.available_size() != tree.allocator.size:
        raise AssertionError("KV is left after an eviction of everything")
