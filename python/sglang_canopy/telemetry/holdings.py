"""Tokens held on each tier, by category, by tenant and by group of prefixes."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from sglang_canopy.radix.counters import DEVICE, DISK, HOST, TIERS

if TYPE_CHECKING:
    from sglang_canopy.radix.cache import CanopyRadixCache

MAX_LISTED_TENANTS = 16
_SLICE_NODES = 1000
"""Nodes counted before a pause for other threads."""

_TierTokens = dict[Any, list[int]]
"""Tokens on device, host and disk, by category, tenant or group."""


class Holdings:
    """Token counts, recomputed by ``count``. They include the disk if the store is Canopy's."""

    def __init__(self, cache: CanopyRadixCache) -> None:
        self._cache = cache
        self._tokens_by_category: _TierTokens = {}
        self._largest_tenants: list[tuple[str | None, list[int]]] = []
        self._tokens_by_group: _TierTokens = {}
        """Keys: the tier with the group's table, and the group's number."""
        self.count_cpu_s = 0.0
        """CPU seconds of the last count."""

    def largest_tenants(self) -> list[tuple[str | None, dict[str, int]]]:
        """Return the ``MAX_LISTED_TENANTS`` tenants with most tokens on all tiers, by tier."""
        return [(tenant, self._tier_tokens(tokens)) for tenant, tokens in self._largest_tenants]

    def category_tokens(self, category: str) -> dict[str, int]:
        """Return the tokens on each tier of ``category``, or of the row in which it is counted."""
        return self._tier_tokens(self._tokens_by_category.get(category))

    def group_tokens(self, tier: int, group: int) -> dict[str, int]:
        """Return a group's tokens on each tier; on disk only for the disk's groups."""
        tokens_by_tier = self._tier_tokens(self._tokens_by_group.get((tier, group)))
        if tier != DISK:
            tokens_by_tier.pop(TIERS[DISK], None)
        return tokens_by_tier

    def count(self, pause: Callable[[], None]) -> None:
        """Count the tokens of all nodes in slices, with ``pause`` between them; the disk store
        counts its own pages. The tree may change between two slices, so the sums are
        approximate."""
        began_at = time.thread_time()
        by_category: _TierTokens = {}
        by_tenant: _TierTokens = {}
        by_group: _TierTokens = {}
        category_of = self._cache.tree_core.live.counters.category_of
        nodes = list(self._cache.tree_core._node_arena.values())
        for start in range(0, len(nodes), _SLICE_NODES):
            for node in nodes[start : start + _SLICE_NODES]:
                kv, key = node.component_data[ComponentType.FULL], node.key
                if key is None or node.parent is None:
                    continue
                leaf = node.canopy
                for sums, name in (
                    (by_category, category_of(leaf.category)),
                    (by_tenant, leaf.tenant),
                    (by_group, (DISK, leaf.group)),
                    (by_group, (HOST, leaf.host_group)),
                ):
                    tokens = sums.setdefault(name, [0, 0, 0])
                    tokens[DEVICE] += len(key) if kv.value is not None else 0
                    tokens[HOST] += len(key) if kv.host_value is not None else 0
            pause()
        count_pages = self._page_counter()
        if count_pages is not None:
            disk_pages, page_tokens = count_pages(), self._cache.tree_core.page_size
            for name, pages in disk_pages["categories"].items():
                by_category.setdefault(category_of(name), [0, 0, 0])[DISK] += pages * page_tokens
            for name, pages in disk_pages["tenants"].items():
                by_tenant.setdefault(name, [0, 0, 0])[DISK] += pages * page_tokens
            for name, pages in disk_pages["groups"].items():
                by_group.setdefault((DISK, name), [0, 0, 0])[DISK] += pages * page_tokens
        self._tokens_by_category, self._tokens_by_group = by_category, by_group
        self._largest_tenants = heapq.nlargest(
            MAX_LISTED_TENANTS, by_tenant.items(), key=lambda tenant_tokens: sum(tenant_tokens[1])
        )
        self.count_cpu_s = time.thread_time() - began_at

    def _tier_tokens(self, tokens: list[int] | None) -> dict[str, int]:
        tiers = TIERS if self._page_counter() is not None else TIERS[:DISK]
        return dict(zip(tiers, tokens or (0, 0, 0)))

    def _page_counter(self) -> Callable[[], Mapping[str, Mapping[Any, int]]] | None:
        """Return the page counter of Canopy's disk store; ``None`` without that store."""
        controller = self._cache.cache_controller
        backend = controller.storage_backend if controller is not None else None
        return getattr(backend, "count_pages", None)
