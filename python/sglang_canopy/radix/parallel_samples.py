"""Recognise the parallel samples of one request (n > 1).

SGLang sends such a request to the scheduler n + 1 times, with one stamp: first a warm-up that
computes the prompt, then, after its answer, n copies. They are learnt and counted as one request.
The launching process imports this file, which therefore imports nothing of SGLang.
"""

from __future__ import annotations

from sglang_canopy.bounded import BoundedByTenant
from sglang_canopy.radix.live_request import LiveRequest

MAX_WARM_UPS, MAX_TENANT_WARM_UPS = 1024, 128
"""Warm-ups remembered, in all and per tenant. Samples of a forgotten warm-up count as requests."""


class ParallelSamples:
    """Warm-ups with outstanding samples."""

    def __init__(self) -> None:
        self._warm_ups: BoundedByTenant[tuple[float, int], LiveRequest] = BoundedByTenant(
            MAX_WARM_UPS, MAX_TENANT_WARM_UPS
        )
        self._outstanding_samples: dict[tuple[float, int], int] = {}
        """Outstanding samples of each warm-up."""

    def __len__(self) -> int:
        return len(self._outstanding_samples)

    def register(self, request: LiveRequest) -> None:
        """Remember a warm-up, or attach a sample to its warm-up. Call once per grouped request."""
        if request.sample_group is None:
            return
        warm_up = self._warm_ups.get(request.tenant, request.sample_group)
        if warm_up is not None:
            announced_samples, request.warm_up, request.pending_samples = (
                request.pending_samples,
                warm_up,
                0,
            )
            # A sample counts as its warm-up: their nodes are used once, at one time.
            request.number, request.time = warm_up.number, warm_up.time
            # The warm-up of an equal prompt of the same batch announces samples of its own.
            self._outstanding_samples[request.sample_group] += announced_samples or -1
            if not self._outstanding_samples[request.sample_group]:
                self._warm_ups.pop(request.tenant, request.sample_group)
                del self._outstanding_samples[request.sample_group]
        elif request.pending_samples:
            self._outstanding_samples[request.sample_group] = request.pending_samples
            for dropped in self._warm_ups.put(request.tenant, request.sample_group, request):
                del self._outstanding_samples[dropped.key]
