"""Prefixes that requests in the queue will use: protected for a while, within a budget."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_canopy.policy.keep import TokenBudget
from sglang_canopy.records import Leaf

AWAITED_S = 60.0
"""How long a prefix is kept for a request that was looked up and not served yet."""
TENANT_SHARE = 0.25
"""Share of the device that is protected for the waiting requests of one tenant."""
TOTAL_SHARE = 0.5
"""And for those of all tenants."""


class Awaited:
    """The protected leaves, each charged with its whole path. Times on the requests' clock.

    Beyond the budget a leaf is ranked like any other. Nothing here reaches the disk tier.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self.budget = TokenBudget(capacity_tokens, TENANT_SHARE, TOTAL_SHARE)
        self._charges: dict[Leaf, tuple[float, str | None, int]] = {}
        """In the order in which they end."""

    def is_fresh(self, leaf: Leaf, now: float) -> bool:
        """Whether ``leaf`` has most of its protection before it."""
        return leaf.awaited_until is not None and leaf.awaited_until > now + AWAITED_S / 2

    def protect(
        self, leaf: Leaf, tenant: str | None, now: float, above: Leaf | None = None
    ) -> None:
        """A request that waits will use ``leaf`` (measured, not admitted).

        ``above``: of the same path, the last one in the tier above where ``leaf`` is not; ``leaf``
        is charged with it.
        """
        self._expire(now)
        self.served(leaf)
        tokens = leaf.offset + leaf.length
        if not self.budget.take(tenant, tokens):
            return
        until = now + AWAITED_S
        self._charges[leaf] = (until, tenant, tokens)
        leaf.awaited_until = until
        if above is not None:
            _, whose, charged = self._charges.pop(above, (0.0, tenant, 0))
            self._charges[above] = (until, whose, charged)
            above.awaited_until = until

    def __iter__(self) -> Iterator[Leaf]:
        """The protected leaves, as they are now."""
        return iter(list(self._charges))

    def served(self, leaf: Leaf) -> None:
        """The request was served, or the node has left the tree."""
        leaf.awaited_until = None
        charge = self._charges.pop(leaf, None)
        if charge is not None and charge[2]:
            self.budget.give_back(*charge[1:])

    def clear(self) -> None:
        """The tree is empty."""
        for leaf in list(self._charges):
            self.served(leaf)

    def _expire(self, now: float) -> None:
        while self._charges:
            leaf = next(iter(self._charges))
            if self._charges[leaf][0] > now:
                return
            self.served(leaf)
