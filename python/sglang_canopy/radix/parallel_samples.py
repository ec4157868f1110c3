"""Recognise the parallel samples of one request (n > 1).

SGLang sends such a request to the scheduler n + 1 times, with one stamp: first a warm-up that
computes the prompt, then, after its answer, n copies. They are learnt and counted as one request.
"""

from __future__ import annotations

from sglang_canopy.radix.live_request import LiveRequest

MAX_GROUPS, TENANT_GROUPS = 1024, 128
"""Warm-ups remembered, in all and per tenant. Samples of a forgotten warm-up count as requests."""


class ParallelSamples:
    """Warm-ups with outstanding samples, oldest first."""

    def __init__(self) -> None:
        self._tenants: dict[str | None, dict[tuple[float, int], LiveRequest]] = {}
        self._left: dict[tuple[float, int], int] = {}
        """Outstanding samples of each warm-up."""

    def __len__(self) -> int:
        return len(self._left)

    def received(self, request: LiveRequest) -> None:
        """Remember a warm-up, or attach a sample to its warm-up. Call once per grouped request."""
        if request.group is None:
            return
        mine = self._tenants.get(request.tenant, {})
        first = mine.get(request.group)
        if first is not None:
            more, request.first, request.samples = request.samples, first, 0
            # A sample counts as its warm-up: their nodes are used once, at one time.
            request.number, request.time = first.number, first.time
            # The warm-up of an equal prompt of the same batch announces samples of its own.
            self._left[request.group] += more or -1
            if not self._left[request.group]:
                self._drop(request.tenant, request.group)
        elif request.samples:
            self._make_room(request.tenant)
            self._tenants.setdefault(request.tenant, {})[request.group] = request
            self._left[request.group] = request.samples

    def _make_room(self, tenant: str | None) -> None:
        if len(self._tenants.get(tenant, ())) >= TENANT_GROUPS:
            most: str | None = tenant
        elif len(self._left) >= MAX_GROUPS:
            most = max(self._tenants, key=lambda name: len(self._tenants[name]))
        else:
            return
        self._drop(most, next(iter(self._tenants[most])))

    def _drop(self, tenant: str | None, group: tuple[float, int]) -> None:
        del self._left[group]
        mine = self._tenants[tenant]
        del mine[group]
        if not mine:
            del self._tenants[tenant]
