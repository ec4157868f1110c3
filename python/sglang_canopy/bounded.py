"""A bounded container that is fair to tenants: the largest tenant loses its oldest entry."""

from __future__ import annotations

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


class _Share(Generic[Key, Value]):
    """One tenant's values with their sizes, oldest first."""

    __slots__ = ("size", "sized_values")

    def __init__(self) -> None:
        self.sized_values: dict[Key, tuple[Value, int]] = {}
        self.size = 0


class BoundedByTenant(Generic[Key, Value]):
    """Values by tenant and key, of a total size of at most ``max_size``. When full, the oldest
    entry of the largest tenant leaves, which may be the new one. ``max_tenant_size``: likewise, the
    bound of one tenant. Sizes are in the caller's unit."""

    def __init__(self, max_size: int, max_tenant_size: int | None = None) -> None:
        self.max_size, self.max_tenant_size = max_size, max_tenant_size
        self.size = 0
        self._shares: dict[Tenant, _Share[Key, Value]] = {}
        """Tenants with entries, in round-robin order."""
        self._tenants_by_size: dict[int, dict[Tenant, None]] = {}
        """Tenants by size; few sizes differ, since all sizes add up to at most ``max_size``."""

    def __len__(self) -> int:
        return sum(len(share.sized_values) for share in self._shares.values())

    def __bool__(self) -> bool:
        return bool(self._shares)

    def __iter__(self) -> Iterator[Entry[Key, Value]]:
        for tenant, share in self._shares.items():
            for key, (value, _) in share.sized_values.items():
                yield Entry(tenant, key, value)

    def get(self, tenant: Tenant, key: Key) -> Value | None:
        share = self._shares.get(tenant)
        value, _ = (None, 0) if share is None else share.sized_values.get(key, (None, 0))
        return value

    def put(self, tenant: Tenant, key: Key, value: Value, size: int = 1) -> list[Entry[Key, Value]]:
        """Add an entry, or replace it, as its tenant's newest. Return the entries that were dropped."""
        self.pop(tenant, key)
        share = self._shares.setdefault(tenant, _Share())
        share.sized_values[key] = value, size
        self._resize(tenant, share, size)
        dropped: list[Entry[Key, Value]] = []
        while self.max_tenant_size is not None and share.size > self.max_tenant_size:
            dropped.append(self._drop_oldest(tenant))
        while self.size > self.max_size:
            largest_tenants = self._tenants_by_size[max(self._tenants_by_size)]
            dropped.append(self._drop_oldest(next(iter(largest_tenants))))
        return dropped

    def pop(self, tenant: Tenant, key: Key) -> Value | None:
        """Remove and return a value; ``None`` without one."""
        share = self._shares.get(tenant)
        if share is None or key not in share.sized_values:
            return None
        value, size = share.sized_values.pop(key)
        self._resize(tenant, share, -size)
        if not share.sized_values:
            del self._shares[tenant]
        return value

    def pop_round_robin(self) -> Entry[Key, Value] | None:
        """Remove and return the oldest entry of the next tenant, round robin; ``None`` if empty."""
        if not self._shares:
            return None
        tenant = next(iter(self._shares))
        entry = self._drop_oldest(tenant)
        if tenant in self._shares:
            self._shares[tenant] = self._shares.pop(tenant)
        return entry

    def tenant_size(self, tenant: Tenant) -> int:
        share = self._shares.get(tenant)
        return 0 if share is None else share.size

    def tenants_of(self, key: Key) -> list[Tenant]:
        """Return the tenants that have an entry of this key."""
        return [tenant for tenant, share in self._shares.items() if key in share.sized_values]

    def drop_tenant(self, tenant: Tenant) -> bool:
        """Remove a tenant's entries. Return whether there were any."""
        share = self._shares.pop(tenant, None)
        if share is not None:
            self._resize(tenant, share, -share.size)
        return share is not None

    def clear(self) -> None:
        self._shares.clear()
        self._tenants_by_size.clear()
        self.size = 0

    def _drop_oldest(self, tenant: Tenant) -> Entry[Key, Value]:
        sized_values = self._shares[tenant].sized_values
        key, (value, _) = next(iter(sized_values.items()))
        self.pop(tenant, key)
        return Entry(tenant, key, value)

    def _resize(self, tenant: Tenant, share: _Share[Key, Value], size_change: int) -> None:
        if share.size:
            tenants = self._tenants_by_size[share.size]
            del tenants[tenant]
            if not tenants:
                del self._tenants_by_size[share.size]
        share.size += size_change
        self.size += size_change
        if share.size:
            self._tenants_by_size.setdefault(share.size, {})[tenant] = None
