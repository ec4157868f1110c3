"""Limits of ``/canopy/chunks``: the load per second that clients may put on the scheduler's thread.

A registered document is a prompt, and is encoded in idle time. A change is a message, and a read
collects counters. With an admin key only the administrator may change documents, without a limit.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from sglang_canopy.request.access import Refused
from sglang_canopy.wire.tenant_rate import TenantRate

REGISTER = 1.0, 64
"""Registrations of one tenant: per second, and in one burst."""
CHANGE = 50.0, 256
"""Pins, unpins and deletions of one tenant: per second, and in one burst."""
READ = 5.0, 20
"""Readings of counters, of all clients together: per second, and in one burst."""


class DocumentLimits:
    """The limits of one HTTP process. clock: seconds."""

    def __init__(self, is_on: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_on, self.clock = is_on, clock
        self._registered, self._changed = TenantRate(*REGISTER), TenantRate(*CHANGE)
        self._read = TenantRate(*READ)
        self._counters: dict[str, Any] | None = None

    def register(self, tenant: str | None) -> None:
        """Count a registration. Raises ``Refused`` (429) if the tenant has made too many."""
        self._count(self._registered, tenant, "registers", "documents")

    def change(self, tenant: str | None) -> None:
        """Count a pin, an unpin or a deletion. Raises ``Refused`` (429) as :meth:`register`."""
        self._count(self._changed, tenant, "makes", "changes of documents")

    async def counters(self, read: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """Return the result of ``read``, or its last result if it was called too often."""
        if self._read.take(None, self.clock()) or self._counters is None:
            self._counters = await read()
        return self._counters

    def _count(self, rate: TenantRate, tenant: str | None, verb: str, what: str) -> None:
        if self.is_on and not rate.take(tenant, self.clock()):
            raise Refused(
                429,
                f"this tenant {verb} more than {rate.per_s:g} {what} a second, with {rate.burst} at "
                "once; try again later, or start the server with --admin-api-key, which lifts this",
                retry_after_s=1,
            )
