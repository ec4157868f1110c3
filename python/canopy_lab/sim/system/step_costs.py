"""Step costs of a profile, prepared for fast lookup by the simulator."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from canopy_lab.sim.system.engine_profile import EngineProfile


class Costs:
    """Step costs in seconds, from ``profile``."""

    def __init__(self, profile: EngineProfile) -> None:
        self._profile = profile
        self.kv_bytes = profile.kv_bytes_per_token
        self._decode: dict[int, tuple[list[float], list[float], list[float]]] = {}

    def prefill(self, requests: Sequence[tuple[int, int]]) -> float:
        return self._profile.prefill_batch_s(requests)

    def marginal(self, new_tokens: int, context_tokens: int, step_tokens: int) -> float:
        """Return the marginal cost of ``new_tokens`` in full steps of ``step_tokens``."""
        share = new_tokens / step_tokens
        linear_s = share * self._profile.linear_s(step_tokens)
        alone_s = self._profile.prefill_batch_s([(new_tokens, context_tokens)])
        return linear_s + alone_s - self._profile.linear_s(new_tokens)

    def decode(self, batch: int, context: float, steps: int) -> float:
        """Return the cost of ``steps`` decode steps at a mean context of ``context`` tokens.

        A step's cost is piecewise linear in the context, which grows by one per step; the sum uses
        the middle step.
        """
        decode_line = self._decode.get(batch)
        if decode_line is None:
            decode_line = self._decode[batch] = self._line(batch)
        lengths, values, slopes = decode_line
        middle = context + (steps - 1) / 2
        i = bisect_right(lengths, middle, 1) - 1
        return steps * max(values[i] + slopes[i] * (middle - lengths[i]), 0.0)

    def overlapped_s(self, compute: float, load: float) -> float:
        """Return the time of a prefill step that loads KV from the host layer by layer.

        Loading and computing overlap: the slower of both, plus one layer of the other.
        """
        layers = self._profile.layers
        return max(compute + load / layers, load + compute / layers)

    def _line(self, batch: int) -> tuple[list[float], list[float], list[float]]:
        """Return points and slopes of a decode step's cost over the context, for one batch size."""
        lengths = list(self._profile.decode_context_tokens)
        values = [self._profile.decode_s(batch, length) for length in lengths]
        slopes = [
            (v - u) / (d - c)
            for (c, d), (u, v) in zip(pairwise(lengths), pairwise(values), strict=True)
        ]
        return lengths, values, [*slopes, slopes[-1] if slopes else 0.0]
