"""Evictable pages, ranked by the policy, and by a twin of the policy for each tenant with a quota.

A leaf page has no descendants on disk. It is evictable (a ``Leaf`` admitted to the policy) unless
it is locked by a writer that is about to write a child. Only leaf pages are evicted, so
the prefix of every page on disk is also on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sglang_canopy.disk.index import PageIndex
from sglang_canopy.policy.base import Policy
from sglang_canopy.records import Leaf, Request
from sglang_canopy.tenant import AT_LIMIT, tenant_digest

EVERY_TENANT = "*"
"""Quota key for every tenant without an entry (requests with neither extra key nor salt have none)."""


class PageLeaf(Leaf):
    __slots__ = ("row",)

    def __init__(self, row: int) -> None:
        super().__init__()
        self.row = row


class EvictablePages:
    """Leaf pages and quotas. Not thread-safe: the store's lock guards it."""

    def __init__(
        self, index: PageIndex, policy: Policy, page_bytes: int, quotas: Mapping[str, int]
    ) -> None:
        self.index = index
        self.policy = policy
        self.page_bytes = page_bytes
        self.quotas = dict(quotas)
        self._by_digest = any(name.startswith("#") for name in quotas)
        self.tenant_bytes: dict[str, int] = {}
        self._tenants_at_quota: set[str] = set()
        self._leaves: dict[int, PageLeaf] = {}
        self._twins: dict[str, Policy] = {}
        self._twin_leaves: dict[int, PageLeaf] = {}
        self._locked: dict[int, int] = {}

    # ---- the policies' leaves ----

    def refresh(self, row: int, now: float) -> None:
        """Admit ``row`` to the policies if it is evictable; withdraw it otherwise."""
        if self.index.children[row] or row in self._locked:
            self.withdraw(row)
            return
        if row not in self._leaves:
            self._leaves[row] = leaf = self._leaf(row)
            self.policy.admit(leaf, now)
            if self.quota(leaf.tenant) is not None:
                self._admit_to_twin(self._leaf(row), now)

    def _leaf(self, row: int) -> PageLeaf:
        leaf = PageLeaf(row)
        self.index.fill_leaf(leaf, row)
        return leaf

    def _admit_to_twin(self, leaf: PageLeaf, now: float) -> None:
        """Admit ``leaf`` to the twin of its tenant, which has a quota."""
        tenant = leaf.tenant
        assert tenant is not None
        twin = self._twins.get(tenant)
        if twin is None:
            twin = self._twins[tenant] = self.policy.twin()
        self._twin_leaves[leaf.row] = leaf
        twin.admit(leaf, now)

    def rerank(self, row: int, now: float) -> None:
        """Drop the leaf of ``row`` and admit it again after its metadata changed."""
        leaf = self._leaves.get(row)
        if leaf is None:
            return
        self._readmit(self.policy, leaf, now)
        twin_leaf = self._twin_leaves.get(row)
        if twin_leaf is not None:
            self._readmit(self._twins[self.index.label("tenant", row)], twin_leaf, now)

    def withdraw(self, row: int) -> PageLeaf | None:
        """Drop ``row`` from the policies. Returns its leaf, if it had one."""
        twin_leaf = self._twin_leaves.pop(row, None)
        if twin_leaf is not None:
            self._twins[self.index.label("tenant", row)].drop(twin_leaf)
        leaf = self._leaves.pop(row, None)
        if leaf is not None:
            self.policy.drop(leaf)
        return leaf

    def lock_parent(self, row: int) -> None:
        """Lock ``row`` while a page is written below it."""
        self._locked[row] = self._locked.get(row, 0) + 1
        self.withdraw(row)

    def unlock_parent(self, row: int, now: float) -> None:
        """Undo one ``lock_parent``. Rows without a lock (removed since) are ignored."""
        locks = self._locked.get(row, 0) - 1
        if locks > 0:
            self._locked[row] = locks
        elif locks == 0:
            del self._locked[row]
            self.refresh(row, now)

    def is_locked(self, row: int) -> bool:
        return row in self._locked

    def victim(self, now: float) -> tuple[int, int] | None:
        """Return the policy's next victim: its row, and the tokens that the policy would keep."""
        return self._victim_of(self.policy, now)

    def victim_of(self, tenant: str, now: float) -> tuple[int, int] | None:
        """Return the next victim among the pages of one tenant."""
        twin = self._twins.get(tenant)
        return None if twin is None else self._victim_of(twin, now)

    def release_page(self, row: int, leaf: PageLeaf | None, *, chosen: bool) -> None:
        """Release lock and quota of ``row``, which is being removed. ``chosen``: the policy
        chose it, and is notified."""
        self._locked.pop(row, None)
        self.refund_tenant(self.index.label("tenant", row))
        if chosen and leaf is not None:
            self.policy.record_eviction(leaf, leaf.length)

    def without_pages(self, index: PageIndex) -> EvictablePages:
        """Return the pages of the empty ``index``. Their policy keeps the learnt state."""
        policy = self.policy.twin()
        policy.learns = self.policy.learns
        return EvictablePages(index, policy, self.page_bytes, self.quotas)

    def charge_tenant(self, tenant: str | None, pages: int = 1) -> None:
        """Add pages to the bytes of ``tenant``."""
        if tenant is not None:
            size = pages * self.page_bytes
            self.tenant_bytes[tenant] = self.tenant_bytes.get(tenant, 0) + size
            self._update_at_quota(tenant)

    def refund_tenant(self, tenant: str | None) -> None:
        """Subtract a page that was removed, or charged but not written."""
        if tenant is None:
            return
        remaining = self.tenant_bytes.get(tenant, 0) - self.page_bytes
        if remaining > 0:
            self.tenant_bytes[tenant] = remaining
        else:
            self.tenant_bytes.pop(tenant, None)
            self._twins.pop(tenant, None)
        self._update_at_quota(tenant)

    def _update_at_quota(self, tenant: str) -> None:
        limit = self.quota(tenant)
        if limit is not None and self.tenant_bytes.get(tenant, -1) >= AT_LIMIT * limit:
            self._tenants_at_quota.add(tenant)
        else:
            self._tenants_at_quota.discard(tenant)

    def quota(self, tenant: str | None) -> int | None:
        """Return the byte limit of ``tenant``, or ``None``. Keys of quotas are tenants or their
        ``tenant_digest``."""
        if tenant is None or not self.quotas:
            return None
        limit = self.quotas.get(tenant)
        if limit is None and self._by_digest:
            limit = self.quotas.get(tenant_digest(tenant))
        return self.quotas.get(EVERY_TENANT) if limit is None else limit

    def tenants_at_quota(self) -> int:
        """Return the number of tenants that hold 95 % of their quota or more."""
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
        if request.tenant in self._twins:
            yield self._twins[request.tenant]

    def __len__(self) -> int:
        return len(self._leaves)

    def _readmit(self, policy: Policy, leaf: PageLeaf, now: float) -> None:
        policy.drop(leaf)
        self.index.fill_leaf(leaf, leaf.row)
        policy.admit(leaf, now)

    @staticmethod
    def _victim_of(policy: Policy, now: float) -> tuple[int, int] | None:
        choice = policy.victim(now)
        if choice is None:
            return None
        assert isinstance(choice.leaf, PageLeaf)
        return choice.leaf.row, choice.keep_tokens
