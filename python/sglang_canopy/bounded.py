"""A bounded container that is fair to tenants: the largest tenant loses its oldest entry."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Tenant = str | None


class Entry(NamedTuple, Generic[Key, Value]):
    """A key and its value, of a tenant."""

    tenant: Tenant
    key: Key
    value: Value


class _Held(Generic[Key, Value]):
    """One tenant's values with their sizes, oldest first."""

    __slots__ = ("entries", "size")

    def __init__(self) -> None:
        self.entries: dict[Key, tuple[Value, int]] = {}
        self.size = 0


class BoundedByTenant(Generic[Key, Value]):
    """Values by tenant and key, of a total size of at most ``most``.

    When full, the oldest entry of the largest tenant leaves, which may be the new one.
    ``most_own``: likewise, the bound of one tenant.
    """

    def __init__(self, most: int, most_own: int | None = None) -> None:
        self.most, self.most_own = most, most_own
        self.size = 0
        self._tenants: dict[Tenant, _Held[Key, Value]] = {}
        """Tenants with entries, the one whose turn it is first."""
        self._largest: list[tuple[int, int, Tenant]] = []
        """Heap of (-size, number, tenant): each tenant at its size or, if it has shrunk, at more."""
        self._number = 0

    def __len__(self) -> int:
        """Return the number of entries."""
        return sum(len(held.entries) for held in self._tenants.values())

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def __iter__(self) -> Iterator[Entry[Key, Value]]:
        for tenant, held in self._tenants.items():
            for key, (value, _) in held.entries.items():
                yield Entry(tenant, key, value)

    def get(self, tenant: Tenant, key: Key) -> Value | None:
        held = self._tenants.get(tenant)
        found = None if held is None else held.entries.get(key)
        return None if found is None else found[0]

    def put(self, tenant: Tenant, key: Key, value: Value, size: int = 1) -> list[Entry[Key, Value]]:
        """Add an entry, or replace it, as its tenant's newest. Return the entries that left."""
        self.pop(tenant, key)
        held = self._tenants.setdefault(tenant, _Held())
        held.entries[key] = value, size
        held.size += size
        self.size += size
        self._note(tenant, held.size)
        left: list[Entry[Key, Value]] = []
        while self.most_own is not None and held.size > self.most_own:
            left.append(self._drop_oldest(tenant))
        while self.size > self.most:
            left.append(self._drop_oldest(self._find_largest()))
        return left

    def pop(self, tenant: Tenant, key: Key) -> Value | None:
        """Remove and return a value; ``None`` without one."""
        held = self._tenants.get(tenant)
        if held is None or key not in held.entries:
            return None
        value, size = held.entries.pop(key)
        held.size -= size
        self.size -= size
        if not held.entries:
            del self._tenants[tenant]
        return value

    def next(self) -> Entry[Key, Value] | None:
        """Remove and return the oldest entry of the tenant whose turn it is; ``None`` if empty."""
        if not self._tenants:
            return None
        tenant = next(iter(self._tenants))
        entry = self._drop_oldest(tenant)
        if tenant in self._tenants:
            self._tenants[tenant] = self._tenants.pop(tenant)
        return entry

    def size_of(self, tenant: Tenant) -> int:
        held = self._tenants.get(tenant)
        return 0 if held is None else held.size

    def tenants_of(self, key: Key) -> list[Tenant]:
        """Return the tenants that have an entry of this key."""
        return [tenant for tenant, held in self._tenants.items() if key in held.entries]

    def forget(self, tenant: Tenant) -> bool:
        """Remove a tenant's entries. Return whether there were any."""
        held = self._tenants.pop(tenant, None)
        self.size -= 0 if held is None else held.size
        return held is not None

    def clear(self) -> None:
        self._tenants.clear()
        self._largest.clear()
        self.size = 0

    def _drop_oldest(self, tenant: Tenant) -> Entry[Key, Value]:
        entries = self._tenants[tenant].entries
        key = next(iter(entries))
        value, _ = entries[key]
        self.pop(tenant, key)
        return Entry(tenant, key, value)

    def _find_largest(self) -> Tenant:
        heap = self._largest
        while True:
            size, _, tenant = heap[0]
            now = self.size_of(tenant)
            if now == -size:
                return tenant
            heapq.heappop(heap)
            if now:
                self._note(tenant, now)

    def _note(self, tenant: Tenant, size: int) -> None:
        self._number += 1
        heapq.heappush(self._largest, (-size, self._number, tenant))
        if len(self._largest) > 4 * len(self._tenants) + 64:
            self._largest = [
                (-held.size, number, name)
                for number, (name, held) in enumerate(self._tenants.items())
            ]
            heapq.heapify(self._largest)
