"""Prefill seconds of a trace's requests, each alone, under a profile."""

from __future__ import annotations

from collections.abc import Sequence

from canopy_lab.sim.system.engine_profile import EngineProfile
from canopy_lab.trace.record import TraceRequest

STEP_TOKENS = 8192
"""SGLang's default ``--chunked-prefill-size``."""


class PrefillSeconds:
    """Seconds of prefill of one trace under ``profile``."""

    def __init__(self, profile: EngineProfile, trace: Sequence[TraceRequest]) -> None:
        self.depth_scale = profile.depth_scale(STEP_TOKENS)
        self._profile, self._trace = profile, trace
        self._pairs = profile.pair_s()

    def of(self, uncached_tokens: Sequence[int]) -> float:
        """Return the sum over requests with these uncached tokens; each computes one or more."""
        total = 0.0
        for record, left in zip(self._trace, uncached_tokens, strict=True):
            new = max(left, 1)
            context = max(record.input_tokens - new, 0)
            total += self._profile.prefill_batch_s([(new, context)], self._pairs)
        return total
