"""A window of items in order of birth, bounded in time, in size, and by tenant.

Items born before the window leave it. At the bound, the party with the largest holding loses its
oldest item. Each tenant is a party; tenants beyond ``MAX_PARTIES`` share one party, so that a
client gains no room by inventing tenants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

MAX_PARTIES = 64
_OTHERS = ("others",)
"""The party of tenants beyond ``MAX_PARTIES``; no tenant's name is a tuple."""
_SLACK = 1024
"""Parties whose sizes differ by less than this fraction of the cap count as equal."""


class _Item(Protocol):
    born: float
    tenant: str | None

    @property
    def size(self) -> int: ...


Item = TypeVar("Item", bound=_Item)


class _Party(Generic[Item]):
    __slots__ = ("held", "items", "name")

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.items: deque[Item] = deque()
        self.held = 0
        """Total size of ``items``."""


_size = attrgetter("held")


class TenantWindow(Generic[Item]):
    """Items of at most ``cap`` in total size, born within ``window_s`` seconds."""

    def __init__(self, window_s: float, cap: int) -> None:
        self.window_s = window_s
        self.cap = cap
        self._held = 0
        self._all: deque[Item] = deque()
        """Every item, including items dropped from its middle."""
        self._parties: dict[Hashable, _Party[Item]] = {}
        """Non-empty parties."""
        self._dropped: set[Item] = set()
        """Items of ``_all`` that were dropped."""
        self._largest: _Party[Item] = _Party(None)
        self._second = 0
        """Upper bound of the holdings of all parties except ``_largest``."""

    def __len__(self) -> int:
        """Return the total size."""
        return self._held

    def __iter__(self) -> Iterator[Item]:
        """Iterate over all items, oldest first."""
        dropped = self._dropped
        return (item for item in self._all if item not in dropped) if dropped else iter(self._all)

    def horizon(self, now: float) -> float:
        """Return the time before which no item of the window was born."""
        horizon = now - self.window_s
        return max(horizon, self._all[0].born) if self._held >= self.cap else horizon

    def add(self, item: Item, now: float) -> Sequence[Item]:
        """Add an item. Return the items that left the window."""
        party = self._parties.get(item.tenant)
        if party is None:
            party = self._party_of(item.tenant)
        party.items.append(item)
        size = item.size
        held = party.held = party.held + size
        self._held += size
        if held > self._second and party is not self._largest:
            self._second = held
        window, dropped, horizon = self._all, self._dropped, now - self.window_s
        window.append(item)
        if not dropped and self._held <= self.cap and window[0].born >= horizon:
            return ()
        left: list[Item] = []
        while (old := window[0]).born < horizon or (dropped and old in dropped):
            window.popleft()
            if old in dropped:
                dropped.discard(old)
            else:
                self._remove_oldest(self._holder(old))
                left.append(old)
        while self._held > self.cap:
            left.append(self._drop_one())
        if dropped and 2 * len(dropped) > len(window):
            self._all = deque(self)
            dropped.clear()
        return left

    def _party_of(self, tenant: str | None) -> _Party[Item]:
        name = tenant if len(self._parties) < MAX_PARTIES else _OTHERS
        return self._parties.setdefault(name, _Party(name))

    def _holder(self, item: Item) -> _Party[Item]:
        """Return the party of ``item``, the oldest of the window."""
        party = self._parties.get(item.tenant)
        return party if party is not None and party.items[0] is item else self._parties[_OTHERS]

    def _drop_one(self) -> Item:
        """Drop the oldest item of the largest party."""
        largest = self._largest
        if not largest.held or largest.held + self.cap // _SLACK < self._second:
            largest = self._largest = max(self._parties.values(), key=_size)
            others = (party.held for party in self._parties.values() if party is not largest)
            self._second = max(others, default=0)
        old = self._remove_oldest(largest)
        self._dropped.add(old)
        return old

    def _remove_oldest(self, party: _Party[Item]) -> Item:
        old = party.items.popleft()
        party.held -= old.size
        self._held -= old.size
        if not party.items:
            del self._parties[party.name]
        return old
