"""Protects the prefixes of waiting requests, for a limited time and within a budget."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple

from sglang_canopy.policy.keep import TokenBudget
from sglang_canopy.records import Leaf

AWAITED_S = 60.0
"""Seconds that a prefix is protected for a waiting request."""
AWAITED_TENANT_SHARE = 0.25
"""Largest share of the device protected for one tenant's waiting requests."""
AWAITED_TOTAL_SHARE = 0.5
"""Largest share of the device protected for all waiting requests."""


class _Charge(NamedTuple):
    """Tokens of ``tenant``'s budget that protect a leaf until a time on the requests' clock."""

    protected_until: float
    tenant: Hashable
    tokens: int


class AwaitedPaths:
    """Protected leaves, each charged with its path. Times are on the requests' clock. A path with
    two protected leaves is charged in two parts: up to the upper leaf, and the rest. Leaves beyond
    the budget are ranked as usual. The disk tier is not protected."""

    def __init__(self, capacity_tokens: int) -> None:
        self.budget = TokenBudget(capacity_tokens, AWAITED_TENANT_SHARE, AWAITED_TOTAL_SHARE)
        self._charges: dict[Leaf, _Charge] = {}
        """In order of ``protected_until``, except heads of splits."""

    def is_fresh(self, leaf: Leaf, now: float) -> bool:
        """Return whether more than half of the protection period of ``leaf`` remains."""
        return leaf.awaited_until is not None and leaf.awaited_until > now + AWAITED_S / 2

    def protect(
        self, leaf: Leaf, tenant: Hashable, now: float, device_leaf: Leaf | None = None
    ) -> None:
        """Protect ``leaf`` for a waiting request, which was measured but not admitted. ``device_leaf``:
        the last leaf of the same path on the device, if ``leaf`` is only on the host."""
        self._expire(now)
        self.end_protection(leaf)
        tokens = leaf.offset + leaf.length
        if not self.budget.take(tenant, tokens):
            return
        device_tokens = 0
        if device_leaf is not None:
            self.end_protection(device_leaf)
            device_tokens = device_leaf.offset + device_leaf.length
            self._charge(device_leaf, now + AWAITED_S, tenant, device_tokens)
        self._charge(leaf, now + AWAITED_S, tenant, tokens - device_tokens)

    def split(self, leaf: Leaf, head: Leaf) -> None:
        """Divide the charge of ``leaf``: ``head`` now holds its first tokens and has its
        ``awaited_until``."""
        charge = self._charges.get(leaf)
        if charge is None:
            head.awaited_until = None
            return
        tail_tokens = min(charge.tokens, leaf.length)
        self._charges[leaf] = charge._replace(tokens=tail_tokens)
        self._charge(head, charge.protected_until, charge.tenant, charge.tokens - tail_tokens)

    def _charge(self, leaf: Leaf, until: float, tenant: Hashable, tokens: int) -> None:
        self._charges[leaf] = _Charge(until, tenant, tokens)
        leaf.awaited_until = until

    def __iter__(self) -> Iterator[Leaf]:
        """Iterate over a copy of the protected leaves."""
        return iter(list(self._charges))

    def end_protection(self, leaf: Leaf) -> None:
        """End the protection of ``leaf``: its request was served, or its node was removed."""
        leaf.awaited_until = None
        charge = self._charges.pop(leaf, None)
        if charge is not None and charge.tokens:
            self.budget.give_back(charge.tenant, charge.tokens)

    def clear(self) -> None:
        """End all protection; the tree is empty."""
        for leaf in list(self._charges):
            self.end_protection(leaf)

    def _expire(self, now: float) -> None:
        while self._charges:
            leaf = next(iter(self._charges))
            if self._charges[leaf].protected_until > now:
                return
            self.end_protection(leaf)
