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

PAGES = 96
"""Size of each pool, in pages."""
STEPS = 24
"""Operations on each of the two caches."""
PATHS = 12
"""Paths from which the operations choose."""
POLICY = "canopy-lru"
MakeCache = Callable[[CacheInitParams], UnifiedRadixCache]


def check_device_tier(make_cache: MakeCache, page_size: int) -> None:
    """Raise ``CanopyError`` with the failed step. ``make_cache`` builds Canopy's cache."""
    try:
        with silence_sglangs_log():
            reference = SmallTree(page_size, "lru", UnifiedRadixCache)
            canopy_tree = SmallTree(page_size, POLICY, make_cache)
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
        size = PAGES * page_size
        self.kv = MHATokenToKVPool(
            size=size,
            page_size=page_size,
            dtype=torch.float16,
            head_num=1,
            head_dim=head_dim,
            layer_num=1,
            device=device,
            enable_memory_saver=False,
        )
        options = {"dtype": torch.float16, "device": device, "kvcache": self.kv, "need_sort": False}
        self.allocator = (
            TokenToKVPoolAllocator(size, **options)
            if page_size == 1
            else PagedTokenToKVPoolAllocator(size, page_size, **options)
        )
        self.page_size = page_size
        self.params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(
                size=1, max_context_len=size, device=device, enable_memory_saver=False
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

    def number(self, node_id: Any) -> Any:
        """Number a node by its first appearance, since node ids are not equal in two caches."""
        return None if node_id is None else self._numbers.setdefault(node_id, len(self._numbers))

    def match(self, path: list[int]) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=self._key(path)))

    def insert(self, path: list[int]) -> int:
        """Insert a path as computed KV. Return the tokens that were cached before."""
        key = self._key(path)
        hit = self.match(path)
        lock = self.cache.lock(hit.last_device_node)
        new_slots = self.allocator.alloc(len(key) - hit.device_prefix_len)
        cached_slots = self.read_slots(hit)
        self.compute(new_slots, path[hit.device_prefix_len : len(key)])
        value = torch.cat([cached_slots, new_slots]) if len(new_slots) else cached_slots
        result = self.cache.insert(
            InsertParams(key=key, value=value, prev_prefix_len=hit.device_prefix_len)
        )
        self.cache.unlock(lock)
        return int(result.prefix_len)

    def read_slots(self, match: Any) -> torch.Tensor:
        """Return the slots on the device of a match."""
        slots: torch.Tensor = self.core.collect_full_device_indices(
            match.last_device_node, self.core.root_node.id
        )
        return slots

    def compute(self, slots: torch.Tensor, tokens: list[int]) -> None:
        """Write the tokens' KV; this cache has none that is read."""

    def describe_nodes(self) -> list[tuple[Any, ...]]:
        """Return every node without its numbers of slots."""
        rows = []
        for node in self.core._node_arena.values():
            if node is self.core.root_node:
                continue
            data = node.component_data[BASE_COMPONENT_TYPE]
            rows.append(
                (
                    self.number(node.id),
                    self.number(node.parent.id),
                    len(node.key),
                    node.hit_count,
                    data.lock_ref,
                    data.value is not None,
                    data.host_value is not None,
                )
            )
        return sorted(rows)

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
        in_tree = sum(len(node_slots) for node_slots in slots if node_slots is not None)
        free = pool.available_size()
        if in_tree + free != pool.size:
            raise AssertionError(
                f"{in_tree} slots of the {TIERS[tier]} in the tree and {free} free of {pool.size}"
            )
        if self.live is not None:
            rows = [row.tiers[tier] for row in self.live.counters.rows()]
            counted = sum(row.entered_tokens - sum(row.evicted_tokens) for row in rows)
            if counted != in_tree:
                raise AssertionError(
                    f"SGLang recorded {counted} tokens of {in_tree} on the {TIERS[tier]}"
                )

    def _key(self, path: list[int]) -> RadixKey:
        return RadixKey(array("q", path), None).page_aligned(self.page_size)


def draw_paths(draw: random.Random, page: int) -> list[list[int]]:
    """Return paths that share prefixes, some with a part of a page at their end."""
    common_prefix = [draw.randrange(1, 9) for _ in range(4 * page)]
    return [
        common_prefix[: draw.randrange(5) * page]
        + [100 * number + i for i in range(draw.randrange(1, 5) * page + draw.randrange(page))]
        for number in range(1, PATHS + 1)
    ]


def _operate(tree: SmallTree) -> Iterator[tuple[Any, ...]]:
    """Yield name, result, sizes and nodes of each step; the same steps for every tree."""
    draw = random.Random(1)
    paths = draw_paths(draw, tree.page_size)
    locks: list[Any] = []
    for _ in range(STEPS):
        name = draw.choice(("insert", "insert", "match", "lock", "unlock"))
        path = draw.choice(paths)
        result: Any = None
        if name == "insert":
            result = tree.insert(path)
        elif name == "match":
            match = tree.match(path)._asdict()
            result = {
                field: tree.number(value) if field.endswith(("_node", "_node_id")) else value
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
    page = tree.page_size
    for path in draw_paths(random.Random(2), page)[:8]:
        tree.insert(path)
        tree.check()
    for pages in (1, 2, 5):
        free_before = tree.allocator.available_size()
        tree.cache.evict(EvictParams(num_tokens=pages * page))
        tree.check()
        freed = tree.allocator.available_size() - free_before
        if freed < pages * page:
            raise AssertionError(f"an eviction of {pages * page} tokens freed {freed}")
    for is_everything in (False, True):
        wanted_tokens = tree.cache.evictable_size() if is_everything else page
        expected_free = tree.allocator.available_size() + wanted_tokens
        tree.cache.evict_for_alloc(EvictParams(num_tokens=wanted_tokens))
        tree.check()
        if tree.allocator.available_size() < expected_free:
            raise AssertionError(f"an allocation of {wanted_tokens} tokens found no room")
    if tree.cache.evictable_size() or tree.allocator.available_size() != tree.allocator.size:
        raise AssertionError("KV is left after an eviction of everything")
