"""The window of samples for curves, bounded in time, in number, and by tenant.

A sample born before the window is dropped, continued or not: all samples of the window were
observed for the same chance to return, so censoring is unbiased. At the bound, the party with most
samples loses its oldest. Each tenant is a party; tenants beyond ``MAX_PARTIES`` share one party, so
that a client gains no room by inventing tenants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator

from sglang_canopy.reuse.tip import Tip

MAX_PARTIES = 64
_OTHERS = ("others",)
"""The party of tenants beyond ``MAX_PARTIES``; no tenant's name is a tuple."""
_COMPARED_EVERY = 64
"""Samples dropped between two searches for the largest party."""


class SampleWindow:
    """At most ``cap`` samples born within ``window_s`` seconds, in order of birth."""

    def __init__(self, window_s: float, cap: int) -> None:
        self.window_s = window_s
        self.cap = cap
        self._all: deque[Tip] = deque()
        """Every sample, including samples dropped from its middle."""
        self._parties: dict[Hashable, deque[Tip]] = {}
        self._dropped: set[Tip] = set()
        """Samples of ``_all`` that were dropped."""
        self._largest: deque[Tip] = deque()
        self._compare_in = 0

    def __len__(self) -> int:
        return len(self._all) - len(self._dropped)

    def __iter__(self) -> Iterator[Tip]:
        """Iterate over all samples, oldest first."""
        gone = self._dropped
        return (tip for tip in self._all if tip not in gone) if gone else iter(self._all)

    def horizon(self, now: float) -> float:
        """Return the time before which no sample of the window was born."""
        horizon = now - self.window_s
        return max(horizon, self._all[0].born) if len(self) >= self.cap else horizon

    def add(self, tip: Tip, now: float) -> list[Tip]:
        """Add a sample. Return the samples that it pushed out of the window."""
        mine = self._parties.get(tip.tenant)
        if mine is None:
            mine = self._new_party(tip.tenant)
        mine.append(tip)
        window, horizon = self._all, now - self.window_s
        window.append(tip)
        left: list[Tip] = []
        gone = self._dropped
        while window[0].born < horizon or window[0] in gone:
            old = window.popleft()
            if old in gone:
                gone.discard(old)
            else:
                self._leave(old)
                left.append(old)
        while len(window) - len(gone) > self.cap:
            left.append(self._drop_one(mine))
        if len(gone) > self.cap:
            self._all = deque(self)
            gone.clear()
        return left

    def _new_party(self, tenant: str | None) -> deque[Tip]:
        party = tenant if len(self._parties) < MAX_PARTIES else _OTHERS
        return self._parties.setdefault(party, deque())

    def _leave(self, tip: Tip) -> None:
        """Remove ``tip``, the oldest sample, from its party."""
        for party in (tip.tenant, _OTHERS):
            mine = self._parties.get(party)
            if mine and mine[0] is tip:
                mine.popleft()
                if not mine:
                    del self._parties[party]
                return

    def _drop_one(self, mine: deque[Tip]) -> Tip:
        """Drop the oldest sample of the largest party; ``mine`` has just grown by one."""
        self._compare_in -= 1
        if self._compare_in <= 0 or not self._largest:
            self._compare_in = _COMPARED_EVERY
            self._largest = max(self._parties.values(), key=len)
        if len(mine) > len(self._largest):
            self._largest = mine
        old = self._largest.popleft()
        self._dropped.add(old)
        return old
