"""Times of a scheduler's batches, for the cost model."""

from __future__ import annotations

import time
from typing import Any

from sglang_canopy.schedule.prefill_cost import REFIT_BATCHES, Prefill


class PrefillTimes:
    """The time of each batch since the previous batch ended."""

    def __init__(self) -> None:
        self.done_at = 0.0
        """Time on the monotonic clock."""
        self.prefills = 0
        """Prefill batches so far; equal on all ranks."""
        self.decoded_s: float | None = None
        """Seconds of the latest batch, if it only decoded."""

    @property
    def refit_due(self) -> bool:
        """Whether to fit the cost model after this prefill batch."""
        return self.prefills % REFIT_BATCHES == 0

    def of(self, batch: Any) -> tuple[list[Prefill], float] | None:
        """Return the prefills of a computed batch, and its seconds; ``None`` for a batch that only
        decoded. Call it for every batch."""
        # A batch may be launched while the previous one still runs.
        now, since = time.monotonic(), max(self.done_at, batch.launch_ts or 0.0)
        self.done_at = now
        self.decoded_s = now - since if batch.forward_mode.is_decode() else None
        if not batch.forward_mode.is_extend() or not batch.extend_lens:
            return None
        self.prefills += 1
        parts = [
            Prefill(new, cached, _loaded(req, cached))
            for req, new, cached in zip(
                batch.reqs, batch.extend_lens, batch.prefix_lens, strict=False
            )
        ]
        return parts, now - since


def _loaded(req: Any, cached: int) -> int:
    """Return the tokens of ``req`` that were loaded from the host for this batch."""
    # Later chunks of a prompt begin beyond the matched prefix.
    first = cached <= req.num_matched_prefix_tokens
    return min(req.host_loaded_length, cached) if first else 0
