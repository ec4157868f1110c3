"""Result of a system simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemResult:
    """Times are simulated seconds. Hits are tokens of the longest cached prefix."""

    requests: int
    mean_ttft_s: float
    """From arrival to the first token."""
    p50_ttft_s: float
    p90_ttft_s: float
    p99_ttft_s: float
    mean_tpot_s: float
    """Seconds per token after the first, mean over requests with two tokens or more."""
    mean_e2e_s: float
    throughput_tokens_per_s: float
    """Prompt and output tokens over the makespan."""
    output_tokens_per_s: float
    makespan_s: float
    """From the first arrival to the last token."""
    token_hit_ratio: float
    token_hit_ratio_by_tier: Mapping[str, float]
    """By source: ``device``, ``host``, ``disk``."""
    mean_bytes_by_tier: Mapping[str, float]
    """Cached and running KV, averaged over the makespan, summed over instances."""
    peak_bytes_by_tier: Mapping[str, float]
    host_written_bytes: float
    disk_read_bytes: float
    disk_written_bytes: float
    prefill_s_saved_by_tier: Mapping[str, float]
    """Prefill seconds saved by each tier's tokens, each request priced alone. Higher tiers count
    first; transfer time is not deducted."""
    mean_queue_s: float
    """From arrival to the first prefill step."""
    peak_queue_length: int
    busy_share: float
    """Share of the makespan spent computing, mean over instances."""
    retracted: int
    """Retractions for lack of device memory."""
    events: int
    seconds: float
    """Wall time of the simulation."""
    ttft_s: np.ndarray = field(repr=False)
    """One entry per request, in trace order."""
    e2e_s: np.ndarray = field(repr=False)
    cached_tokens: np.ndarray = field(repr=False)
    due_s: np.ndarray = field(repr=False)
    """Arrival time of each request."""
    prompt_tokens: np.ndarray = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return all fields except the arrays."""
        arrays = ("ttft_s", "e2e_s", "cached_tokens", "due_s", "prompt_tokens")
        fields = {n: getattr(self, n) for n in type(self).__slots__ if n not in arrays}
        return {n: dict(v) if isinstance(v, Mapping) else v for n, v in fields.items()}
