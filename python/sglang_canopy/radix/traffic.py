"""Tokens that entered and left the tiers: sums by category, and the latest evictions."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE

from sglang_canopy.radix.counters import DEVICE
from sglang_canopy.radix.live_request import LiveRequest, RequestClock
from sglang_canopy.radix.missed import MissedTokens

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_canopy.radix.live import LivePolicies

MAX_EVICTIONS = 4096
"""Maximum evictions remembered, over all tenants."""
RATE_WINDOW_S = 300.0
"""Age in seconds up to which evictions count for a rate, whose time begins at the oldest that counts."""


class TierEviction(NamedTuple):
    """An eviction from a tier, and the state of its tokens at that time."""

    time_s: float
    """Seconds on the requests' clock."""
    tier: int
    tenant: str | None
    conversation: Hashable | None
    category: str
    offset: int
    tokens: int
    reason_index: int
    """Index of ``counters.REASONS``."""
    policy: str
    """The policy that chose the tokens."""
    idle_s: float
    """Seconds since the tokens were last used."""
    is_demoted: bool
    """Whether the tier below still has them."""


class EvictionLog(deque[TierEviction]):
    """The latest evictions from all tiers, appended by the scheduler's thread."""

    def __init__(self) -> None:
        super().__init__(maxlen=MAX_EVICTIONS)

    def latest_evictions(
        self, tenant: str | None, conversation: Hashable, max_evictions: int = 16
    ) -> list[TierEviction]:
        """Return the latest evictions of a tenant's conversation, newest first."""
        evictions = []
        for eviction in reversed(self):
            if eviction.conversation == conversation and eviction.tenant == tenant:
                evictions.append(eviction)
                if len(evictions) >= max_evictions:
                    break
        return evictions

    def tokens_per_s(self, tier: int, now: float) -> float:
        """Return the tokens per second evicted from ``tier``; 0 without recent evictions."""
        tokens, oldest_s = 0, now
        for eviction in reversed(self):
            if eviction.time_s < now - RATE_WINDOW_S:
                break
            oldest_s = eviction.time_s
            tokens += eviction.tokens if eviction.tier == tier else 0
        return tokens / max(now - oldest_s, 1.0)


class TierTraffic:
    """Counts insertions into and evictions from one tree's tiers."""

    def __init__(self, live: LivePolicies, clock: RequestClock, missed: MissedTokens) -> None:
        self.live, self.clock, self.missed = live, clock, missed
        self.evictions = EvictionLog()

    def record_computed_tokens(self, tokens: int, request: LiveRequest | None) -> None:
        """Count ``tokens`` added to the device by ``request``, which is being inserted."""
        category = "default" if request is None else request.label or request.category
        tenant = None if request is None else request.tenant
        self.live.counters.category_counts(category, tenant).tiers[DEVICE].entered_tokens += tokens

    def record_copy(self, tier: int, node: UnifiedTreeNode, tokens: int) -> None:
        """Count ``tokens`` of ``node`` copied to ``tier``."""
        leaf = node.canopy
        counts = self.live.counters.category_counts(leaf.category, leaf.tenant)
        counts.tiers[tier].entered_tokens += tokens

    def record_eviction(self, tier: int, node: UnifiedTreeNode, is_demoted: bool = False) -> None:
        """Count tokens of ``node`` removed from ``tier``; ``is_demoted``: the tier below has them."""
        leaf, now, counters, key = node.canopy, self.clock.now, self.live.counters, node.key
        tokens, reason_index = leaf.length or len(key), leaf.eviction_reason
        ids = key.token_ids if key.limit is None else key.raw_token_ids()
        counters.victim_digest.add(tier, leaf.offset, ids)
        policy = self.live.device_policy if tier == DEVICE else self.live.host_policy
        # ``tuple.__new__`` takes two thirds of the time of ``TierEviction(...)``.
        eviction = tuple.__new__(
            TierEviction,
            (
                now,
                tier,
                leaf.tenant,
                leaf.conversation,
                leaf.category,
                leaf.offset,
                tokens,
                reason_index,
                policy.name,
                now - leaf.last_access,
                is_demoted,
            ),
        )
        self.evictions.append(eviction)
        counters.record_eviction(tier, leaf.category, tokens, reason_index, is_demoted, leaf.tenant)
        if not is_demoted and leaf.path and (tier == DEVICE or is_off_device(node)):
            self.missed.record_eviction(tier, leaf, tokens, self.name_of_last_page_on_disk(node))

    def name_of_last_page_on_disk(self, node: UnifiedTreeNode) -> str | None:
        """Return the name of the last page of ``node`` if it was written to the disk."""
        return node.hash_value[-1] if node.canopy.is_on_disk and node.hash_value else None

    def record_flush(self, nodes: Iterable[UnifiedTreeNode]) -> None:
        """Record that the tree that holds ``nodes`` is emptied."""
        for node in nodes:
            if node.canopy.path:
                page_name = self.name_of_last_page_on_disk(node)
                self.missed.record_flush(node.canopy, len(node.key), page_name)


def is_off_device(node: UnifiedTreeNode) -> bool:
    """Return whether the device holds nothing of ``node``."""
    return node.component_data[BASE_COMPONENT_TYPE].value is None
