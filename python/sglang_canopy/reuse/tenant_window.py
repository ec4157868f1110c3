"""A window of items in order of birth, bounded in time, in size, and by tenant.

Items born before the window leave it. At the bound, the tenant with the most loses its oldest item.
Tenants beyond ``MAX_TENANTS`` count as one, so that a client gains no room by inventing tenants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

MAX_TENANTS = 64
_OTHER_TENANTS = ("others",)
"""Name of the tenants beyond ``MAX_TENANTS``; no tenant's name is a tuple."""
_TIE_DIVISOR = 1024
"""Tenants whose sizes differ by less than ``max_size`` over this count as equal."""


class _Item(Protocol):
    created_at: float
    tenant: str | None

    @property
    def size(self) -> int: ...


Item = TypeVar("Item", bound=_Item)


class _TenantItems(Generic[Item]):
    """One tenant's items, oldest first, and their total size."""

    __slots__ = ("items", "name", "size")

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.items: deque[Item] = deque()
        self.size = 0


_get_size = attrgetter("size")


class TenantWindow(Generic[Item]):
    """Items of at most ``max_size`` in total size, born within ``window_s`` seconds."""

    def __init__(self, window_s: float, max_size: int) -> None:
        self.window_s = window_s
        self.max_size = max_size
        self._total_size = 0
        self._items: deque[Item] = deque()
        """Every item, including items dropped from its middle."""
        self._items_by_tenant: dict[Hashable, _TenantItems[Item]] = {}
        """Items of each tenant that has any."""
        self._dropped_items: set[Item] = set()
        self._largest: _TenantItems[Item] = _TenantItems(None)
        self._second_size = 0
        """Upper bound of the sizes of all except ``_largest``."""

    def __len__(self) -> int:
        """Return the total size of the items, not their number."""
        return self._total_size

    def __iter__(self) -> Iterator[Item]:
        """Iterate over all items, oldest first."""
        dropped = self._dropped_items
        return (
            (item for item in self._items if item not in dropped) if dropped else iter(self._items)
        )

    def horizon(self, now: float) -> float:
        """Return the time before which no item of the window was born."""
        horizon = now - self.window_s
        return (
            max(horizon, self._items[0].created_at)
            if self._total_size >= self.max_size
            else horizon
        )

    def add(self, item: Item, now: float) -> Sequence[Item]:
        """Add an item. Return the items that left the window."""
        tenant_items = self._items_by_tenant.get(item.tenant)
        if tenant_items is None:
            tenant_items = self._make_items_of(item.tenant)
        tenant_items.items.append(item)
        size = item.size
        tenant_size = tenant_items.size = tenant_items.size + size
        self._total_size += size
        if tenant_size > self._second_size and tenant_items is not self._largest:
            self._second_size = tenant_size
        items, dropped, horizon = self._items, self._dropped_items, now - self.window_s
        items.append(item)
        if not dropped and self._total_size <= self.max_size and items[0].created_at >= horizon:
            return ()
        expelled: list[Item] = []
        while (oldest := items[0]).created_at < horizon or (dropped and oldest in dropped):
            items.popleft()
            if oldest in dropped:
                dropped.discard(oldest)
            else:
                self._remove_oldest(self._find_items_of(oldest))
                expelled.append(oldest)
        while self._total_size > self.max_size:
            expelled.append(self._drop_oldest_of_largest())
        if dropped and 2 * len(dropped) > len(items):
            self._items = deque(self)
            dropped.clear()
        return expelled

    def _make_items_of(self, tenant: str | None) -> _TenantItems[Item]:
        name = tenant if len(self._items_by_tenant) < MAX_TENANTS else _OTHER_TENANTS
        return self._items_by_tenant.setdefault(name, _TenantItems(name))

    def _find_items_of(self, item: Item) -> _TenantItems[Item]:
        """Return the items of the tenant of ``item``, the oldest of the window."""
        tenant_items = self._items_by_tenant.get(item.tenant)
        return (
            tenant_items
            if tenant_items is not None and tenant_items.items[0] is item
            else self._items_by_tenant[_OTHER_TENANTS]
        )

    def _drop_oldest_of_largest(self) -> Item:
        """Drop the oldest item of the tenant with the most."""
        largest = self._largest
        if not largest.size or largest.size + self.max_size // _TIE_DIVISOR < self._second_size:
            largest = self._largest = max(self._items_by_tenant.values(), key=_get_size)
            tenants = self._items_by_tenant.values()
            others = (tenant.size for tenant in tenants if tenant is not largest)
            self._second_size = max(others, default=0)
        oldest = self._remove_oldest(largest)
        self._dropped_items.add(oldest)
        return oldest

    def _remove_oldest(self, tenant_items: _TenantItems[Item]) -> Item:
        oldest = tenant_items.items.popleft()
        tenant_items.size -= oldest.size
        self._total_size -= oldest.size
        if not tenant_items.items:
            del self._items_by_tenant[tenant_items.name]
        return oldest
