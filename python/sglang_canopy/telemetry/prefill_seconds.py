"""Prefill seconds that hits saved, by the server's own fit of prefill times."""

from __future__ import annotations

import math
from typing import Any

from sglang_canopy.telemetry.metric import reported

METRICS = (
    reported(
        "prefill_saved_seconds_total",
        "prefill.saved_s",
        "seconds of prefill that hits on any tier saved, by the fitted times of this server's own "
        "batches; time to load them is not deducted",
    ),
    reported(
        "prefill_computed_seconds_total",
        "prefill.computed_s",
        "seconds of prefill of the prompt tokens that were not hit, by the same fit",
    ),
    reported(
        "prefill_depth_scale_tokens",
        "prefill.depth_scale_tokens",
        "depth at which a token costs twice as much to prefill as the first; measured",
    ),
)


class PrefillSeconds:
    """Sums of seconds. Tokens served before the first fit are added at that fit."""

    def __init__(self) -> None:
        self.saved_s = self.computed_s = 0.0
        self._counted = (0, 0, 0, 0)

    def add(self, sums: tuple[int, int, int, int], token_s: float, pair_s: float) -> None:
        """Add the tokens served since the last call.

        ``sums``: prompt tokens, hit tokens and the squares of both, since the start. ``token_s``,
        ``pair_s``: fitted seconds of a token and of a pair of tokens.
        """
        more = [now - before for now, before in zip(sums, self._counted)]
        self._counted = sums
        prompts, hits, prompt_squares, hit_squares = more
        saved = token_s * hits + pair_s * hit_squares / 2.0
        self.saved_s += saved
        self.computed_s += max(token_s * prompts + pair_s * prompt_squares / 2.0 - saved, 0.0)


def status_of(seconds: PrefillSeconds, depth_scale: float) -> dict[str, Any] | None:
    """Return the sums as JSON data; ``None`` before the first fit."""
    if math.isinf(depth_scale):
        return None
    return {
        "saved_s": round(seconds.saved_s, 3),
        "computed_s": round(seconds.computed_s, 3),
        "depth_scale_tokens": round(depth_scale),
    }
