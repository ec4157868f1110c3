"""Fair shares between tenants, in seconds of work.

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) with predicted seconds as packet lengths:
the share with the least work received is served next. Like deficit round robin, it keeps two
backlogged shares within one request of each other; unlike it, it needs no quantum and tolerates
service out of order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from sglang_canopy.tenant import UNVOUCHED, Vouched

SEPARATE_SHARES = 64
"""Maximum tenants with a separate share: those served last."""
REST, VOUCHED_REST = ("rest", None), ("rest", "vouched")
"""Shares of all other tenants, and of all other vouched ones; no tenant's name is such a tuple."""
Share = Hashable


class FairShares:
    """Work received by each share.

    Tenants are those that ``tenant.ChargedTenants`` returns: a tenant that a gateway vouches for has a
    separate share at once, unless ``SEPARATE_SHARES`` others have one. Another new name shares ``REST``,
    and gets a separate share once it has been served. That is fair between clients that use one name
    each, but no protection from a client that uses many.
    """

    def __init__(self) -> None:
        self._separate: dict[Hashable, None] = {}
        """Tenants with a separate share, the one served last at the end."""
        self._next_start: dict[Share, float] = {}
        """Share -> virtual start time, in seconds."""
        self._virtual_time = 0.0
        """Virtual start time of the last request served."""

    def share_of(self, tenant: Hashable) -> Share:
        """Return the share of a new request."""
        if tenant is None or tenant == UNVOUCHED or tenant in self._separate:
            return tenant
        if not isinstance(tenant, Vouched):
            return REST
        vouched = sum(isinstance(name, Vouched) for name in self._separate)
        return tenant if vouched < SEPARATE_SHARES else VOUCHED_REST

    def starts(self, shares: Iterable[Share]) -> dict[Share, float]:
        """Return the virtual start time of each share's next request; ties go by order."""
        return {
            share: max(self._next_start.get(share, 0.0), self._virtual_time) for share in shares
        }

    def charge(self, tenant: Hashable, share: Share, seconds: float) -> None:
        """Charge an admitted request of ``tenant`` to ``share``."""
        self._virtual_time = max(self._next_start.get(share, 0.0), self._virtual_time)
        self._next_start[share] = self._virtual_time + seconds
        # Other shares start at the virtual time anyway.
        if len(self._next_start) > 2 * SEPARATE_SHARES:
            self._next_start = {
                share: start
                for share, start in self._next_start.items()
                if start > self._virtual_time
            }
        self._separate.pop(tenant, None)
        self._separate[tenant] = None
        if len(self._separate) > SEPARATE_SHARES:
            del self._separate[next(iter(self._separate))]
