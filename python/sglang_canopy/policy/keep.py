"""Budgets for kept paths: the share of a tier that requests may keep, per tenant and in total.

A tree calls this module before it writes ``Leaf.keep_until``. A granted keep is charged to the
tenant, each node of the path once, since a kept leaf keeps all its ancestors. Keeps are never
shortened, so a node is charged at least as long as its descendants, to the tenant that keeps it longest.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from sglang_canopy.records import Leaf
from sglang_canopy.tenant import charged_name

TENANT_KEPT_SHARE = 0.1
"""Default share of the tier that one tenant may keep."""
KEPT_SHARE = 0.25
"""Default share of the tier that all tenants together may keep."""


class TokenBudget:
    """Tokens in use, per tenant and in total, each within a limit. Tenants are those that
    ``tenant.ChargedTenants`` returns."""

    def __init__(self, capacity_tokens: int, tenant_share: float, total_share: float) -> None:
        self.tenant_limit_tokens = int(capacity_tokens * min(tenant_share, total_share))
        self.total_limit_tokens = int(capacity_tokens * total_share)
        """Largest number of tokens for all tenants together."""
        self.used_tokens = 0
        self.tokens_by_tenant: dict[Hashable, int] = {}
        """Tokens in use, by tenant."""

    def take(self, tenant: Hashable, tokens: int) -> bool:
        """Charge ``tokens`` to ``tenant``. Return false, without a charge, above a limit."""
        tenant_tokens = self.tokens_by_tenant.get(tenant, 0) + tokens
        total_tokens = self.used_tokens + tokens
        if tenant_tokens > self.tenant_limit_tokens or total_tokens > self.total_limit_tokens:
            return False
        if tokens:
            self.tokens_by_tenant[tenant] = tenant_tokens
            self.used_tokens += tokens
        return True

    def give_back(self, tenant: Hashable, tokens: int) -> None:
        """Return ``tokens`` charged to ``tenant`` to the budget."""
        self.used_tokens -= tokens
        remaining_tokens = self.tokens_by_tenant[tenant] - tokens
        if remaining_tokens:
            self.tokens_by_tenant[tenant] = remaining_tokens
        else:
            del self.tokens_by_tenant[tenant]

    def stats(self, max_tenants: int = 64) -> dict[str, Any]:
        """Return use and limits in tokens, with the ``max_tenants`` largest users."""
        used = self.tokens_by_tenant.copy()
        largest = sorted(used, key=lambda tenant: (-used[tenant], str(tenant)))[:max_tenants]
        return {
            "tokens": self.used_tokens,
            "total_limit_tokens": self.total_limit_tokens,
            "tenant_limit_tokens": self.tenant_limit_tokens,
            "tenants": [{"tenant": charged_name(name), "tokens": used[name]} for name in largest],
        }


class _KeepEnd(NamedTuple):
    keep_until: float
    push_number: int
    leaf: Leaf


class Keeps:
    """Grants keeps of paths, within a budget. The tree reports each path to keep, the splits and cuts
    of its nodes, and the time."""

    def __init__(
        self,
        capacity_tokens: int,
        tenant_share: float = TENANT_KEPT_SHARE,
        total_share: float = KEPT_SHARE,
    ) -> None:
        self.budget = TokenBudget(capacity_tokens, tenant_share, total_share)
        self.granted_path_count = 0
        self.refused_path_count = 0
        """Paths that were not kept in full."""
        self._charges: dict[Leaf, tuple[Hashable, int]] = {}
        """Charged tenant, and its charged tokens, of each kept leaf."""
        self._ends: list[_KeepEnd] = []
        self._push_count = 0

    def grant(self, path: Iterable[Leaf], until: float, tenant: Hashable, now: float) -> None:
        """Keep ``path`` (root first, no node admitted) until ``until``, within the budget. The first
        node over budget and its descendants remain unchanged."""
        if until <= now:
            return
        self.expire(now)
        for leaf in path:
            is_kept = leaf in self._charges
            if is_kept and leaf.keep_until is not None and leaf.keep_until >= until:
                continue
            if not self._charge(leaf, tenant):
                self.refused_path_count += 1
                return
            leaf.keep_until = until
            if not is_kept:
                self._push_end(leaf)
        self.granted_path_count += 1

    def _charge(self, leaf: Leaf, tenant: Hashable) -> bool:
        """Charge only ``tenant`` for ``leaf``. Return false, without a change, above a limit."""
        previous = self._charges.get(leaf)
        if previous is not None:
            self.budget.give_back(*previous)
        if self.budget.take(tenant, leaf.length):
            self._charges[leaf] = (tenant, leaf.length)
            return True
        if previous is not None:
            self.budget.take(*previous)  # fits again
        return False

    def expire(self, now: float) -> None:
        """Release the charges of expired keeps."""
        ends = self._ends
        while ends and ends[0].keep_until <= now:
            leaf = heapq.heappop(ends).leaf
            if leaf not in self._charges:
                continue
            assert leaf.keep_until is not None
            if leaf.keep_until > now:
                self._push_end(leaf)
            else:
                self.budget.give_back(*self._charges.pop(leaf))

    def split(self, leaf: Leaf, head: Leaf) -> None:
        """Divide the charge of ``leaf``: ``head`` now holds its first tokens, ``leaf`` the rest."""
        charge = self._charges.get(leaf)
        if charge is None:
            return
        tenant, tokens = charge
        self._charges[leaf] = (tenant, tokens - head.length)
        self._charges[head] = (tenant, head.length)
        self._push_end(head)

    def shrink(self, leaf: Leaf, tokens: int) -> None:
        """Release the charge for ``tokens`` removed from ``leaf``."""
        charge = self._charges.get(leaf)
        if charge is None:
            return
        tenant, charged_tokens = charge
        self.budget.give_back(tenant, tokens)
        if charged_tokens > tokens:
            self._charges[leaf] = (tenant, charged_tokens - tokens)
        else:
            del self._charges[leaf]

    def release(self, leaf: Leaf) -> None:
        """Release the charge of ``leaf``, which is removed from the tree."""
        charge = self._charges.pop(leaf, None)
        if charge is not None:
            self.budget.give_back(*charge)

    def clear(self) -> None:
        """Release all charges; the tree is empty."""
        for charge in self._charges.values():
            self.budget.give_back(*charge)
        self._charges.clear()
        self._ends.clear()

    def stats(self) -> dict[str, Any]:
        """Return the budget, and the number of paths granted and refused since the start."""
        paths = {"granted": self.granted_path_count, "refused": self.refused_path_count}
        return {**self.budget.stats(), **paths}

    def _push_end(self, leaf: Leaf) -> None:
        assert leaf.keep_until is not None
        self._push_count += 1
        heapq.heappush(self._ends, _KeepEnd(leaf.keep_until, self._push_count, leaf))
        if len(self._ends) > 2 * len(self._charges) + 64:
            self._ends = [end for end in self._ends if end.leaf in self._charges]
            heapq.heapify(self._ends)
