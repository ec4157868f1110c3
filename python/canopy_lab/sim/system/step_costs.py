"""Step costs of a profile, prepared for fast lookup by the simulator."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from canopy_lab.sim.system.engine_profile import EngineProfile


class StepCosts:
    """Step costs in seconds, from ``profile``."""

    def __init__(self, profile: EngineProfile) -> None:
        self._profile = profile
        self.kv_bytes = profile.kv_bytes_per_token
        self._decode_lines: dict[int, tuple[list[float], list[float], list[float]]] = {}

    def prefill_s(self, requests: Sequence[tuple[int, int]]) -> float:
        return self._profile.prefill_batch_s(requests)

    def marginal_s(self, new_tokens: int, context_tokens: int, step_tokens: int) -> float:
        """Return the marginal cost of ``new_tokens`` in full steps of ``step_tokens``."""
        step_share = new_tokens / step_tokens
        linear_s = step_share * self._profile.linear_s(step_tokens)
        alone_s = self._profile.prefill_batch_s([(new_tokens, context_tokens)])
        return linear_s + alone_s - self._profile.linear_s(new_tokens)

    def decode_s(self, batch_size: int, context_tokens: float, steps: int) -> float:
        """Return the cost of ``steps`` decode steps at a mean context of ``context_tokens`` tokens.

        A step's cost is piecewise linear in the context, which grows by one per step; the sum uses
        the middle step.
        """
        decode_line = self._decode_lines.get(batch_size)
        if decode_line is None:
            decode_line = self._decode_lines[batch_size] = self._decode_line(batch_size)
        contexts, costs_s, slopes = decode_line
        middle_tokens = context_tokens + (steps - 1) / 2
        i = bisect_right(contexts, middle_tokens, 1) - 1
        return steps * max(costs_s[i] + slopes[i] * (middle_tokens - contexts[i]), 0.0)

    def overlapped_s(self, compute_s: float, load_s: float) -> float:
        """Return the time of a prefill step that loads KV from the host layer by layer.

        Loading and computing overlap: the slower of both, plus one layer of the other.
        """
        layers = self._profile.layers
        return max(compute_s + load_s / layers, load_s + compute_s / layers)

    def _decode_line(self, batch_size: int) -> tuple[list[float], list[float], list[float]]:
        """Return points and slopes of a decode step's cost over the context, for one batch size."""
        contexts = list(self._profile.decode_context_tokens)
        costs_s = [self._profile.decode_s(batch_size, context) for context in contexts]
        slopes = [
            (v - u) / (d - c)
            for (c, d), (u, v) in zip(pairwise(contexts), pairwise(costs_s), strict=True)
        ]
        return contexts, costs_s, [*slopes, slopes[-1] if slopes else 0.0]
