"""A profile's costs in the form the simulator asks for them: fast, and a segment at a time."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_canopy.sim.system.profile import EngineProfile


class Costs:
    """Seconds of steps, from ``profile``."""

    def __init__(self, profile: EngineProfile) -> None:
        self._profile = profile
        self.kv_bytes = profile.kv_bytes_per_token
        self._decode: dict[int, list[tuple[float, float]]] = {}

    def prefill(self, requests: Sequence[tuple[int, int]]) -> float:
        """A prefill step of requests ``(new tokens, context tokens)``."""
        return self._profile.prefill_batch_s(requests)

    def decode(self, batch: int, context: float, steps: int) -> float:
        """``steps`` decode steps of a batch whose requests have ``context`` tokens on average.

        A step costs (piecewise) linearly in the context, which grows by one a step: the sum is
        that of the middle step.
        """
        return steps * self._profile.decode_s(batch, context + (steps - 1) / 2)

    def overlapped(self, compute: float, load: float) -> float:
        """A prefill step whose KV comes from the host layer by layer, each layer's before its
        compute: whichever is slower, plus one layer of the other."""
        layers = self._profile.layers
        return max(compute + load / layers, load + compute / layers)
