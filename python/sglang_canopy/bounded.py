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
    """Values by tenant and key, of a total size of at most ``limit``.

    When full, the oldest entry of the largest tenant leaves, which may be the new one.
    ``limit_per_tenant``: likewise, the bound of one tenant.
    """

    def __init__(self, limit: int, limit_per_tenant: int | None = None) -> None:
        self.limit, self.limit_per_tenant = limit, limit_per_tenant
        self.size = 0
        self._tenants: dict[Tenant, _Share[Key, Value]] = {}
        """Tenants with entries, the one whose turn it is first."""
        self._by_size: dict[int, dict[Tenant, None]] = {}
        """Tenants by size; few sizes differ, since all sizes add up to at most ``limit``."""

    def __len__(self) -> int:
        return sum(len(share.sized_values) for share in self._tenants.values())

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def __iter__(self) -> Iterator[Entry[Key, Value]]:
        for tenant, share in self._tenants.items():
            for key, (value, _) in share.sized_values.items():
                yield Entry(tenant, key, value)

    def get(self, tenant: Tenant, key: Key) -> Value | None:
        share = self._tenants.get(tenant)
        value, _ = (None, 0) if share is None else share.sized_values.get(key, (None, 0))
        return value

    def put(self, tenant: Tenant, key: Key, value: Value, size: int = 1) -> list[Entry[Key, Value]]:
        """Add an entry, or replace it, as its tenant's newest. Return the entries that were dropped."""
        self.pop(tenant, key)
        share = self._tenants.setdefault(tenant, _Share())
        share.sized_values[key] = value, size
        self._resize(tenant, share, size)
        dropped: list[Entry[Key, Value]] = []
        while self.limit_per_tenant is not None and share.size > self.limit_per_tenant:
            dropped.append(self._drop_oldest(tenant))
        while self.size > self.limit:
            dropped.append(self._drop_oldest(next(iter(self._by_size[max(self._by_size)]))))
        return dropped

    def pop(self, tenant: Tenant, key: Key) -> Value | None:
        """Remove and return a value; ``None`` without one."""
        share = self._tenants.get(tenant)
        if share is None or key not in share.sized_values:
            return None
        value, size = share.sized_values.pop(key)
        self._resize(tenant, share, -size)
        if not share.sized_values:
            del self._tenants[tenant]
        return value

    def pop_next(self) -> Entry[Key, Value] | None:
        """Remove and return the oldest entry of the tenant whose turn it is; ``None`` if empty."""
        if not self._tenants:
            return None
        tenant = next(iter(self._tenants))
        entry = self._drop_oldest(tenant)
        if tenant in self._tenants:
            self._tenants[tenant] = self._tenants.pop(tenant)
        return entry

    def size_of(self, tenant: Tenant) -> int:
        share = self._tenants.get(tenant)
        return 0 if share is None else share.size

    def tenants_of(self, key: Key) -> list[Tenant]:
        """Return the tenants that have an entry of this key."""
        return [tenant for tenant, share in self._tenants.items() if key in share.sized_values]

    def forget(self, tenant: Tenant) -> bool:
        """Remove a tenant's entries. Return whether there were any."""
        share = self._tenants.pop(tenant, None)
        if share is not None:
            self._resize(tenant, share, -share.size)
        return share is not None

    def clear(self) -> None:
        self._tenants.clear()
        self._by_size.clear()
        self.size = 0

    def _drop_oldest(self, tenant: Tenant) -> Entry[Key, Value]:
        sized_values = self._tenants[tenant].sized_values
        key, (value, _) = next(iter(sized_values.items()))
        self.pop(tenant, key)
        return Entry(tenant, key, value)

    def _resize(self, tenant: Tenant, share: _Share[Key, Value], change: int) -> None:
        if share.size:
            tenants = self._by_size[share.size]
            del tenants[tenant]
            if not tenants:
                del self._by_size[share.size]
        share.size += change
        self.size += change
        if share.size:
            self._by_size.setdefault(share.size, {})[tenant] = None
