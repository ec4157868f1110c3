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
        self._by_size: dict[int, dict[Tenant, None]] = {}
        """Tenants by size; few sizes differ, since all sizes add up to at most ``most``."""

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
        entry = None if held is None else held.entries.get(key)
        return None if entry is None else entry[0]

    def put(self, tenant: Tenant, key: Key, value: Value, size: int = 1) -> list[Entry[Key, Value]]:
        """Add an entry, or replace it, as its tenant's newest. Return the entries that left."""
        self.pop(tenant, key)
        held = self._tenants.setdefault(tenant, _Held())
        held.entries[key] = value, size
        self._resize(tenant, held, size)
        left: list[Entry[Key, Value]] = []
        while self.most_own is not None and held.size > self.most_own:
            left.append(self._drop_oldest(tenant))
        while self.size > self.most:
            left.append(self._drop_oldest(next(iter(self._by_size[max(self._by_size)]))))
        return left

    def pop(self, tenant: Tenant, key: Key) -> Value | None:
        """Remove and return a value; ``None`` without one."""
        held = self._tenants.get(tenant)
        if held is None or key not in held.entries:
            return None
        value, size = held.entries.pop(key)
        self._resize(tenant, held, -size)
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
        if held is not None:
            self._resize(tenant, held, -held.size)
        return held is not None

    def clear(self) -> None:
        self._tenants.clear()
        self._by_size.clear()
        self.size = 0

    def _drop_oldest(self, tenant: Tenant) -> Entry[Key, Value]:
        entries = self._tenants[tenant].entries
        key = next(iter(entries))
        value, _ = entries[key]
        self.pop(tenant, key)
        return Entry(tenant, key, value)

    def _resize(self, tenant: Tenant, held: _Held[Key, Value], change: int) -> None:
        if held.size:
            same = self._by_size[held.size]
            del same[tenant]
            if not same:
                del self._by_size[held.size]
        held.size += change
        self.size += change
        if held.size:
            self._by_size.setdefault(held.size, {})[tenant] = None
