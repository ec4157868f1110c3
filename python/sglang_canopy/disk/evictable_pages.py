"""Evictable pages, ranked by the policy, and by a twin of the policy for each tenant with a quota.

A leaf page has no descendants on disk. It is evictable (a ``Leaf`` admitted to the policy) unless
it is locked by a writer that is about to write a child. Only leaf pages are evicted, so
the prefix of every page on disk is also on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from sglang_canopy.disk.index import PageIndex
from sglang_canopy.policy.base import Policy
from sglang_canopy.records import Leaf, Request
from sglang_canopy.tenant import AT_LIMIT_SHARE, tenant_digest

EVERY_TENANT = "*"
"""Quota key for every tenant without an entry. Requests without extra key and salt have no tenant."""


class PageLeaf(Leaf):
    __slots__ = ("row",)

    def __init__(self, row: int) -> None:
        super().__init__()
        self.row = row


class PageVictim(NamedTuple):
    row: int
    keep_tokens: int
    """Tokens that the policy would keep; a page is removed whole."""


class EvictablePages:
    """Leaf pages and quotas. Not thread-safe: the store's lock guards it."""

    def __init__(
        self, index: PageIndex, policy: Policy, page_bytes: int, quotas: Mapping[str, int]
    ) -> None:
        self.index = index
        self.policy = policy
        self.page_bytes = page_bytes
        self.quotas = dict(quotas)
        self._has_digest_keys = any(name.startswith("#") for name in quotas)
        self.tenant_bytes: dict[str, int] = {}
        self._tenants_at_quota: set[str] = set()
        self._leaf_by_row: dict[int, PageLeaf] = {}
        self._twin_by_tenant: dict[str, Policy] = {}
        self._twin_leaf_by_row: dict[int, PageLeaf] = {}
        self._lock_counts: dict[int, int] = {}
        """Number of pages being written below a row."""

    # ---- the policies' leaves ----

    def refresh(self, row: int, now: float) -> None:
        """Admit ``row`` to the policies if it is evictable; withdraw it otherwise."""
        if self.index.children[row] or row in self._lock_counts:
            self.withdraw(row)
            return
        if row not in self._leaf_by_row:
            self._leaf_by_row[row] = leaf = self._make_leaf(row)
            self.policy.admit(leaf, now)
            if self.quota_bytes(leaf.tenant) is not None:
                self._admit_to_twin(self._make_leaf(row), now)

    def _make_leaf(self, row: int) -> PageLeaf:
        leaf = PageLeaf(row)
        self.index.fill_leaf(leaf, row)
        return leaf

    def _admit_to_twin(self, leaf: PageLeaf, now: float) -> None:
        """Admit ``leaf`` to the twin of its tenant, which has a quota."""
        tenant = leaf.tenant
        assert tenant is not None
        twin = self._twin_by_tenant.get(tenant)
        if twin is None:
            twin = self._twin_by_tenant[tenant] = self.policy.twin()
        self._twin_leaf_by_row[leaf.row] = leaf
        twin.admit(leaf, now)

    def rerank(self, row: int, now: float) -> None:
        """Drop the leaf of ``row`` and admit it again after its metadata changed."""
        leaf = self._leaf_by_row.get(row)
        if leaf is None:
            return
        self._readmit(self.policy, leaf, now)
        twin_leaf = self._twin_leaf_by_row.get(row)
        if twin_leaf is not None:
            self._readmit(self._twin_by_tenant[self.index.label("tenant", row)], twin_leaf, now)

    def withdraw(self, row: int) -> PageLeaf | None:
        """Drop ``row`` from the policies. Returns its leaf, if it had one."""
        twin_leaf = self._twin_leaf_by_row.pop(row, None)
        if twin_leaf is not None:
            self._twin_by_tenant[self.index.label("tenant", row)].drop(twin_leaf)
        leaf = self._leaf_by_row.pop(row, None)
        if leaf is not None:
            self.policy.drop(leaf)
        return leaf

    def lock_parent(self, row: int) -> None:
        """Lock ``row`` while a page is written below it."""
        self._lock_counts[row] = self._lock_counts.get(row, 0) + 1
        self.withdraw(row)

    def unlock_parent(self, row: int, now: float) -> None:
        """Undo one ``lock_parent``. Rows without a lock (removed since) are ignored."""
        remaining_locks = self._lock_counts.get(row, 0) - 1
        if remaining_locks > 0:
            self._lock_counts[row] = remaining_locks
        elif remaining_locks == 0:
            del self._lock_counts[row]
            self.refresh(row, now)

    def is_locked(self, row: int) -> bool:
        return row in self._lock_counts

    def victim(self, now: float) -> PageVictim | None:
        """Return the policy's next victim."""
        return self._page_victim(self.policy, now)

    def tenant_victim(self, tenant: str, now: float) -> PageVictim | None:
        """Return the next victim among the pages of one tenant."""
        twin = self._twin_by_tenant.get(tenant)
        return None if twin is None else self._page_victim(twin, now)

    def release_page(self, row: int, leaf: PageLeaf | None, *, is_victim: bool) -> None:
        """Release lock and quota of ``row``, which is being removed. ``is_victim``: the policy
        chose it, and is notified."""
        self._lock_counts.pop(row, None)
        self.refund_tenant(self.index.label("tenant", row))
        if is_victim and leaf is not None:
            self.policy.record_eviction(leaf, leaf.length)

    def make_empty(self, index: PageIndex) -> EvictablePages:
        """Return an ``EvictablePages`` of the empty ``index``. Its policy keeps the learnt state."""
        policy = self.policy.twin()
        policy.learns = self.policy.learns
        return EvictablePages(index, policy, self.page_bytes, self.quotas)

    def charge_tenant(self, tenant: str | None, pages: int = 1) -> None:
        """Add pages to the bytes of ``tenant``."""
        if tenant is not None:
            charged_bytes = pages * self.page_bytes
            self.tenant_bytes[tenant] = self.tenant_bytes.get(tenant, 0) + charged_bytes
            self._update_at_quota(tenant)

    def refund_tenant(self, tenant: str | None) -> None:
        """Subtract a page that was removed, or charged but not written."""
        if tenant is None:
            return
        remaining_bytes = self.tenant_bytes.get(tenant, 0) - self.page_bytes
        if remaining_bytes > 0:
            self.tenant_bytes[tenant] = remaining_bytes
        else:
            self.tenant_bytes.pop(tenant, None)
            self._twin_by_tenant.pop(tenant, None)
        self._update_at_quota(tenant)

    def _update_at_quota(self, tenant: str) -> None:
        limit_bytes = self.quota_bytes(tenant)
        if (
            limit_bytes is not None
            and self.tenant_bytes.get(tenant, -1) >= AT_LIMIT_SHARE * limit_bytes
        ):
            self._tenants_at_quota.add(tenant)
        else:
            self._tenants_at_quota.discard(tenant)

    def quota_bytes(self, tenant: str | None) -> int | None:
        """Return the byte limit of ``tenant``, or ``None``. Keys of quotas are tenants or their
        ``tenant_digest``."""
        if tenant is None or not self.quotas:
            return None
        limit_bytes = self.quotas.get(tenant)
        if limit_bytes is None and self._has_digest_keys:
            limit_bytes = self.quotas.get(tenant_digest(tenant))
        return self.quotas.get(EVERY_TENANT) if limit_bytes is None else limit_bytes

    def count_tenants_at_quota(self) -> int:
        """Return the number of tenants with ``AT_LIMIT_SHARE`` of their quota or more."""
        return len(self._tenants_at_quota)

    # ---- learning ----

    def arrive(self, request: Request) -> None:
        for policy in self._learners(request):
            policy.arrive(request)

    def finish(self, request: Request) -> None:
        for policy in self._learners(request):
            policy.finish(request)

    def _learners(self, request: Request) -> Iterator[Policy]:
        """Yield the policy, and the twin of the request's tenant."""
        yield self.policy
        if request.tenant in self._twin_by_tenant:
            yield self._twin_by_tenant[request.tenant]

    def __len__(self) -> int:
        return len(self._leaf_by_row)

    def _readmit(self, policy: Policy, leaf: PageLeaf, now: float) -> None:
        policy.drop(leaf)
        self.index.fill_leaf(leaf, leaf.row)
        policy.admit(leaf, now)

    @staticmethod
    def _page_victim(policy: Policy, now: float) -> PageVictim | None:
        victim = policy.victim(now)
        if victim is None:
            return None
        assert isinstance(victim.leaf, PageLeaf)
        return PageVictim(victim.leaf.row, victim.keep_tokens)
