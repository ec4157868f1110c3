"""Fair shares between tenants, in seconds of work.

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) with predicted seconds as packet lengths:
the share with the least work received is served next. Like deficit round robin, it keeps two
backlogged shares within one request of each other; unlike it, it needs no quantum and tolerates
service out of order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from heapq import nlargest

from sglang_canopy.tenant import ClaimedTenant, Vouched

SEPARATE_SHARES = 64
"""Maximum tenants with a separate share: those served most, with decay."""
REMEMBERED = 256
"""Tenants whose served work is tracked."""
FADE_S = 600.0
"""Halve all tracked work after this many seconds of served work."""
_FORGOTTEN_S = 1e-3
"""A tenant with less work is forgotten."""
PUBLIC: str | None = None
"""Tenant of requests without a tenant name."""


class _CommonShare:
    """The share of all tenants without a separate one."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


REST, VOUCHED_REST = _CommonShare("REST"), _CommonShare("VOUCHED_REST")
Share = Hashable


class FairShares:
    """Work received by each share.

    A client can use any number of tenant names, so a name alone is worth little. Each tenant that a
    gateway vouches for has a separate share; all requests without a voucher share ``REST`` while
    there are vouched requests. If no request is vouched for, a new name shares ``REST``, and gets a
    separate share once it has been served. That is fair between clients that use one name each, but
    no protection from a client that uses many.
    """

    def __init__(self) -> None:
        self._served_s: dict[ClaimedTenant, float] = {}
        """ClaimedTenant -> seconds of work, decayed."""
        self._since_fade = 0.0
        self._separate_shares: set[ClaimedTenant] = {PUBLIC}
        self._vouched = False
        """Whether a vouched tenant was served recently."""
        self._next_start: dict[Share, float] = {}
        """Share -> virtual start time, in seconds."""
        self._virtual_time = 0.0
        """Virtual start time of the last request served."""

    def share_of(self, tenant: ClaimedTenant) -> Share:
        if tenant in self._separate_shares:
            return tenant
        if not isinstance(tenant, Vouched):
            return REST
        if self._vouched and len(self._separate_shares) >= SEPARATE_SHARES:
            return VOUCHED_REST
        return tenant

    def starts(self, shares: Iterable[Share]) -> dict[Share, float]:
        """Return the virtual start time of each share's next request; ties go by order."""
        return {
            share: max(self._next_start.get(share, 0.0), self._virtual_time) for share in shares
        }

    def charge(self, tenant: ClaimedTenant, share: Share, seconds: float) -> None:
        """Charge an admitted request of ``tenant`` to ``share``."""
        start = max(self._next_start.get(share, 0.0), self._virtual_time)
        self._virtual_time = max(self._virtual_time, start)
        self._next_start[share] = start + seconds
        # Shares at or below the floor start at the floor anyway.
        if len(self._next_start) > 2 * SEPARATE_SHARES:
            self._next_start = {
                t: work for t, work in self._next_start.items() if work > self._virtual_time
            }
        self._remember(tenant, seconds)

    def _remember(self, tenant: ClaimedTenant, seconds: float) -> None:
        self._served_s[tenant] = self._served_s.get(tenant, 0.0) + seconds
        self._since_fade += seconds
        if self._since_fade > FADE_S:
            self._since_fade = 0.0
            self._served_s = {
                name: work / 2 for name, work in self._served_s.items() if work > _FORGOTTEN_S
            }
            self._vouched = any(isinstance(name, Vouched) for name in self._served_s)
            self._separate_shares = self._most_served()
        if len(self._served_s) > REMEMBERED:  # several at once: each new name would cost a search
            kept = nlargest(REMEMBERED - SEPARATE_SHARES, self._served_s, key=self._importance)
            self._served_s = {name: self._served_s[name] for name in kept}
        if isinstance(tenant, Vouched):
            self._vouched = True
        if tenant not in self._separate_shares or (
            self._vouched and PUBLIC in self._separate_shares
        ):
            self._separate_shares = self._most_served()

    def _most_served(self) -> set[ClaimedTenant]:
        """Return the tenants with a separate share."""
        served = [name for name in self._served_s if isinstance(name, Vouched) or not self._vouched]
        largest = set(nlargest(SEPARATE_SHARES, served, key=self._importance))
        return largest if self._vouched else {*largest, PUBLIC}

    def _importance(self, tenant: ClaimedTenant) -> tuple[bool, float, str]:
        vouched = isinstance(tenant, Vouched)
        name = tenant.tenant if isinstance(tenant, Vouched) else tenant
        return vouched, self._served_s[tenant], name or ""


def next_share(starts: Mapping[Share, float]) -> Share:
    """Return the share to serve next."""
    return min(starts, key=starts.__getitem__)
