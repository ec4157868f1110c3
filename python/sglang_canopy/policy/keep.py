"""How much of a tier requests may keep from eviction: by tenant and in total.

A tree asks here before it writes ``Leaf.keep_until``. What is granted is charged to the tenant,
each node of the path once, since a kept leaf keeps everything above it. A keep is never
shortened, so a node's charge lasts at least as long as that of any node below it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

from sglang_canopy.records import Leaf

TENANT_SHARE = 0.1
"""Share of the tier that one tenant may keep, unless set."""
TOTAL_SHARE = 0.25
"""Share of the tier that all tenants together may keep, unless set."""


class TokenBudget:
    """Tokens in use, by tenant and in total, each below a limit."""

    def __init__(self, capacity_tokens: int, tenant_share: float, total_share: float) -> None:
        self.tenant_tokens = int(capacity_tokens * min(tenant_share, total_share))
        """The most one tenant may use."""
        self.total_tokens = int(capacity_tokens * total_share)
        """The most all of them may use."""
        self.tokens = 0
        self.by_tenant: dict[str | None, int] = {}
        """Tenants that use any, and how many."""

    def take(self, tenant: str | None, tokens: int) -> bool:
        """Charge ``tokens`` to ``tenant``; false, and nothing charged, beyond a limit."""
        used = self.by_tenant.get(tenant, 0)
        if used + tokens > self.tenant_tokens or self.tokens + tokens > self.total_tokens:
            return False
        if tokens:
            self.by_tenant[tenant] = used + tokens
            self.tokens += tokens
        return True

    def give_back(self, tenant: str | None, tokens: int) -> None:
        """``tokens`` that were charged to ``tenant`` are free again."""
        self.tokens -= tokens
        left = self.by_tenant[tenant] - tokens
        if left:
            self.by_tenant[tenant] = left
        else:
            del self.by_tenant[tenant]

    def stats(self, tenants: int = 64) -> dict[str, Any]:
        """Use and limits in tokens, with the ``tenants`` that use most (``None``: the public)."""
        rows = sorted(self.by_tenant.copy().items(), key=lambda row: (-row[1], row[0] or ""))
        return {
            "tokens": self.tokens,
            "total_limit_tokens": self.total_tokens,
            "tenant_limit_tokens": self.tenant_tokens,
            "tenants": [{"tenant": t, "tokens": n} for t, n in rows[:tenants]],
        }


class Keeps:
    """Grants requests to keep their paths, within a budget.

    The tree calls ``ask`` with every path that a request wants kept, ``split`` and ``shrink`` as
    its nodes change, and ``expire`` as time passes.
    """

    def __init__(
        self,
        capacity_tokens: int,
        tenant_share: float = TENANT_SHARE,
        total_share: float = TOTAL_SHARE,
    ) -> None:
        self.budget = TokenBudget(capacity_tokens, tenant_share, total_share)
        self.granted = 0
        self.refused = 0
        """Paths that were not kept, or not to their ends."""
        self._charges: dict[Leaf, tuple[str | None, int]] = {}
        self._ends: list[tuple[float, int, Leaf]] = []
        self._count = 0

    def ask(self, path: Iterable[Leaf], until: float, tenant: str | None, now: float) -> None:
        """Keep ``path`` (root first; none of it admitted) until then, as far as the budget goes.

        A node that does not fit, and those below it, stay as they were.
        """
        if until <= now:
            return
        self.expire(now)
        for leaf in path:
            charge = self._charges.get(leaf)
            if charge is None:
                if not self.budget.take(tenant, leaf.length):
                    self.refused += 1
                    return
                self._charges[leaf] = (tenant, leaf.length)
                leaf.keep_until = until
                self._note_end(leaf)
            elif leaf.keep_until is None or leaf.keep_until < until:
                leaf.keep_until = until
        self.granted += 1

    def expire(self, now: float) -> None:
        """Keeps whose time is over charge nobody any longer."""
        ends = self._ends
        while ends and ends[0][0] <= now:
            leaf = heapq.heappop(ends)[2]
            if leaf not in self._charges:
                continue
            assert leaf.keep_until is not None
            if leaf.keep_until > now:
                self._note_end(leaf)
            else:
                self.budget.give_back(*self._charges.pop(leaf))

    def split(self, leaf: Leaf, head: Leaf) -> None:
        """``head`` now holds the first tokens of ``leaf``, whose length is what is left."""
        charge = self._charges.get(leaf)
        if charge is None:
            return
        tenant, tokens = charge
        self._charges[leaf] = (tenant, tokens - head.length)
        self._charges[head] = (tenant, head.length)
        self._note_end(head)

    def shrink(self, leaf: Leaf, tokens: int) -> None:
        """``tokens`` of ``leaf`` have left the tree."""
        charge = self._charges.get(leaf)
        if charge is None:
            return
        tenant, charged = charge
        self.budget.give_back(tenant, tokens)
        if charged > tokens:
            self._charges[leaf] = (tenant, charged - tokens)
        else:
            del self._charges[leaf]

    def gone(self, leaf: Leaf) -> None:
        """``leaf`` has left the tree whole."""
        charge = self._charges.pop(leaf, None)
        if charge is not None:
            self.budget.give_back(*charge)

    def clear(self) -> None:
        """The tree is empty."""
        for charge in self._charges.values():
            self.budget.give_back(*charge)
        self._charges.clear()
        self._ends.clear()

    def check(self, leaves: Iterable[Leaf]) -> None:
        """Recount against the tree's nodes; raises ``AssertionError`` naming what disagrees."""
        alive = set(leaves)
        by_tenant: dict[str | None, int] = {}
        for leaf, (tenant, tokens) in self._charges.items():
            assert leaf in alive, "a node that is gone is charged"
            assert tokens == leaf.length, f"{tokens} tokens charged for a node of {leaf.length}"
            by_tenant[tenant] = by_tenant.get(tenant, 0) + tokens
        assert by_tenant == self.budget.by_tenant, (by_tenant, self.budget.by_tenant)
        assert self.budget.tokens == sum(by_tenant.values())

    def stats(self) -> dict[str, Any]:
        """The budget, and how many paths were granted and refused since the start."""
        return {**self.budget.stats(), "granted": self.granted, "refused": self.refused}

    def _note_end(self, leaf: Leaf) -> None:
        assert leaf.keep_until is not None
        self._count += 1
        heapq.heappush(self._ends, (leaf.keep_until, self._count, leaf))
        if len(self._ends) > 2 * len(self._charges) + 64:
            self._ends = [e for e in self._ends if e[2] in self._charges]
            heapq.heapify(self._ends)
