"""What one rank's cache holds and does, as plain data: for ``/canopy/status`` and Prometheus."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from sglang_canopy.radix.counters import DEVICE, DISK, HOST, REASONS, TIERS, Counters

if TYPE_CHECKING:
    from sglang_canopy.radix.cache import CanopyRadixCache

WINDOW_S = 60.0
"""The "last minute" of the hit ratios."""
POINT_S = 5.0
"""Seconds that one point of the history stands for."""
POINTS = 60

_SLICE = 1000
"""Nodes looked at before the scheduler's thread is let in again."""


@dataclass(slots=True)
class History:
    """Token hit ratios over time, from sums that only grow. Times in seconds, any clock."""

    recent: deque[tuple[float, tuple[int, ...]]] = field(default_factory=deque)
    points: deque[float | None] = field(default_factory=lambda: deque(maxlen=POINTS))
    _last: tuple[float, tuple[int, ...]] | None = None

    def add(self, now: float, sums: tuple[int, ...]) -> None:
        """``sums``: prompt tokens, then the tokens hit in each tier, since the start."""
        self.recent.append((now, sums))
        while len(self.recent) > 2 and self.recent[1][0] <= now - WINDOW_S:
            self.recent.popleft()
        if self._last is None:
            self._last = (now, sums)
        elif now - self._last[0] >= POINT_S:
            self.points.append(_ratio(self._last[1], sums))
            self._last = (now, sums)

    def last_minute(self) -> list[float | None]:
        """Hit ratio by tier over ``WINDOW_S``; ``None`` where no request finished in it."""
        (_, old), (_, new) = self.recent[0], self.recent[-1]
        prompts = new[0] - old[0]
        if not prompts:
            return [None] * len(TIERS)
        return [(new[i] - old[i]) / prompts for i in range(1, len(new))]


class Status:
    """Takes the status of one cache. All calls from one thread, which is not the scheduler's.

    ``let_in`` is called between slices of work, so that no slice holds up the scheduler; it
    gives the interpreter away (``time.sleep``).
    """

    def __init__(self, cache: CanopyRadixCache, rank: int) -> None:
        self.cache = cache
        self.rank = rank
        self.counters: Counters = cache.tree_core.counters
        self.history = History()
        self.started = time.time()
        self._held: dict[str, list[int]] = {}
        self._held_next = -math.inf
        self._scan_s = 0.0
        """CPU seconds of the last walk; at most half a percent of the time goes into them."""

    def take(self, now: float, let_in: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Everything, as JSON takes it. ``now``: seconds on a clock that never goes back."""
        rows = list(self.counters.rows())
        hits = [sum(row.tiers[tier].hits for row in rows) for tier in range(len(TIERS))]
        prompts = sum(row.prompt_tokens for row in rows)
        self.history.add(now, (prompts, *hits))
        if now >= self._held_next:
            self._held = self._count_held(let_in)
            self._held_next = now + max(POINT_S, 200 * self._scan_s)
        minute = self.history.last_minute()
        sizes = self._sizes()
        return {
            "rank": self.rank,
            "time": time.time(),
            "uptime_s": time.time() - self.started,
            "policies": self._policies(),
            "page_tokens": self.cache.tree_core.page_size,
            "kv_bytes_per_token": self.kv_bytes_per_token(),
            "nodes": len(self.cache.tree_core._node_arena),
            "prompt_tokens": prompts,
            "history": list(self.history.points),
            "history_point_s": POINT_S,
            "tiers": {
                name: {
                    **sizes[name],
                    "hit_tokens": hits[tier],
                    "hit_ratio": hits[tier] / prompts if prompts else None,
                    "hit_ratio_last_minute": minute[tier],
                    "entered_tokens": sum(row.tiers[tier].entered for row in rows),
                    "demoted_tokens": sum(row.tiers[tier].demoted for row in rows),
                    "evicted_tokens": {
                        reason: sum(row.tiers[tier].evicted[i] for row in rows)
                        for i, reason in enumerate(REASONS)
                    },
                }
                for tier, name in enumerate(TIERS)
                if name in sizes
            },
            "categories": [self._category(row) for row in rows],
            "groups": list(self.groups()),
        }

    def kv_bytes_per_token(self) -> float:
        """Bytes of one token's KV on this rank."""
        allocator = self.cache.token_to_kv_pool_allocator
        size = allocator.get_kvcache().get_kv_size_bytes()
        total = sum(size) if isinstance(size, tuple) else size
        return total / (allocator.size + allocator.page_size)

    def groups(self) -> Iterator[dict[str, Any]]:
        """TTL of each subtree group and tier that has one."""
        yield from ()

    def _policies(self) -> dict[str, str]:
        live = self.cache.tree_core.live
        return {"device": live.device_policy.name, "host": live.host_policy.name}

    def _sizes(self) -> dict[str, dict[str, float]]:
        """Capacity and use of each tier there is, in bytes on this rank."""
        allocator = self.cache.token_to_kv_pool_allocator
        token = self.kv_bytes_per_token()
        sizes = {TIERS[DEVICE]: _size(allocator.size, allocator.available_size(), token)}
        controller = self.cache.cache_controller
        if controller is not None:
            pool = controller.mem_pool_host
            sizes[TIERS[HOST]] = _size(pool.size, pool.available_size(), pool.size_per_token)
            if controller.enable_storage:
                sizes[TIERS[DISK]] = {"capacity_bytes": 0.0, "used_bytes": 0.0}
        return sizes

    def _category(self, row: Any) -> dict[str, Any]:
        held = self._held.get(row.category, (0, 0))
        return {
            "category": row.category,
            "requests": row.requests,
            "prompt_tokens": row.prompt_tokens,
            "miss_tokens": row.misses,
            "hit_tokens": {name: row.tiers[i].hits for i, name in enumerate(TIERS)},
            "evicted_tokens": {name: sum(row.tiers[i].evicted) for i, name in enumerate(TIERS)},
            "held_tokens": {TIERS[DEVICE]: held[DEVICE], TIERS[HOST]: held[HOST]},
        }

    def _count_held(self, let_in: Callable[[], None]) -> dict[str, list[int]]:
        """Tokens of each category on the device and on the host: a walk over all nodes.

        The tree may change between two slices: the sums are of about now, not of one moment.
        """
        begin = time.thread_time()
        held: dict[str, list[int]] = {}
        nodes = list(self.cache.tree_core._node_arena.values())
        for start in range(0, len(nodes), _SLICE):
            for node in nodes[start : start + _SLICE]:
                data, key = node.component_data[ComponentType.FULL], node.key
                if key is None or node.parent is None:
                    continue
                category = self.counters.category_of(node.canopy.category)
                tokens = held.setdefault(category, [0, 0])
                tokens[DEVICE] += len(key) if data.value is not None else 0
                tokens[HOST] += len(key) if data.host_value is not None else 0
            let_in()
        self._scan_s = time.thread_time() - begin
        return held


def _ratio(old: tuple[int, ...], new: tuple[int, ...]) -> float | None:
    prompts = new[0] - old[0]
    return sum(b - a for a, b in zip(old[1:], new[1:])) / prompts if prompts else None


def _size(tokens: int, free: int, token_bytes: float) -> dict[str, float]:
    return {"capacity_bytes": tokens * token_bytes, "used_bytes": (tokens - free) * token_bytes}
