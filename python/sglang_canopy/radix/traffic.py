"""Tokens that entered and left the tiers: sums by category, and the latest evictions."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

from sglang_canopy.radix.counters import DEVICE
from sglang_canopy.radix.live_request import LiveRequest, RequestClock

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_canopy.radix.live import LiveCache

MOST = 4096
"""Decisions remembered, of all tenants together."""
RATE_S = 300.0
"""Seconds over which the rate of eviction is measured, or the remembered time if shorter."""


class Decision(NamedTuple):
    """An eviction from a tier, and what was known of its tokens at that time."""

    time: float
    """Seconds on the requests' clock."""
    tier: int
    tenant: str | None
    conversation: Hashable | None
    category: str
    offset: int
    tokens: int
    reason: int
    """Index of ``counters.REASONS``."""
    policy: str
    """The policy that chose the tokens."""
    idle_s: float
    """Seconds since the tokens were last used."""
    demoted: bool
    """Whether the tier below still has them."""


class Decisions(deque[Decision]):
    """The latest decisions, appended by the scheduler's thread."""

    def __init__(self) -> None:
        super().__init__(maxlen=MOST)

    def of(self, tenant: str | None, conversation: Hashable, most: int = 16) -> list[Decision]:
        """Return the latest decisions about a tenant's conversation, newest first."""
        found = []
        for one in reversed(self):
            if one.conversation == conversation and one.tenant == tenant:
                found.append(one)
                if len(found) >= most:
                    break
        return found

    def rate(self, tier: int, now: float) -> float:
        """Return the tokens per second evicted from ``tier``; 0 without recent evictions."""
        tokens, since = 0, now
        for one in reversed(self):
            if one.time < now - RATE_S:
                break
            since = one.time
            tokens += one.tokens if one.tier == tier else 0
        return tokens / max(now - since, 1.0)


class Traffic:
    """Counts insertions into and evictions from one tree's tiers."""

    def __init__(self, live: LiveCache, clock: RequestClock) -> None:
        self.live, self.clock = live, clock
        self.decisions = Decisions()

    def computed(self, tokens: int, request: LiveRequest | None) -> None:
        """Count ``tokens`` brought to the device by ``request``, which is being inserted."""
        label = "default" if request is None else request.label or request.category
        tenant = None if request is None else request.tenant
        self.live.counters.row(label, tenant).tiers[DEVICE].entered += tokens

    def entered(self, tier: int, node: UnifiedTreeNode, tokens: int) -> None:
        """Count ``tokens`` of ``node`` copied to ``tier``."""
        leaf = node.canopy
        self.live.counters.row(leaf.category, leaf.tenant).tiers[tier].entered += tokens

    def left(self, tier: int, node: UnifiedTreeNode, demoted: bool = False) -> None:
        """Count the removal of ``node``'s tokens from ``tier``; ``demoted``: the tier below has
        them."""
        leaf, now, counters = node.canopy, self.clock.now, self.live.counters
        tokens, reason = len(node.key), leaf.eviction_reason
        counters.victims.add(tier, leaf.offset, node.key.raw_token_ids())
        since = leaf.device_since if tier == DEVICE else leaf.host_since
        policy = self.live.device_policy if tier == DEVICE else self.live.host_policy
        self.decisions.append(
            Decision(
                now,
                tier,
                leaf.tenant,
                leaf.conversation,
                leaf.category,
                leaf.offset,
                tokens,
                reason,
                policy.name,
                now - leaf.last_access,
                demoted,
            )
        )
        counters.evicted(tier, leaf.category, tokens, reason, now - since, demoted, leaf.tenant)
